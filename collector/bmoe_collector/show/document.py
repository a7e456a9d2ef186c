"""A run as `bmoe show --json` prints it: a RunRecord and its verdicts in, one object out.

Its keys are an interface (design, "Interfaces that must hold"): `run`, `config`, `turns`, `report`, `artifacts`, `verdicts`,
`completeness`, and `tokens` when asked. What is derived is under `derived`, apart from what was recorded. Unmeasured is
null; token values are those of the record, where a 0 of a platform that cannot report is still a 0 (law 5 decides that in
`derived`, for the run as a whole).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from bmoe_proto.contract.columns import METRICS

from bmoe_collector.meaning.derive import Derived, TurnMeaning
from bmoe_collector.meaning.facts import facts_of
from bmoe_collector.record import RunRecord, TurnRecord
from bmoe_collector.verdicts import Verdict

NOT_TOKENS = frozenset({"boot_ns", "uncertainty_ns"})
"""Columns of the stdout rows that are the agent's, not the contract's."""

_TIMES = (
    "started_wall_ns", "ended_wall_ns", "started_boot_ns", "launched_boot_ns", "ended_boot_ns", "clock_uncertainty_ns", "boot_id",
)  # fmt: skip
_PLAN = (
    "plan_id",
    "plan_name",
    "plan_sha256",
    "cell",
    "cell_index",
    "repeat",
    "block",
    "attempt",
    "unmeasured",
    "question",
)


def document(
    record: RunRecord, derived: Derived, verdicts: Sequence[Verdict], *, tokens: bool = False, problems: Any = None
) -> dict[str, Any]:
    """The whole object."""
    found: dict[str, Any] = {
        "run": run_object(record),
        "config": dict(record.preamble),
        "turns": [turn_object(turn) for turn in record.turns],
        "report": [
            {"event": "report", "name": line.name, "facts": dict(line.facts), "text": line.text, "turn": line.turn}
            for line in record.report
        ],
        "artifacts": [
            {"name": one.name, "kind": one.kind, "size": one.size, "sha256": one.sha256} for one in record.artifacts
        ],
        "verdicts": [verdict.to_json() for verdict in verdicts],
        "completeness": {"complete": bool(record.completeness.get("complete")), "reasons": [], **record.completeness},
        "derived": derived_object(record, derived),
        "ready": dict(record.ready),
        "gates": [asdict(gate) for gate in record.gates],
        "residency": [asdict(look) for look in record.residency],
        "notes": [asdict(note) for note in record.notes],
        "other": list(record.others),
        "sidecar": dict(record.sidecar),
        "observer": dict(record.observer),
        "problems": problems if problems is not None else record.run.get("problems") or [],
    }
    if tokens:
        found["tokens"] = token_objects(record)
    return found


def run_object(record: RunRecord) -> dict[str, Any]:
    """Who, what, when and how it ended."""
    run = record.run
    prompt = run.get("prompt")
    return {
        "id": record.run_id,
        "source": run.get("source"),
        "outcome": run.get("outcome"),
        "cause": run.get("cause"),
        "evidence": run.get("evidence") or [],
        "exit": run.get("exit_code"),
        "signal": run.get("signal"),
        "exit_observed": bool(run.get("exit_observed")),
        "simulated": bool(run.get("simulated")),
        "device": _facts(run, "device", name="device_name", model="device_model", agent_uuid="agent_uuid"),
        "engine": _facts(run, "engine", name="engine_name", version="engine_version", sha256="engine_sha256"),
        "model": _facts(
            run, "model", name="model_name", arch="model_arch", size="model_size", identity="model_identity"
        ),
        "argv": [str(part) for part in run.get("argv") or ()],
        "environment": run.get("environment") or {},
        "prompt": None if prompt is None else text(prompt),
        "prompt_sha256": run.get("prompt_sha256"),
        "labels": run.get("labels") or {},
        "plan": {name: run.get(name) for name in _PLAN},
        "times": {name: run.get(name) for name in _TIMES},
        "directory": run.get("directory"),
        "tokens": run.get("n_tokens"),
        "turns": run.get("n_turns"),
    }


def _facts(run: Mapping[str, Any], key: str, **columns: str) -> dict[str, Any]:
    """The columns of one thing, and everything the phone told of it under `facts`."""
    told = run.get(key)
    return {
        **{name: run.get(column) for name, column in columns.items()},
        "facts": told if isinstance(told, Mapping) else {},
    }


def text(data: Any) -> str:
    """Bytes decoded once, as a whole: U+FFFD stands only for what is truly invalid."""
    return (
        bytes(data).decode("utf-8", "replace") if isinstance(data, (bytes, bytearray, memoryview)) else str(data or "")
    )


def turn_object(turn: TurnRecord) -> dict[str, Any]:
    """One generation, decision or rejected request."""
    return {
        "turn": turn.turn,
        "id": turn.request_id,
        "tokens": turn.tokens,
        "cancelled": turn.cancelled,
        "state": turn.state,
        "text": text(turn.text),
        "reasoning": text(turn.reasoning),
        "decide": None if turn.decide is None else dict(turn.decide),
        "error": None if turn.error is None else dict(turn.error),
        "request": None if turn.request is None else dict(turn.request),
        "summary": dict(turn.summary),
        "begin_boot_ns": turn.begin_boot_ns,
        "end_boot_ns": turn.end_boot_ns,
    }


def token_objects(record: RunRecord) -> list[dict[str, Any]]:
    """One object a token under the contract's names; the CSV's value stands where stdout gives one too."""
    rows = record.tokens()
    names = [*METRICS, *(name for name in rows.columns if name not in METRICS and name not in NOT_TOKENS)]
    columns = [rows.get(name) for name in names]
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)] if len(rows) else []


def derived_object(record: RunRecord, derived: Derived) -> dict[str, Any]:
    """What the numbers mean (`bmoe_collector.meaning` has the formulas)."""
    speed = derived.speed
    return {
        "facts": facts_of(record, derived),
        "bars": derived.bars.to_json(),
        "token_ms": None if speed.token_ms is None else speed.token_ms.to_json(),
        "steady": asdict(derived.steady),
        "unmeasured": list(derived.unmeasured),
        "stall_meaning": derived.stall_meaning,
        "turns": [_turn_meaning(turn) for turn in derived.turns],
        "entry": asdict(derived.entry),
        "exit": asdict(derived.exit),
        "speculation": asdict(derived.speculation),
        "cache": asdict(derived.cache),
        "memory": {
            name: {
                "source": curve.source,
                "first": curve.first,
                "last": curve.last,
                "min": min(curve.values),
                "max": max(curve.values),
            }
            for name, curve in derived.curves.items()
        },
    }


def _turn_meaning(meaning: TurnMeaning) -> dict[str, Any]:
    speed = meaning.speed
    return {
        "turn": meaning.turn.turn,
        "tok_s": speed.tok_s,
        "effective_tok_s": speed.effective_tok_s,
        "ttft_s": meaning.prefill.ttft_s,
        "prefill_tps": meaning.prefill.prefill_tps,
        "bars": meaning.bars.to_json(),
        "prefill_bars": meaning.prefill_bars.to_json(),
        "token_ms": None if speed.token_ms is None else speed.token_ms.to_json(),
    }
