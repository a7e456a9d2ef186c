"""May two sides be compared: the reasons why not, and what a reader must know when they may.

In: the runs of both sides. Out: which runs stand for each side, and sentences. Pure. The rules are the design's
("Two runs are comparable or there is a stated reason why not"): another kind of number, model file, prompt, token count, drop
rate, meaning of a column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from bmoe_collector.compare.sides import ComparedRun, Side
from bmoe_collector.compare.statistics import LEVEL, drift

KINDS = {
    "not_streaming": "the engine on mmap, without streaming",
    "stochastic": "sampled with a temperature",
    "lossy": "lossy (drop, substitution, route-ahead or a smaller top-k)",
    "speculative": "speculative",
}
"""Verdicts that make a run another kind of number."""

SETTINGS = (
    "engine", "streaming", "overlap", "threads", "io_threads", "cache_mb", "cache_auto", "dense_weights", "o_direct",
    "n_expert_used", "drop_cold_frac", "substitute_lambda", "route_ahead", "prefetch", "spec", "temp", "n_predict",
)  # fmt: skip
"""Facts that say what a run was configured to do."""

DROP_RATE_APART = 0.005
LOSSLESS_KINDS = frozenset({"lossy", "speculative", "stochastic"})


@dataclass(frozen=True, slots=True)
class Judged:
    """What of the sides can be used, why they may not be compared, and what else must be said."""

    a: tuple[ComparedRun, ...]
    b: tuple[ComparedRun, ...]
    reasons: tuple[str, ...]
    notes: tuple[str, ...]
    never: bool = False  # a reason that no --force moves


def judge_sides(
    a: Side, b: Side, keep: Callable[[ComparedRun], str | None] | None = None, *, force: bool = False
) -> Judged:
    """Choose the runs that stand for each side and say what speaks against comparing them.

    `keep` gives the reason a run breaks the keep rules that were fixed before the first run, or None.
    """
    reasons: list[str] = []
    notes: list[str] = []
    sides = []
    for name, side in (("A", a), ("B", b)):
        kept = []
        for run in side.runs:
            why = _unusable(run) or (keep(run) if keep else None)
            if why is None or (force and run.facts):
                kept.append(run)
            if why is not None:
                said = f"{name}: run {run.run_id[:8]} is {'used although' if force else 'left out:'} {why}"
                (reasons if side.named and not force else notes).append(said)
        if not kept:
            reasons.append(f"{name}: none of its {len(side.runs)} runs can be used")
        sides.append(tuple(kept))
    ours, theirs = sides
    notes.extend(warnings("A", ours) + warnings("B", theirs))
    if ours and theirs:
        if all(run.get("simulated") for run in (*ours, *theirs)):
            notes.append("simulated runs: nothing here is a measurement of any phone")
        reasons.extend(differences(ours, theirs))
        notes.extend(settings_apart(ours, theirs))
        notes.extend(_not_recorded([*ours, *theirs]))
        more_reasons, more_notes = order_of(ours, theirs)
        reasons.extend(more_reasons)
        notes.extend(more_notes)
    if {run.run_id for run in ours} & {run.run_id for run in theirs}:
        reasons.append("both sides have a run in common")
    never = bool(ours and theirs) and _values(ours, "simulated") != _values(theirs, "simulated")
    return Judged(ours, theirs, tuple(dict.fromkeys(reasons)), tuple(dict.fromkeys(notes)), never)


def _unusable(run: ComparedRun) -> str | None:
    failed = [f"{code} ({evidence})" for code, severity, evidence in run.verdicts if severity == "fail"]
    if failed:
        return "; ".join(failed)
    if run.run["outcome"] != "ok":
        return f"its outcome is {run.run['outcome']}" + (f" ({run.run['cause']})" if run.run.get("cause") else "")
    if run.run.get("unmeasured"):
        return "the plan marks it as not measured"
    if not run.facts:
        return "it was never judged: run `bmoe judge`"
    return None


def warnings(name: str, runs: Sequence[ComparedRun]) -> list[str]:
    """What a reader must have seen before using the numbers: every warning of the runs, with how many have it."""
    found: dict[str, list[str]] = {}
    for run in runs:
        for code, evidence in {
            code: evidence for code, severity, evidence in run.verdicts if severity == "warn"
        }.items():
            found.setdefault(code, []).append(evidence)
    return [
        f"{name}: {code} in {len(said)} of {len(runs)} runs: {said[0]}" + (" …" if len(set(said)) > 1 else "")
        for code, said in found.items()
    ]


def settings_apart(a: Sequence[ComparedRun], b: Sequence[ComparedRun]) -> list[str]:
    """The resolved settings that differ between the sides: what is compared, and what crept in beside it.

    The same argv is not the same experiment in every build (generations.md), so these are the values the engine settled on.
    """
    said = []
    for name in SETTINGS:
        ours, theirs = ({run.facts.get(name) for run in side} - {None} for side in (a, b))
        if name == "cache_mb" and all(run.facts.get("cache_auto") for run in (*a, *b)):
            continue  # sized by the engine at each load
        if ours and theirs and ours != theirs:
            said.append(f"{name} {_listed(map(_shown, ours))} in A, {_listed(map(_shown, theirs))} in B")
    return [f"settings that differ: {'; '.join(said)}"] if said else []


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(int(value) if isinstance(value, bool) else value)


def _not_recorded(both: Sequence[ComparedRun]) -> list[str]:
    """What should be the same and cannot be said to be."""
    blind = sum(run.run.get("prompt_sha256") is None for run in both)
    if not blind:
        return []
    return [f"the prompt of {blind} of {len(both)} runs is not recorded: whether it is the same is not known"]


def _values(runs: Iterable[ComparedRun], name: str) -> set[Any]:
    return {run.get(name) for run in runs} - {None}


def differences(a: Sequence[ComparedRun], b: Sequence[ComparedRun]) -> list[str]:
    """Reasons two groups of usable runs are not one kind of number about one thing."""
    both = [*a, *b]
    reasons = []
    for code, words in KINDS.items():
        counts = [sum(code in run.codes for run in side) for side in (a, b)]
        if counts[0] in {0, len(a)} and counts[1] in {0, len(b)} and bool(counts[0]) == bool(counts[1]):
            continue
        reasons.append(
            f"different kinds of number: {counts[0]} of {len(a)} runs of A and {counts[1]} of {len(b)} of B are {words}"
        )
    if len(_values(both, "simulated")) > 1:
        reasons.append("a simulated run is never comparable with a real one")
    if "speculative" in both[0].codes and len(_values(both, "spec")) > 1:
        reasons.append(f"different draft sources: {_listed(_values(both, 'spec'))}")
    widths = _values(both, "n_expert_used")
    if len(widths) > 1 and not any("lossy" in run.codes for run in both):
        reasons.append(f"different top-k: {_listed(widths)} (at most one of them is the model's own)")
    reasons.extend(_model(both))
    reasons.extend(_differ(both, "prompt_sha256", "different prompts", show=False))
    reasons.extend(_differ(both, "session", "one side is a session, the other one-shot runs", show=False))
    reasons.extend(_differ(both, "n_tokens", "different token counts"))
    rates = _values(both, "drop_rate")
    if rates and max(rates) - min(rates) > DROP_RATE_APART:
        reasons.append(f"different drop rates: from {min(rates):.2%} to {max(rates):.2%}")
    if any(run.get("overlap") for run in both):
        meanings = {run.facts.get("stall_meaning") for run in both}
        if None in meanings and len(_values(both, "engine_version")) != 1:
            reasons.append(
                "what stall_ms means in one of the builds is not known (between 0.19 and 0.23, or no version)"
            )
        elif len(meanings) > 1:
            reasons.append(f"stall_ms means different things in these builds: {_listed(meanings)}")
    return reasons


def _model(both: Sequence[ComparedRun]) -> list[str]:
    identities = _values(both, "model_identity")
    if len(identities) > 1:
        return [f"different model files: {_listed(_values(both, 'model_name'))}"]
    if len(identities) == 1 and all(run.run.get("model_identity") for run in both):
        return []
    names = {str(name).rsplit("/", 1)[-1] for name in _values(both, "model_name")}
    if len(names) > 1:
        return [f"different models: {_listed(names)}"]
    return _differ(both, "model_size", "model files of different size")


def _differ(both: Sequence[ComparedRun], name: str, words: str, *, show: bool = True) -> list[str]:
    values = _values(both, name)
    if len(values) < 2:
        return []
    return [f"{words}: {_listed(values)}" if show else words]


def _listed(values: Iterable[Any]) -> str:
    shown = sorted(str(value) for value in values)
    return ", ".join(shown[:4]) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")


def order_of(a: Sequence[ComparedRun], b: Sequence[ComparedRun], metric: str = "tok_s") -> tuple[list[str], list[str]]:
    """Reasons and notes from the order the runs ran in: one side wholly before the other cannot tell order from setting."""
    notes = []
    if len(_values([*a, *b], "agent_uuid")) > 1:
        notes.append("the runs are from more than one phone")
    if len(_values([*a, *b], "boot_id")) > 1 or _days([*a, *b]) > 1:
        notes.append("the runs are from more than one day or boot: states of the phone differ between them")
    starts = [[int(start) for run in side if (start := run.run.get("started_wall_ns")) is not None] for side in (a, b)]
    if len(a) < 2 or len(b) < 2 or [len(side) for side in starts] != [len(a), len(b)]:
        return [], notes
    if not (max(starts[0]) < min(starts[1]) or max(starts[1]) < min(starts[0])):
        return [], notes
    first, second = ("A", "B") if starts[0][0] < starts[1][0] else ("B", "A")
    drifting = []
    for name, side in (("A", a), ("B", b)):
        ordered = [run.facts.get(metric) for run in sorted(side, key=lambda run: run.run["started_wall_ns"])]
        values = [value for value in ordered if isinstance(value, int | float)]
        correlation, p = drift(values)
        if p <= LEVEL:
            drifting.append(
                f"{metric} of {name} {'rises' if correlation > 0 else 'falls'} with its order (rho {correlation:+.2f}, p {p:.3f})"
            )
    said = f"every run of {first} ran before every run of {second}: order and setting cannot be told apart"
    if drifting:
        return [f"{said}, and the phone was drifting: {'; '.join(drifting)}"], notes
    return [], [*notes, f'{said}; interleave them (order = "interleaved" or "abba" in the plan)']


def _days(runs: Iterable[ComparedRun]) -> int:
    return len({int(start) // 86_400_000_000_000 for run in runs if (start := run.run.get("started_wall_ns"))})


def lossless(runs: Iterable[ComparedRun]) -> bool:
    """Whether these runs should give one text: greedy, unspeculated, nothing dropped, one top-k."""
    runs = list(runs)
    return not any(run.codes & LOSSLESS_KINDS for run in runs) and len(_values(runs, "n_expert_used")) <= 1
