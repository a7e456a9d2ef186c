"""A plan file as written: TOML in, a `Document` out, every mistake with its place.

Top level: `name`, `engine`, `model` or `models`, `prompt`, `prompt_file` or `prompts`, `flags`, `n_predict`, `repeats`, `order`
(`listed`, `interleaved`, `abba`, `reversed`, `random`), `seed`, `artifacts`, `retries`, `traced`, `allow_unknown_flags`,
`send_during_cells`, `environment`, and the tables `[labels]`, `[matrix]` (flag = list of values; true and false switch a flag on
and off), `[[cells]]`, `[[gates]]`, `[watchdog]`, `[limits]`, `[sampling]`, `[prepare]`, `[question]`. What stands at the top level holds
for every cell. Of a cell's own keys `repeats` and `gates` take the place of the plan's (an empty list: none), those of its `watchdog`, `labels` and
`environment` stand over the plan's one by one, and its `flags` are added. Prompt files are read here, from beside the plan. An unknown
key is an error, since a misspelt gate is a gate that is not there.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Any

from bmoe_proto.asking import ARTIFACTS, MOST_SECONDS, POLICIES

from bmoe_collector.common import UserError, read_small

ORDERS = ("listed", "interleaved", "abba", "reversed", "random")

_NUMBER = (int, float)
_TOP: Mapping[str, Any] = {
    "name": str, "engine": str, "model": str, "models": list, "prompt": str, "prompt_file": str, "prompts": list, "flags": list,
    "n_predict": int, "repeats": int, "order": str, "seed": int, "artifacts": list, "retries": int, "traced": bool,
    "allow_unknown_flags": bool, "send_during_cells": bool, "environment": dict, "labels": dict, "matrix": dict, "cells": list,
    "gates": list, "watchdog": dict, "limits": dict, "sampling": dict, "prepare": dict, "question": dict,
}  # fmt: skip
_CELL: Mapping[str, Any] = {
    "name": str, "engine": str, "model": str, "prompt": str, "prompt_file": str, "flags": list, "n_predict": int, "turns": list,
    "labels": dict, "artifacts": list, "traced": bool, "unmeasured": bool, "preheat_s": _NUMBER, "retries": int,
    "allow_unknown_flags": bool, "environment": dict, "gates": list, "watchdog": dict, "repeats": int,
}  # fmt: skip
_TURN: Mapping[str, Any] = {
    "kind": str, "prompt": str, "prompt_file": str, "n_predict": int, "think": bool, "clear_kv": bool, "idle_s": _NUMBER,
    "cancel_after_s": _NUMBER, "cancel_after_tokens": int, "prefix": str, "suffix": str, "choices": list, "reuse_prefix": bool,
    "expect_rejected": bool,
}  # fmt: skip
_GATE: Mapping[str, Any] = {
    "gate": str, "at_most": _NUMBER, "at_least": _NUMBER, "equals": _NUMBER, "timeout_s": _NUMBER, "settle_s": _NUMBER, "policy": str,
}  # fmt: skip
_WATCHDOG: Mapping[str, Any] = dict.fromkeys(
    ("load_s", "prefill_s", "decode_s", "total_s", "max_cpu_temp_c", "min_battery_pct", "grace_s"), _NUMBER
)
_LIMITS: Mapping[str, Any] = dict.fromkeys(("total_s", "min_battery_pct", "min_free_mib"), _NUMBER)
_SAMPLING: Mapping[str, Any] = {
    "period_ms": int, "residency_period_ms": int, "residency_sweep": bool, "residency_layers": bool, "host_probe_period_ms": int,
}  # fmt: skip
_PREPARE: Mapping[str, Any] = {"preheat_s": _NUMBER, "stop_apps": list, "screen_on": bool}
_QUESTION: Mapping[str, Any] = {
    "compare": list, "metric": str, "smallest_effect": _NUMBER, "keep": list, "text": str,
}  # fmt: skip

_BOUNDS = frozenset({"at_most", "at_least", "equals", "smallest_effect"})  # numbers that may be below 0
_TEXTS = frozenset({"models", "artifacts", "stop_apps", "choices"})
_MOST_NUMBER = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Document:
    """The file's content with prompt files read in; `text` is the file as written."""

    source: str
    text: str
    name: str
    top: Mapping[str, Any]
    prompts: Sequence[str] = ()
    cells: Sequence[Mapping[str, Any]] = ()
    gates: Sequence[Mapping[str, Any]] = ()
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def get(self, key: str, default: Any = None) -> Any:
        """A top-level value."""
        return self.top.get(key, default)


