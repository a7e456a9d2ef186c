"""From a plan as written to the cells a phone runs, in order. In: a Document. Out: telemetry.proto Plan."""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from bmoe_proto.contract.flags import BY_SPELLING
from bmoe_proto.gates import GATES
from bmoe_proto.numbers import count
from bmoe_proto.v1 import telemetry_pb2 as pb

from bmoe_collector.plans.document import Document
from bmoe_collector.plans.order import places

DEFAULT_N_PREDICT = 256
DEFAULT_TIMEOUT_S = 900


def expand(document: Document, plan_id: str | None = None) -> pb.Plan:
    """The wire's plan: every cell times its repeats in the order asked, with everything the phone needs."""
    order, seed = document.get("order", "interleaved"), document.get("seed", 0)
    kinds, repeats = zip(*_kinds(document), strict=True)
    plan = pb.Plan(
        plan_id=plan_id or secrets.token_hex(16),
        name=document.name,
        text=document.text,
        sha256=hashlib.sha256(document.text.encode()).hexdigest(),
        order=order,
        seed=seed,
        question_json=json.dumps(document.tables["question"]) if document.tables.get("question") else "",
        limits=_limits(document.tables.get("limits", {})),
        send_during_cells=document.get("send_during_cells", False),
        submitted_wall_ns=time.time_ns(),
    )
    for index, place in enumerate(places(repeats, order, seed)):
        cell = plan.cells.add()
        cell.CopyFrom(kinds[place.cell])
        cell.index, cell.repeat, cell.block = index, place.repeat, place.block
    return plan


def _kinds(document: Document) -> Iterator[tuple[pb.Cell, int]]:
    """Every distinct cell with its repeats: the matrix, then the listed ones, for every model and prompt."""
    models = list(document.get("models") or [document.get("model", "")])
    prompts = list(document.prompts) or [""]
    listed: list[Mapping[str, Any]] = [*_matrix(document), *document.cells]
    if not listed:
        listed = [{"name": document.name}]
    for number, prompt in enumerate(prompts):
        for model in models:
            for cell in listed:
                own = bool(cell.get("prompt") or cell.get("turns"))
                if own and number:
                    continue
                suffix = f" @{cell.get('model') or model}" if len(models) > 1 and not cell.get("model") else ""
                suffix += f" #{number + 1}" if len(prompts) > 1 and not own else ""
                if len(models) > 1 and cell.get("model") and model != models[0]:
                    continue
                repeats = int(cell.get("repeats") or document.get("repeats", 1))
                yield _cell(document, cell, model, prompt, suffix), repeats


def _matrix(document: Document) -> Iterator[Mapping[str, Any]]:
    matrix: Mapping[str, Sequence[Any]] = document.get("matrix", {})
    if not matrix:
        return
    for values in product(*matrix.values()):
        flags: list[str] = []
        parts = []
        for flag, value in zip(matrix, values, strict=True):
            name = flag.lstrip("-")
            if value is True:
                flags.append(flag)
                parts.append(name)
            elif value is False:
                parts.append(f"no-{name}")
            else:
                flags += [flag, str(value)]
                parts.append(f"{name}={value}")
        labels = {flag.lstrip("-"): str(value).lower() for flag, value in zip(matrix, values, strict=True)}
        yield {"name": " ".join(parts), "flags": flags, "labels": labels}


