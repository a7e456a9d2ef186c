"""One comparison put together: design, counters, terms, speed, texts, and a sentence.

In: two sides. Out: an `Answer` whose `to_json` is what `bmoe compare --json` prints. Counters that do not depend on the
clock are compared exactly; every other number through `statistics`. Replicates are runs; where a plan interleaved, pairs of one
block. With one run a side the interval is over its tokens and is marked `within-run`: it is never a resolved effect.
P-values of secondary metrics are corrected for their number, together; the primary one stands alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bmoe_collector.compare.comparable import Judged, judge_sides, lossless
from bmoe_collector.compare.sides import ComparedRun, Side
from bmoe_collector.compare.statistics import LEVEL, Effect, jointly, paired, pairs_resolve, unpaired, within_run
from bmoe_collector.meaning.facts import BY_NAME, FACTS

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


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the result; see design.md, `bmoe compare`."""

    metric: str
    ratio: float | None
    low: float | None
    high: float | None
    p: float | None
    resolved: bool
    smallest_resolvable: float | None
    runs_needed: int | None
    why: str = ""
    a: tuple[float, ...] = ()  # of every run that was used, in the order they ran
    b: tuple[float, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The keys of the interface."""
        return {name: getattr(self, name) for name in self.__slots__ if name != "why" or self.why}


@dataclass(frozen=True, slots=True)
class Answer:
    """The whole result."""

    a: Side
    b: Side
    comparable: bool
    answered: bool  # comparable, or forced
    reasons: tuple[str, ...]
    notes: tuple[str, ...]
    design: str
    n: tuple[int, int]
    metrics: tuple[Metric, ...]
    counters: tuple[Mapping[str, Any], ...]
    texts_equal: bool | None
    verdict: str
    label: str = "exploration"
    extra: Mapping[str, Any] = field(default_factory=dict)
    primary: str = PRIMARY

    @property
    def answered_by(self) -> Metric | None:
        """The primary metric's row; None for a refusal."""
        return next((row for row in self.metrics if row.metric == self.primary), None)

    def to_json(self) -> dict[str, Any]:
        """As printed."""
        return {
            "a": {"side": self.a.text, "runs": [run.run_id for run in self.a.runs]},
            "b": {"side": self.b.text, "runs": [run.run_id for run in self.b.runs]},
            "comparable": self.comparable,
            "reasons": list(self.reasons),
            "notes": list(self.notes),
            "label": self.label,
            "primary": self.primary,
            "design": self.design,
            "n": list(self.n),
            "metrics": [metric.to_json() for metric in self.metrics],
            "counters": [dict(counter) for counter in self.counters],
            "texts_equal": self.texts_equal,
            "verdict": self.verdict,
            **self.extra,
        }


def compare(
    a: Side,
    b: Side,
    costs: TokenCosts,
    *,
    force: bool = False,
    primary: str = PRIMARY,
    wanted: float | None = None,
    keep: Callable[[ComparedRun], str | None] | None = None,
    label: str = "exploration",
) -> Answer:
    """Compare B with A. `wanted` is the smallest relative effect that matters, for `runs_needed`."""
    judged = judge_sides(a, b, keep, force=force)
    answered = not judged.reasons or (force and not judged.never and bool(judged.a) and bool(judged.b))
    if not answered:
        sentence = "refused: " + judged.reasons[0]
        n = (len(judged.a), len(judged.b))
        return Answer(
            a, b, False, False, judged.reasons, judged.notes, _design(judged)[0], n, (), (), None, sentence, label, primary=primary
        )  # fmt: skip
    design, pairs, notes = _design(judged)
    metrics = _with_values(_metrics(judged, design, pairs, costs, primary, wanted), judged, pairs)
    within = _within_too_few(judged, design, metrics, costs)
    counters = tuple(_counters(judged))
    equal = texts_equal(judged)
    notes.extend(judged.notes)
    if equal is False and lossless([*judged.a, *judged.b]):
        notes.append(
            "texts differ although nothing here should change them: settings that only change how weights are fetched must give the same greedy text"
        )
    n = (len(pairs), len(pairs)) if design == "paired" else (len(judged.a), len(judged.b))
    asked = next(row for row in metrics if row.metric == primary)
    sentence = _sentence(design, n, asked, wanted) + (_within_words(within) if within else "")
    return Answer(
        a, b, not judged.reasons, True, judged.reasons, tuple(dict.fromkeys(notes)), design, n, tuple(metrics), counters, equal, sentence, label,
        {"within_run": within} if within else {}, primary,
    )  # fmt: skip


def _design(judged: Judged) -> tuple[str, list[tuple[list[ComparedRun], list[ComparedRun]]], list[str]]:
    """How the runs replicate each other, the pairs of a paired design, and what was left out of it."""
    blocks: dict[tuple[str, str, int], tuple[list[ComparedRun], list[ComparedRun]]] = {}
    planned = all(run.run.get("plan_id") and run.run.get("block") is not None for run in (*judged.a, *judged.b))
    if planned:
        for at, side in enumerate((judged.a, judged.b)):
            for run in side:
                # One plan may run on several phones: what ran next to each other ran on one.
                place = (run.run.get("agent_uuid") or "", run.run["plan_id"], run.run["block"])
                blocks.setdefault(place, ([], []))[at].append(run)
        whole = [block for _, block in sorted(blocks.items()) if block[0] and block[1]]
        lone = sum(len(block[0]) + len(block[1]) for block in blocks.values() if not (block[0] and block[1]))
        if len(whole) >= 2:
            alone = (
                "1 run has no partner in its block and is"
                if lone == 1
                else f"{lone} runs have no partner in their block and are"
            )
            said = [f"{alone} left out"] if lone else []
            return "paired", whole, said
    if min(len(judged.a), len(judged.b)) < 2:
        return "within-run", [], []
    return "unpaired", [], []


def _metrics(
    judged: Judged,
    design: str,
    pairs: Sequence[tuple[list[ComparedRun], list[ComparedRun]]],
    costs: TokenCosts,
    primary: str,
    wanted: float | None,
) -> list[Metric]:
    names = [
        PRIMARY,
        *([primary] if primary != PRIMARY else []),
        *(name for name in (*SPEED, *TERMS) if name != primary),
    ]
    if design == "within-run":
        return [
            _within(judged, costs, wanted),
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


def _with_values(
    metrics: Sequence[Metric], judged: Judged, pairs: Sequence[tuple[list[ComparedRun], list[ComparedRun]]]
) -> list[Metric]:
    """Each metric with what every run of the two sides measured."""
    sides = [[run for pair in pairs for run in pair[at]] for at in (0, 1)] if pairs else [judged.a, judged.b]
    return [replace(one, a=_each(sides[0], one.metric), b=_each(sides[1], one.metric)) for one in metrics]


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
    pairs: Sequence[tuple[list[ComparedRun], list[ComparedRun]]],
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


def _within(judged: Judged, costs: TokenCosts, wanted: float | None) -> Metric:
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


def _within_too_few(judged: Judged, design: str, metrics: Sequence[Metric], costs: TokenCosts) -> dict[str, Any] | None:
    """Too few runs for any result to be significant: what the tokens of these runs say, marked as such."""
    speed = metrics[0]
    if design == "within-run" or speed.ratio is None or speed.smallest_resolvable is not None:
        return None
    found = _within(judged, costs, None)
    if found.low is None or found.high is None:
        return None
    return {
        "metric": PRIMARY, "ratio": found.ratio, "low": found.low, "high": found.high,
        "method": "block bootstrap over the tokens of these runs, which are no replicates",
    }  # fmt: skip


def _within_words(within: Mapping[str, Any]) -> str:
    return f"; within these runs their tokens give [{within['low'] - 1:+.1%}, {within['high'] - 1:+.1%}]"


def _supposed_need(wanted: float | None) -> int:
    target = wanted or 0.05
    return next((pairs for pairs in range(6, 5000) if (pairs_resolve(pairs, SUPPOSED_SD) or 9.9) <= target), 5000)


def _plain_ratio(judged: Judged, name: str) -> Metric:
    """A ratio that nothing is known about the spread of."""
    a, b = _values(judged.a, name), _values(judged.b, name)
    if not a or not b or _hidden(judged, name):
        return Metric(name, None, None, None, None, False, None, None, f"{name} is unmeasured or zero in a run")
    return Metric(name, _geometric(b) / _geometric(a), None, None, None, False, None, _supposed_need(None))


def _counters(judged: Judged) -> list[dict[str, Any]]:
    """What does not depend on the clock, exactly: `a` and `b` are the one value of the side, or the mean where it varies."""
    rows = []
    for fact in FACTS:
        if not fact.counter or fact.kind == "str":
            continue
        sides = [_counted(side, fact.name) for side in (judged.a, judged.b)]
        if [len(values) for values in sides] != [len(judged.a), len(judged.b)]:
            continue
        distinct = [set(side) for side in sides]
        if distinct[0] == distinct[1] == {0}:
            continue
        values = [side[0] if len(set(side)) == 1 else sum(side) / len(side) for side in sides]
        rows.append(
            {
                "counter": fact.name,
                "a": values[0],
                "b": values[1],
                "equal": len(distinct[0] | distinct[1]) == 1,
                "varies": [len(one) > 1 for one in distinct],
            }
        )
    return rows


def _counted(runs: Sequence[ComparedRun], name: str) -> list[float]:
    return [value for run in runs if isinstance(value := run.facts.get(name), int | float)]


def texts_equal(judged: Judged) -> bool | None:
    """Whether every run generated one text; None where a text is unknown or sampling makes the question empty."""
    runs = [*judged.a, *judged.b]
    hashes = {run.facts.get("text_sha256") for run in runs}
    if None in hashes or any("stochastic" in run.codes for run in runs):
        return None
    return len(hashes) == 1


def _sentence(design: str, n: tuple[int, int], metric: Metric, wanted: float | None) -> str:
    if metric.ratio is None:
        return f"cannot say: {metric.why}"
    change = f"{metric.metric} of B is {metric.ratio - 1:+.1%} against A"
    if metric.low is not None and metric.high is not None:
        change += f" [{metric.low - 1:+.1%}, {metric.high - 1:+.1%}]"
    if design == "within-run":
        return (
            f"{change} within these runs; cannot resolve: {n[0]} and {n[1]} runs, and tokens of one run are no replicates"
            f" (about {metric.runs_needed} interleaved pairs would resolve {wanted or 0.05:.0%} if runs spread by {SUPPOSED_SD:.0%})"
        )
    count = f"{n[0]} pairs" if design == "paired" else f"{n[0]} and {n[1]} runs"
    if metric.resolved:
        better = BY_NAME[metric.metric].better if metric.metric in BY_NAME else 1
        way = "" if not better else (" (better)" if (metric.ratio > 1) == (better > 0) else " (worse)")
        return f"resolved{way}: {change}, p {metric.p:.3g}, {count}"
    if metric.smallest_resolvable is None:
        return f"cannot resolve: with {count} no result can be significant; {change}" + _more(metric, design, n)
    return (
        f"not resolved: {change}, p {metric.p:.3g}, {count}; they would have shown {metric.smallest_resolvable:.1%} and more"
        + _more(metric, design, n)
    )


def _more(metric: Metric, design: str, n: tuple[int, int]) -> str:
    """How many it would take, and how many more than there are."""
    if metric.runs_needed is None:
        return ""
    what = "pairs" if design == "paired" else "runs a side"
    more = metric.runs_needed - min(n)
    return f"; about {metric.runs_needed} {what} would resolve it" + (f", {more} more" if more > 0 else "")