def shipped() -> list[str]:
    """Names of the plans that come with this program."""
    folder = resources.files("bmoe_collector.plans") / "shipped"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def shipped_text(name: str) -> str:
    """The text of a shipped plan."""
    return (resources.files("bmoe_collector.plans") / "shipped" / f"{name}.toml").read_text("utf-8")


def read_plan(source: str | Path) -> Document:
    """Read a plan file, or a shipped plan by its name.

    Raises:
        UserError: no such file, no TOML, or the content is not a plan's; says where.
    """
    path = Path(source)
    if not path.exists() and str(source) in shipped():
        return parse_plan(shipped_text(str(source)), str(source), None)
    try:
        data = read_small(path)
    except OSError as error:
        hint = f"; shipped plans are {', '.join(shipped())}" if path.suffix != ".toml" else ""
        raise UserError(f"{path}: cannot be read: {error.strerror}{hint}") from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8 text: {error.reason} at byte {error.start}") from error
    return parse_plan(text, str(path), path.parent)


def parse_plan(text: str, source: str, folder: Path | None) -> Document:
    """A plan from its text; prompt files are looked for in `folder`.

    Raises:
        UserError: as `read_plan`.
    """
    try:
        top = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UserError(f"{source}: is not TOML: {error}") from error
    reader = _Reader(source, folder)
    reader.table(top, _TOP, "the plan")
    tables = {}
    for name, known in (
        ("watchdog", _WATCHDOG), ("limits", _LIMITS), ("sampling", _SAMPLING), ("prepare", _PREPARE), ("question", _QUESTION)
    ):  # fmt: skip
        tables[name] = reader.table(top.get(name, {}), known, f"[{name}]")
    cells = [reader.cell(cell, f"[[cells]] {at + 1}") for at, cell in enumerate(top.get("cells", []))]
    gates = [reader.gate(gate, f"[[gates]] {at + 1}") for at, gate in enumerate(top.get("gates", []))]
    name = top.get("name") or Path(source).stem
    reader.one_of("order", top.get("order", "interleaved"), ORDERS)
    for place, owner in (("the plan", top), *((f"cell {cell.get('name')}", cell) for cell in cells)):
        for artifact in owner.get("artifacts", []):
            reader.one_of(f"{place}: artifacts", artifact, tuple(ARTIFACTS))
    reader.matrix(top.get("matrix", {}))
    reader.words(top.get("flags", []), "flags")
    reader.pairs(top.get("labels", {}), "[labels]")
    reader.pairs(top.get("environment", {}), "[environment]")
    reader.positive(top, "the plan", "repeats", "n_predict")
    if top.get("retries", 0) < 0 or top.get("retries", 0) > 20:
        reader.fail("retries: between 0 and 20")
    if top.get("seed", 0) < 0 or top.get("seed", 0) >= 1 << 63:
        reader.fail("seed: a whole number from 0")
    if top.get("repeats", 1) > 1000:
        reader.fail("repeats: at most 1000")
    return Document(source, text, str(name), top, reader.prompts(top), cells, gates, tables)


