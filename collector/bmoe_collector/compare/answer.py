"""One comparison put together: design, counters, terms, speed, texts, and a sentence.

In: two sides. Out: an `Answer` whose `to_json` is what `bmoe compare --json` prints. Counters that do not depend on the
clock are compared exactly; every other number in `metrics`. Replicates are runs; where a plan interleaved, pairs of one block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bmoe_collector.compare.comparable import Judged, judge_sides, lossless
from bmoe_collector.compare.metrics import PRIMARY, SUPPOSED_SD, Metric, TokenCosts, metrics_of, within
from bmoe_collector.compare.sides import ComparedRun, Side
from bmoe_collector.meaning.facts import BY_NAME, FACTS


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
    metrics = metrics_of(judged, design, pairs, costs, primary, wanted)
    few = _within_too_few(judged, design, metrics, costs)
    counters = tuple(_counters(judged))
    equal = texts_equal(judged)
    notes.extend(judged.notes)
    if equal is False and lossless([*judged.a, *judged.b]):
        notes.append(
            "texts differ although nothing here should change them: settings that only change how weights are fetched must give the same greedy text"
        )
    n = (len(pairs), len(pairs)) if design == "paired" else (len(judged.a), len(judged.b))
    asked = next(row for row in metrics if row.metric == primary)
    sentence = _sentence(design, n, asked, wanted) + (_within_words(few) if few else "")
    return Answer(
        a, b, not judged.reasons, True, judged.reasons, tuple(dict.fromkeys(notes)), design, n, tuple(metrics), counters, equal, sentence, label,
        {"within_run": few} if few else {}, primary,
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


def _within_too_few(judged: Judged, design: str, metrics: Sequence[Metric], costs: TokenCosts) -> dict[str, Any] | None:
    """Too few runs for any result to be significant: what the tokens of these runs say, marked as such."""
    speed = metrics[0]
    if design == "within-run" or speed.ratio is None or speed.smallest_resolvable is not None:
        return None
    found = within(judged, costs, None)
    if found.low is None or found.high is None:
        return None
    return {
        "metric": PRIMARY, "ratio": found.ratio, "low": found.low, "high": found.high,
        "method": "block bootstrap over the tokens of these runs, which are no replicates",
    }  # fmt: skip


def _within_words(few: Mapping[str, Any]) -> str:
    return f"; within these runs their tokens give [{few['low'] - 1:+.1%}, {few['high'] - 1:+.1%}]"


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
