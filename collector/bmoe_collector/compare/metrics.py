"""Every metric of one comparison: the ratio of B to A with its interval, p-value, and what these runs could have shown.

In: judged sides and how their runs replicate each other. Out: a `Metric` each, speed first. Replicates are runs; where a plan
interleaved, pairs of one block. With one run a side the interval of the rate is over its tokens, and nothing is resolved.
P-values of secondary metrics are corrected for their number, together; the primary one stands alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bmoe_collector.compare.comparable import Judged
from bmoe_collector.compare.sides import ComparedRun
from bmoe_collector.compare.statistics import LEVEL, Effect, jointly, paired, pairs_resolve, unpaired, within_run

PRIMARY = "tok_s"
SPEED = ("effective_tok_s", "steady_tok_s", "prefill_tps", "ttft_s", "token_ms_median", "token_ms_p95")
TERMS = (
    "bar_cpu_s_tok", "bar_flash_s_tok", "bar_mgmt_s_tok", "bar_unattributed_s_tok", "io_s_tok", "stall_s_tok",
    "compute_residual_s_tok", "drain_s_tok", "ra_issue_s_tok", "ra_wd_s_tok", "adopt_s_tok", "loop_overhead_s_tok",
    "read_mib_tok", "majflt_tok", "cpu_s_tok",
)  # fmt: skip
STALL_TERMS = frozenset({"stall_s_tok", "bar_flash_s_tok", "bar_unattributed_s_tok", "compute_residual_s_tok"})
"""Terms that hold `stall_ms` where reads overlap, and mean what it means."""
SUPPOSED_SD = 0.05  # of single runs on one phone, where nothing better is known (field experience: 4.7 to 5.5 %)

TokenCosts = Callable[[str], Sequence[float]]
"""Run id to the cost of each of its tokens in ms."""

Pairs = Sequence[tuple[Sequence[ComparedRun], Sequence[ComparedRun]]]
"""Runs of A and of B that ran next to each other; empty where none did."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the result: the ratio of B to A, `low` to `high` around it; None for what cannot be said, and `why`.

    `smallest_resolvable` is the least relative effect these runs would have shown, `runs_needed` how many would show this one.
    """

    metric: str
    ratio: float | None
    low: float | None
    high: float | None
    p: float | None
    resolved: bool
    smallest_resolvable: float | None
    runs_needed: int | None
    why: str = ""
    a: tuple[float, ...] = ()  # of every run that was used, by block where they are paired
    b: tuple[float, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The keys of the interface."""
        return {name: getattr(self, name) for name in self.__slots__ if name != "why" or self.why}


def metrics_of(
    judged: Judged, design: str, pairs: Pairs, costs: TokenCosts, primary: str, wanted: float | None
) -> list[Metric]:
    """Each metric with what every run of the two sides measured. `wanted` is the smallest effect that matters."""
    found = _metrics(judged, design, pairs, costs, primary, wanted)
    sides = [[run for pair in pairs for run in pair[at]] for at in (0, 1)] if pairs else [judged.a, judged.b]
    return [replace(one, a=_each(sides[0], one.metric), b=_each(sides[1], one.metric)) for one in found]


def _metrics(
    judged: Judged, design: str, pairs: Pairs, costs: TokenCosts, primary: str, wanted: float | None
) -> list[Metric]:
    names = [
        PRIMARY,
        *([primary] if primary != PRIMARY else []),
        *(name for name in (*SPEED, *TERMS) if name != primary),
    ]
    if design == "within-run":
        return [
            within(judged, costs, wanted),
            *(
                _plain_ratio(judged, name)
                for name in names[1:]
                if name == primary or (_both(judged, name) and not _hidden(judged, name))
            ),
        ]
    effects: list[tuple[str, _Found | None, str]] = []
    for name in names:
        one, why = _effect(judged, design, pairs, name, wanted if name == primary else None)
        if one is not None or name in {PRIMARY, primary} or _measured(judged, name):
            effects.append((name, one, why))
    others = [(name, one.values) for name, one, _ in effects if one is not None and name != primary]
    together = jointly([values for _, values in others], pairs=design == "paired")
    corrected = dict(zip((name for name, _ in others), together, strict=True))
    found = []
    for name, one, why in effects:
        if one is None:
            found.append(Metric(name, None, None, None, None, False, None, None, why))
            continue
        effect = one.effect
        value = corrected.get(name, effect.p) if effect.p is not None else None
        resolved = effect.can_resolve and value is not None and value <= LEVEL
        found.append(
            Metric(
                name,
                effect.ratio,
                effect.low,
                effect.high,
                value,
                resolved,
                effect.smallest_resolvable,
                effect.runs_needed,
            )
        )
    return found


