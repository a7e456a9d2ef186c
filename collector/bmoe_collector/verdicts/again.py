"""The plan that runs contaminated cells again: what was recorded of them in, the text of a plan (TOML) out.

Gates, watchdog, limits, sampling and preparation are those of the plan the cells came from, as are gates and watchdog of a
cell's own; where they came from several plans each cell has its engine, gates and watchdog to itself, and the rest is of the plan most
came from. The cells are taken from the record, because a matrix may have made them. A run without a plan (imported, or single) becomes a cell from its argv. The
order is interleaved, since order is what most often contaminates. The plan asks no question: the one the first plan asked
was asked before it ran, and this one runs because of what was seen.
"""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bmoe_proto.asking import ARTIFACT_OF
from bmoe_proto.contract.flags import OUTPUTS, read_argv

FIRST_LINE = "# Cells that were judged contaminated, to be run again. Check it with `bmoe plan check`."
KEPT = ("engine", "allow_unknown_flags", "send_during_cells", "retries")
CONDITIONS = ("gates", "watchdog")
"""What a cell may have of its own too."""
KEPT_TABLES = ("watchdog", "limits", "sampling", "prepare")
_TURN_MS = {"idle_before_ms": "idle_s", "cancel_after_ms": "cancel_after_s"}
_CELL_KEYS = ("artifacts", "labels", "environment", "preheat_s", "retries")


def plan_again(runs: Sequence[Mapping[str, Any]], plan_texts: Mapping[str, str], reasons: Mapping[str, str]) -> str:
    """The plan's text.

    `runs`: rows of `runs` to be run again. `plan_texts`: text of each plan by its id. `reasons`: run id to the evidence.
    Raises ValueError when there is nothing to run again, or a run tells too little of itself.
    """
    if not runs:
        raise ValueError("no run is contaminated: there is nothing to run again")
    cells: dict[str, dict[str, Any]] = {}
    counts: Counter[str] = Counter()
    why: dict[str, str] = {}
    origin: dict[str, str] = {}
    for run in runs:
        cell = _from_argv(run) if run.get("source") == "import" else _from_asked(run)
        name = cell["name"]
        if name in cells and {**cells[name], "name": ""} != {**cell, "name": ""}:
            name = cell["name"] = f"{name} {str(run['run_id'])[:8]}"
        cells.setdefault(name, cell)
        counts[name] += 1
        why.setdefault(name, reasons.get(str(run["run_id"]), ""))
        origin.setdefault(name, str(run.get("plan_id") or ""))
    common = _common(run.get("plan_id") for run in runs)
    sources = {plan: _parsed(plan_texts.get(plan, "")) for plan in {*origin.values(), common or ""}}
    source = dict(sources[common or ""])
    several = len(set(origin.values())) > 1
    if several:  # what a plan says of all its cells must not reach those of another
        for key in ("engine", *CONDITIONS):
            source.pop(key, None)
    names = sorted({str(run["plan_name"]) for run in runs if run.get("plan_name")})
    top: dict[str, Any] = {"name": f"{' and '.join(names) or 'contaminated runs'} again"[:120]}
    top |= {key: source[key] for key in KEPT if key in source}
    top |= {"order": "interleaved", "repeats": max(counts.values())}
    for name, cell in cells.items():
        if counts[name] != top["repeats"]:
            cell["repeats"] = counts[name]
    if any(set(cell.get("artifacts", ())) - {"metrics"} for cell in cells.values()):
        top["traced"] = True
    lines = [FIRST_LINE, *_pairs(top)]
    for table in KEPT_TABLES:
        if isinstance(source.get(table), Mapping) and source[table]:
            lines += ["", f"[{table}]", *_pairs(source[table])]
    for gate in source.get("gates", ()):
        lines += ["", "[[gates]]", *_pairs(gate)]
    for name, cell in cells.items():
        theirs = sources[origin[name]]
        if several:
            cell |= {key: theirs[key] for key in ("engine", *CONDITIONS) if theirs.get(key) and key not in cell}
        own = _own_conditions(theirs, name)
        if several and "watchdog" in own:
            own["watchdog"] = {**(theirs.get("watchdog") or {}), **own["watchdog"]}
        cell |= own
        lines += ["", *(f"# {line}" for line in _comment(why[name])), "[[cells]]", *_pairs(cell)]
    return "\n".join(lines) + "\n"