class _Reader:
    def __init__(self, source: str, folder: Path | None) -> None:
        self.source = source
        self.folder = folder

    def fail(self, what: str) -> None:
        raise UserError(f"{self.source}: {what}")

    def one_of(self, place: str, value: Any, known: Sequence[str]) -> None:
        if value not in known:
            near = get_close_matches(str(value), known, n=1)
            self.fail(
                f"{place}: {value!r} is not one of {', '.join(known)}" + (f"; did you mean {near[0]}?" if near else "")
            )

    def table(self, table: Any, known: Mapping[str, Any], place: str) -> Mapping[str, Any]:
        if not isinstance(table, dict):
            self.fail(f"{place}: a table is wanted, not {table!r}")
        for key, value in table.items():
            if key not in known:
                near = get_close_matches(key, known, n=1)
                self.fail(
                    f"{place}: no such key `{key}`"
                    + (f"; did you mean `{near[0]}`?" if near else f"; known are {', '.join(known)}")
                )
            wanted = known[key]
            if (isinstance(value, bool) and wanted is not bool) or not isinstance(value, wanted):
                names = " or ".join(kind.__name__ for kind in (wanted if isinstance(wanted, tuple) else (wanted,)))
                self.fail(f"{place}: {key} = {value!r}: {names} is wanted")
            if isinstance(value, float) and value - value != 0:
                self.fail(f"{place}: {key}: a finite number is wanted")
            if isinstance(value, int | float) and not isinstance(value, bool) and key != "seed":
                least, most = (
                    (-_MOST_NUMBER if key in _BOUNDS else 0),
                    (MOST_SECONDS if key.endswith("_s") else _MOST_NUMBER),
                )
                if not least <= value <= most:
                    self.fail(f"{place}: {key}: a number from {least} to {most} is wanted")
            if key in _TEXTS and not all(isinstance(item, str) for item in value):
                self.fail(f"{place}: {key}: a list of texts is wanted")
        found: Mapping[str, Any] = table
        return found

    def positive(self, table: Mapping[str, Any], place: str, *keys: str) -> None:
        for key in keys:
            if key in table and not 0 < table[key] < 1 << 31:
                self.fail(f"{place}: {key} = {table[key]}: must be above 0")

    def words(self, values: Sequence[Any], place: str) -> list[str]:
        if not all(isinstance(value, str | int | float) and not isinstance(value, bool) for value in values):
            self.fail(f"{place}: a list of words and numbers is wanted, as on a command line")
        if any("\0" in str(value) for value in values):
            self.fail(f"{place}: a NUL cannot be on a command line")
        return [str(value) for value in values]

    def pairs(self, table: Mapping[str, Any], place: str) -> None:
        for key, value in table.items():
            if not isinstance(value, str | int | float | bool):
                self.fail(f"{place}: {key}: text, a number or true/false is wanted")

    def matrix(self, table: Mapping[str, Any]) -> None:
        count = 1
        for flag, values in table.items():
            if not flag.startswith("-"):
                self.fail(f"[matrix]: `{flag}`: the keys are flags, written with their dashes")
            if not isinstance(values, list) or not values:
                self.fail(f"[matrix]: {flag}: a list of values is wanted")
            if not all(isinstance(value, str | int | float | bool) for value in values):
                self.fail(f"[matrix]: {flag}: values are numbers, words, true or false")
            if len({str(value) for value in values}) < len(values):
                self.fail(f"[matrix]: {flag}: the same value twice")
            count *= len(values)
            if count > 10_000:
                self.fail("[matrix]: more than 10,000 cells")

    def cell(self, cell: Any, place: str) -> Mapping[str, Any]:
        self.table(cell, _CELL, place)
        if not cell.get("name"):
            self.fail(f"{place}: a cell needs a name")
        place = f"cell {cell['name']}"
        if "/" in cell["name"] or not cell["name"].isprintable():
            self.fail(f"{place}: a cell's name is printable and has no slash")
        self.words(cell.get("flags", []), f"{place}: flags")
        self.pairs(cell.get("labels", {}), f"{place}: labels")
        self.pairs(cell.get("environment", {}), f"{place}: environment")
        self.positive(cell, place, "n_predict", "repeats")
        if cell.get("repeats", 1) > 1000:
            self.fail(f"{place}: repeats: at most 1000")
        self.table(cell.get("watchdog", {}), _WATCHDOG, f"{place}: watchdog")
        found = dict(cell)
        if "gates" in cell:
            found["gates"] = [self.gate(gate, f"{place}: gate {at + 1}") for at, gate in enumerate(cell["gates"])]
        prompts = self.prompts(cell)
        if prompts:
            found["prompt"] = prompts[0]
        found["turns"] = [self.turn(turn, f"{place}: turn {at + 1}") for at, turn in enumerate(cell.get("turns", []))]
        if found["turns"] and prompts:
            self.fail(f"{place}: has both a prompt and turns: a session's prompts are in its turns")
        return found

    def turn(self, turn: Any, place: str) -> Mapping[str, Any]:
        self.table(turn, _TURN, place)
        kind = turn.get("kind", "generate")
        self.one_of(f"{place}: kind", kind, ("generate", "decide"))
        self.positive(turn, place, "n_predict")
        found = {**turn, "kind": kind}
        prompts = self.prompts(turn)
        if kind == "generate":
            if not prompts:
                self.fail(f"{place}: needs a prompt")
            found["prompt"] = prompts[0]
        elif prompts:
            self.fail(f"{place}: a decide request has `prefix`, `suffix` and `choices`, no prompt")
        elif not (isinstance(turn.get("choices"), list) and all(isinstance(choice, str) for choice in turn["choices"])):
            self.fail(f"{place}: a decide request needs `choices`, a list of texts")
        if {"cancel_after_s", "cancel_after_tokens"} <= turn.keys():
            self.fail(f"{place}: cancel after a time or after a number of tokens, not both")
        return found

    def gate(self, gate: Any, place: str) -> Mapping[str, Any]:
        self.table(gate, _GATE, place)
        bounds = {"at_most", "at_least", "equals"} & gate.keys()
        if not gate.get("gate") or len(bounds) != 1:
            self.fail(f"{place}: needs `gate` and exactly one of at_most, at_least, equals")
        self.one_of(f"{place}: policy", gate.get("policy", "run-flagged"), POLICIES)
        return dict(gate)

    def prompts(self, owner: Mapping[str, Any]) -> list[str]:
        given = [key for key in ("prompt", "prompt_file", "prompts") if key in owner]
        if len(given) > 1:
            self.fail(f"{' and '.join(given)}: give one of them")
        if not given:
            return []
        if given[0] == "prompt":
            return [self.prompt(owner["prompt"])]
        if given[0] == "prompt_file":
            return [self.file(owner["prompt_file"])]
        found = []
        for entry in owner["prompts"]:
            if isinstance(entry, str):
                found.append(self.prompt(entry))
            elif isinstance(entry, dict) and set(entry) == {"file"} and isinstance(entry["file"], str):
                found.append(self.file(entry["file"]))
            else:
                self.fail(f"prompts: {entry!r}: a text or {{ file = NAME }} is wanted")
        if not found:
            self.fail("prompts: the list is empty")
        return found

    def prompt(self, text: str) -> str:
        if not text:
            self.fail("a prompt is empty")
        if "\0" in text:
            self.fail("a prompt holds a NUL, which no engine can be given")
        return text

    def file(self, name: str) -> str:
        if self.folder is None:
            self.fail(f"prompt_file {name}: this plan has no folder to look in")
        path = (self.folder or Path()) / name
        try:
            text = read_small(path).decode("utf-8")
        except (OSError, UnicodeDecodeError, ValueError) as error:
            raise UserError(
                f"{self.source}: prompt_file {name}: cannot be read: {getattr(error, 'strerror', None) or error}"
            ) from error
        return self.prompt(text.removesuffix("\n"))