def _each(runs: Sequence[ComparedRun], name: str) -> tuple[float, ...]:
    values = (run.facts.get(name) for run in runs)
    return tuple(float(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool))


@dataclass(frozen=True, slots=True)
class _Found:
    """An effect, and the values of the two sides it is of: one a pair, or one a run."""

    effect: Effect
    values: tuple[Sequence[float], Sequence[float]]


def _values(runs: Sequence[ComparedRun], name: str) -> list[float] | None:
    values = [run.facts.get(name) for run in runs]
    good = [float(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    return good if len(good) == len(values) and all(value > 0 and math.isfinite(value) for value in good) else None


def _measured(judged: Judged, name: str) -> bool:
    """Whether a metric was measured in every run and is above zero in some: worth a row even where it has no ratio."""
    values = [run.facts.get(name) for run in (*judged.a, *judged.b)]
    numbers = [value for value in values if isinstance(value, int | float)]
    return len(numbers) == len(values) and any(numbers)


def _both(judged: Judged, name: str) -> bool:
    return _values(judged.a, name) is not None and _values(judged.b, name) is not None


def _effect(
    judged: Judged,
    design: str,
    pairs: Pairs,
    name: str,
    wanted: float | None,
) -> tuple[_Found | None, str]:
    if _hidden(judged, name):
        return None, "what stall_ms means in this build is not known: it compares with nothing"
    a, b = _values(judged.a, name), _values(judged.b, name)
    if a is None or b is None:
        side = "A" if a is None else "B"
        return None, f"{name} is unmeasured or zero in a run of {side}"
    if design == "paired":
        means = [[_geometric(_values(side, name) or [1.0]) for side in pair] for pair in pairs]
        a, b = [one for one, _ in means], [other for _, other in means]
        return _Found(paired(a, b, wanted), (a, b)), ""
    return _Found(unpaired(a, b, wanted), (a, b)), ""


def _hidden(judged: Judged, name: str) -> bool:
    """A term of `stall_ms`, reads overlap, and the build may mean either by it. One binary means the same in every run."""
    if name not in STALL_TERMS:
        return False
    both = [*judged.a, *judged.b]
    unknown = any(run.get("overlap") and run.facts.get("stall_meaning") is None for run in both)
    binaries = {run.run.get("engine_sha256") for run in both}
    return unknown and (None in binaries or len(binaries) > 1)


def _geometric(values: Sequence[float]) -> float:
    return math.exp(sum(math.log(value) for value in values) / len(values))


def within(judged: Judged, costs: TokenCosts, wanted: float | None) -> Metric:
    """The rate's ratio with an interval over the tokens of one run each."""
    a, b = ([cost for run in side for cost in costs(run.run_id)] for side in (judged.a, judged.b))
    needed = _supposed_need(wanted)
    rates = [_values(side, PRIMARY) for side in (judged.a, judged.b)]
    if rates[0] is None or rates[1] is None:
        return Metric(PRIMARY, None, None, None, None, False, None, needed, "tok_s is unmeasured in a run")
    ratio = _geometric(rates[1]) / _geometric(rates[0])
    if len(a) < 2 or len(b) < 2:
        return Metric(
            PRIMARY, ratio, None, None, None, False, None, needed, "there are no token rows to take an interval from"
        )
    _, low, high = within_run(b, a)  # costs are the rate's inverse: A's over B's
    return Metric(PRIMARY, ratio, low, high, None, False, None, needed)


def _supposed_need(wanted: float | None) -> int:
    target = wanted or 0.05
    return next((pairs for pairs in range(6, 5000) if (pairs_resolve(pairs, SUPPOSED_SD) or 9.9) <= target), 5000)


def _plain_ratio(judged: Judged, name: str) -> Metric:
    """A ratio that nothing is known about the spread of."""
    a, b = _values(judged.a, name), _values(judged.b, name)
    if not a or not b or _hidden(judged, name):
        return Metric(name, None, None, None, None, False, None, None, f"{name} is unmeasured or zero in a run")
    return Metric(name, _geometric(b) / _geometric(a), None, None, None, False, None, _supposed_need(None))