def _own_conditions(source: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Gates and watchdog that the plan gave this cell alone; a cell of several models or prompts has a longer name than there."""
    listed = source.get("cells")
    for cell in listed if isinstance(listed, list) else ():
        own = cell.get("name") if isinstance(cell, Mapping) else None
        if own and (name == own or name.startswith((f"{own} @", f"{own} #"))):
            return {key: cell[key] for key in CONDITIONS if key in cell}
    return {}


def _common(plan_ids: Iterable[Any]) -> str | None:
    """The plan most of the runs come from."""
    found = Counter(str(plan_id) for plan_id in plan_ids if plan_id)
    return found.most_common(1)[0][0] if found else None


def _parsed(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError):
        return {}


def _comment(text: str) -> list[str]:
    """A reason as comment lines: printable, on one line each."""
    return ["".join(character if character.isprintable() else " " for character in text)] if text else []


def _from_asked(run: Mapping[str, Any]) -> dict[str, Any]:
    """A cell as it was asked of the phone."""
    asked = run.get("asked") or {}
    cell: dict[str, Any] = {"name": asked.get("name") or run.get("cell") or str(run["run_id"])[:8]}
    for key in ("engine", "model"):
        if asked.get(key):
            cell[key] = asked[key]
    prompt = run.get("prompt")
    turns = [_turn(turn) for turn in asked.get("turns", ())]
    if turns:
        cell["turns"] = turns
    elif prompt:
        cell["prompt"] = prompt.decode("utf-8", "replace") if isinstance(prompt, bytes) else str(prompt)
    cell["flags"] = list(asked.get("flags", ()))
    if asked.get("n_predict"):
        cell["n_predict"] = int(asked["n_predict"])
    cell |= {key: asked[key] for key in _CELL_KEYS if asked.get(key)}
    if asked.get("allow_unknown_flags"):
        cell["allow_unknown_flags"] = True
    return cell


def _turn(turn: Mapping[str, Any]) -> dict[str, Any]:
    """A session's turn in a plan's own units."""
    found: dict[str, Any] = {}
    for key, value in turn.items():
        if key in _TURN_MS:
            found[_TURN_MS[key]] = value / 1e3
        elif value not in ("", []):
            found[key] = value
    return found


def _from_argv(run: Mapping[str, Any]) -> dict[str, Any]:
    """A cell from the argv of a run that no plan asked for."""
    argv = [str(part) for part in run.get("argv") or ()]
    if not argv:
        raise ValueError(f"run {str(run['run_id'])[:8]} does not tell its argv: it cannot be run again from its record")
    told = read_argv(argv)
    if told.has("--session"):
        raise ValueError(f"run {str(run['run_id'])[:8]} is a session whose requests are not recorded")
    flags: list[str] = []
    artifacts: list[str] = []
    for name, value in told.values.items():
        if name in OUTPUTS:
            artifacts.append(ARTIFACT_OF[name])
        elif name not in {"--model", "--prompt", "--n-predict", "--progress", "--session"}:
            flags += [name] if value is None else [name, value]
    cell: dict[str, Any] = {"name": f"run {str(run['run_id'])[:8]}"}
    if model := told.values.get("--model"):
        cell["model"] = model.replace("\\", "/").rsplit("/", 1)[-1]
    if prompt := told.values.get("--prompt"):
        cell["prompt"] = prompt
    cell["flags"] = flags
    if told.has("--n-predict") and (count := told.number("--n-predict")):
        cell["n_predict"] = int(count)
    if artifacts:
        cell["artifacts"] = artifacts
    return cell


def _pairs(table: Mapping[str, Any]) -> list[str]:
    return [f"{_key(key)} = {_value(value)}" for key, value in table.items() if value is not None]


def _key(key: str) -> str:
    plain = key and all(part.isascii() and (part.isalnum() or part in "-_") for part in key)
    return key if plain else _string(key)


def _value(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(_pairs(value)) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    return _string(str(value))


def _string(text: str) -> str:
    """A basic string: JSON's escapes are TOML's, but for DEL, which TOML wants escaped, and lone surrogates."""
    clean = text.encode("utf-8", "replace").decode("utf-8")
    return json.dumps(clean, ensure_ascii=False).replace("\x7f", "\\u007f")