def _cell(document: Document, cell: Mapping[str, Any], model: str, prompt: str, suffix: str) -> pb.Cell:
    top = document.top
    labels = {**top.get("labels", {}), **cell.get("labels", {})}
    prepare = document.tables.get("prepare", {})
    flags, n_predict = split_n_predict([*map(str, top.get("flags", [])), *map(str, cell.get("flags", []))])
    built = pb.Cell(
        name=cell["name"] + suffix,
        engine=cell.get("engine", top.get("engine", "")),
        model=cell.get("model", model),
        flags=merged(flags),
        artifacts=cell.get("artifacts", top.get("artifacts", ["metrics"])),
        retries=cell.get("retries", top.get("retries", 1)),
        labels={key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in labels.items()},
        preheat_s=cell.get("preheat_s", prepare.get("preheat_s", 0.0)),
        unmeasured=cell.get("unmeasured", False),
        allow_unknown_flags=cell.get("allow_unknown_flags", top.get("allow_unknown_flags", False)),
        n_predict=cell.get("n_predict") or n_predict or top.get("n_predict", DEFAULT_N_PREDICT),
        stop_apps=prepare.get("stop_apps", []),
        screen_on=prepare.get("screen_on", False),
        environment={
            key: str(value) for key, value in {**top.get("environment", {}), **cell.get("environment", {})}.items()
        },
        watchdog=pb.WatchdogAsk(**{**document.tables.get("watchdog", {}), **cell.get("watchdog", {})}),
        sampling=pb.Sampling(**document.tables.get("sampling", {})),
    )
    if cell.get("turns"):
        built.turns.extend(_turn(turn) for turn in cell["turns"])
    else:
        built.prompt = str(cell.get("prompt") or prompt).encode()
    built.gates.extend(_gate(gate) for gate in cell.get("gates", document.gates))
    return built


def split_n_predict(flags: Sequence[str]) -> tuple[list[str], int | None]:
    """The flags without `-n N`, which is a cell's own value, and that value. An N that no cell can hold stays a flag, for the engine to judge."""
    kept: list[str] = []
    found: int | None = None
    rest = iter(flags)
    for word in rest:
        known = BY_SPELLING.get(word)
        if known is not None and known.name == "--n-predict":
            value = next(rest, "")
            if (asked := count(value)) and asked < 1 << 31:
                found = asked
                continue
            kept += [word, value] if value else [word]
        else:
            kept.append(word)
    return kept, found


def merged(flags: Sequence[str]) -> list[str]:
    """Flags with a later one standing for an earlier one of its name, in the place of the first."""
    groups: dict[str, list[str]] = {}
    at = 0
    while at < len(flags):
        word = flags[at]
        known = BY_SPELLING.get(word)
        name = known.name if known is not None else word
        group = [word]
        at += 1
        if known is not None:
            group += flags[at : at + known.arity]
            at += known.arity
        else:
            while at < len(flags) and not flags[at].startswith("-"):
                group.append(flags[at])
                at += 1
        groups[name] = group
    return [word for group in groups.values() for word in group]


def _turn(turn: Mapping[str, Any]) -> pb.Turn:
    built = pb.Turn(
        kind=turn["kind"],
        prompt=turn.get("prompt", ""),
        prefix=turn.get("prefix", ""),
        suffix=turn.get("suffix", ""),
        choices=turn.get("choices", []),
        idle_before_ms=round(turn.get("idle_s", 0) * 1000),
        expect_rejected=turn.get("expect_rejected", False),
    )
    for name in ("n_predict", "think", "clear_kv", "cancel_after_tokens", "reuse_prefix"):
        if name in turn:
            setattr(built, name, turn[name])
    if "cancel_after_s" in turn:
        built.cancel_after_ms = round(turn["cancel_after_s"] * 1000)
    return built


def _gate(gate: Mapping[str, Any]) -> pb.GateAsk:
    key, comparison = next(
        pair for pair in (("at_most", "<="), ("at_least", ">="), ("equals", "==")) if pair[0] in gate
    )
    return pb.GateAsk(
        gate=gate["gate"],
        comparison=comparison,
        bound=gate[key],
        unit=kind.unit if (kind := GATES.get(gate["gate"])) else "",
        timeout_s=round(gate.get("timeout_s", DEFAULT_TIMEOUT_S)),
        settle_s=round(gate.get("settle_s", 0)),
        policy=gate.get("policy", "run-flagged"),
    )


def _limits(table: Mapping[str, Any]) -> pb.Limits:
    limits = pb.Limits()
    if "total_s" in table:
        limits.total_s = table["total_s"]
    if "min_battery_pct" in table:
        limits.min_battery_pct = table["min_battery_pct"]
    if "min_free_mib" in table:
        limits.min_free_bytes = round(table["min_free_mib"] * 1048576)
    return limits
