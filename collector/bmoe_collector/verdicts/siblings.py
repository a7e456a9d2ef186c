"""Contamination: what only a run's siblings can show. Rows and facts in, one `contaminated` verdict or none out.

Siblings are runs of the same model on the same phone from the same plan, folder or day. Five signs, from published
campaigns in which order or device state masqueraded as configuration:

1. major faults per token at least ten times a sibling's with the same policy for the dense weights;
2. compute per token rising while active experts fall: fewer experts cannot cost more, so the one with fewer is at fault;
3. one configuration, equal bytes and hit rate, and a time beyond its siblings' spread;
4. time drifting with the position in the order (a Mann-Kendall test within each configuration, 1 % two-sided);
5. an entry clearly hotter, clocked lower or with less memory than that of the siblings with the same pre-heat.

Only the cell that is worse is flagged, never the clean one beside it. Runs that are another kind of number (traced,
unfinished, warm-ups) are no reference for anybody.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from bmoe_proto.contract.flags import read_argv

from bmoe_collector.meaning.numbers import known, median, number, spread
from bmoe_collector.verdicts.rule import Sibling, Verdict, fail

NO_REFERENCE = frozenset({"instrumented", "load_all", "untrustworthy_output", "incomplete"})
FAULT_FACTOR = 10.0
FAULT_FLOOR = 0.5
"""Below half a fault per token a rate is as good as none; ten times it is still single digits."""
COMPUTE_MARGIN = 0.05
"""Beyond it, and with this much fewer experts, noise between two runs is no explanation."""
ONE_OF_MANY = 0.15
"""Beyond it a single repeat is spoiled although the others beside it are not: three times the usual spread."""
FEWER_EXPERTS = 0.10
EQUAL_BYTES = 0.005
EQUAL_HIT_POINTS = 0.2
USUAL_SPREAD = 0.05
USUAL_WEIGHT = 5
"""Runs of one configuration differ by a sd of 5 % on a phone with which nothing is wrong. Few siblings say little about
their spread, so this counts as much as this many of them."""
BEYOND = 3.5
DRIFT_RUNS = 6
DRIFT_Z = 2.576
DRIFT_SIZE = 0.10
DRIFT_FLAGGED = 0.05
HOTTER_C = 10.0
LOWER_CAP = 0.10
LESS_MEMORY = 0.25

SAME = (
    "engine", "streaming", "overlap", "threads", "io_threads", "cache_mb", "cache_auto", "dense_weights", "o_direct",
    "n_expert_used", "drop_cold_frac", "substitute_lambda", "route_ahead", "prefetch", "spec", "temp", "n_predict",
    "n_prompt", "session",
)  # fmt: skip
"""Facts that make two runs one configuration; `cache_mb` apart under `auto`, where the engine sizes it."""


Sign = tuple[str, str]
"""A run's id and what speaks against it."""


def contaminated(me: Sibling, siblings: Sequence[Sibling]) -> list[Verdict]:
    """The verdict on `me` among its siblings, with every sign in its evidence."""
    others = [sibling for sibling in siblings if sibling.run_id != me.run_id]
    return contaminated_among([me, *others]).get(me.run_id, [])


def contaminated_among(group: Sequence[Sibling]) -> dict[str, list[Verdict]]:
    """The verdicts of a whole group by run id; runs without one are left out."""
    families: dict[Any, list[Sibling]] = {}
    for one in group:
        if not one.codes & NO_REFERENCE and not one.run.get("unmeasured"):
            kind = (one.run.get("agent_uuid"), one.run.get("model_identity"), bool(one.run.get("simulated")))
            families.setdefault(kind, []).append(one)
    signs: dict[str, list[str]] = {}
    for family in families.values():
        for rule in RULES:
            for run_id, sign in rule(family):
                signs.setdefault(run_id, []).append(sign)
    return {run_id: [fail("contaminated", "; ".join(found))] for run_id, found in signs.items()}


def _name(sibling: Sibling) -> str:
    cell = sibling.run.get("cell")
    return f"{cell} ({sibling.run_id[:8]})" if cell else sibling.run_id[:8]


def configuration(sibling: Sibling) -> tuple[Any, ...]:
    """What must be equal for two runs to be one configuration: the resolved values, and all that may stand for one.

    Preambles can omit the variable under test, so flags nobody knows, the environment, a plan's cell and, for files that
    came without an argv, the labels count too.
    """
    facts, run = sibling.facts, sibling.run
    auto = bool(facts.get("cache_auto"))
    own = tuple(None if name == "cache_mb" and auto else facts.get(name) for name in SAME)
    argv = [str(part) for part in run.get("argv") or ()]
    unknown = tuple(read_argv(argv).unknown)
    environment = tuple(sorted((run.get("environment") or {}).items()))
    labels = () if argv else tuple(sorted((run.get("labels") or {}).items()))
    return (
        *own,
        unknown,
        environment,
        labels,
        run.get("cell") if run.get("plan_id") else None,
        run.get("prompt_sha256"),
    )


def _by(family: Sequence[Sibling], *names: str) -> Iterable[list[Sibling]]:
    """The family split by facts that must be equal for a comparison to mean something."""
    parts: dict[Any, list[Sibling]] = {}
    for one in family:
        parts.setdefault(tuple(one.facts.get(name) for name in names), []).append(one)
    return parts.values()


def _known(family: Sequence[Sibling], fact: str) -> list[tuple[float, Sibling]]:
    return [(value, one) for one in family if (value := number(one.facts.get(fact))) is not None]


def _faults(family: Sequence[Sibling]) -> Iterator[Sign]:
    # Another policy for the dense weights faults by design.
    for alike in _by(family, "dense_weights", "streaming"):
        rates = _known(alike, "majflt_tok")
        if len(rates) < 2:
            continue
        least, who = min(rates, key=lambda pair: pair[0])
        for mine, one in rates:
            if mine >= FAULT_FACTOR * max(least, FAULT_FLOOR):
                yield one.run_id, f"{mine:.1f} major faults per token against {least:.1f} of {_name(who)}"


_COMPUTE = (
    ("compute residual", "compute_residual_s_tok", ("threads", "overlap", "streaming", "spec")),
    # The I/O lanes' CPU is in it, so what is read must be comparable too.
    ("CPU", "cpu_s_tok", ("threads", "overlap", "streaming", "spec", "cache_mb", "dense_weights")),
)


def _compute(family: Sequence[Sibling]) -> Iterator[Sign]:
    told: set[str] = set()
    for what, fact, same in _COMPUTE:
        for alike in _by(family, *same):
            costs: dict[float, list[float]] = {}
            for cost, one in _known(alike, fact):
                if cost > 0 and (width := number(one.facts.get("active_experts"))):
                    costs.setdefault(round(width, 3), []).append(cost)
            levels = {width: median(values) or 0.0 for width, values in sorted(costs.items())}
            for mine, one in _known(alike, fact):
                own = number(one.facts.get("active_experts"))
                for width, level in levels.items():
                    if not own or own > width * (1 - FEWER_EXPERTS) or one.run_id in told:
                        continue
                    # Of repeats that are as they should be one may be an outlier by chance alone.
                    typical = levels[round(own, 3)] <= level * (1 + COMPUTE_MARGIN)
                    if mine > level * (1 + (ONE_OF_MANY if typical else COMPUTE_MARGIN)):
                        told.add(one.run_id)
                        yield (
                            one.run_id,
                            f"{what} {mine:.4f} s/token with {own:g} active experts against {level:.4f} with {width:g}",
                        )


def _equal_work(me: Sibling, other: Sibling) -> bool:
    """Equal bytes read and equal hit rate, as far as both know them; equal unknowns are not equal work."""
    mine, theirs = (number(one.facts.get("read_mib_tok")) for one in (me, other))
    if mine is None or theirs is None or abs(mine - theirs) > EQUAL_BYTES * max(mine, theirs):
        return False
    hit, their_hit = (number(one.facts.get("cache_hit_pct")) for one in (me, other))
    if hit is None or their_hit is None:
        return hit is their_hit
    return abs(hit - their_hit) <= EQUAL_HIT_POINTS


def _cells(family: Sequence[Sibling]) -> Iterable[list[Sibling]]:
    """Runs of one configuration."""
    cells: dict[tuple[Any, ...], list[Sibling]] = {}
    for one in family:
        cells.setdefault(configuration(one), []).append(one)
    return cells.values()


def _time(family: Sequence[Sibling]) -> Iterator[Sign]:
    for cell in _cells(family):
        if len(cell) < 3:
            continue
        for mine, me in _known(cell, "s_tok"):
            times = known(other.facts.get("s_tok") for other in cell if other is not me and _equal_work(me, other))
            level, noise = median(times), spread(times)
            if len(times) < 2 or not level or noise is None or mine <= level:
                continue
            if len(times) == 2:
                noise = abs(times[0] - times[1]) / 1.128  # a range of two, as a standard deviation
            usual, n = USUAL_SPREAD * level, len(times)
            noise = math.sqrt((USUAL_WEIGHT * usual**2 + (n - 1) * noise**2) / (USUAL_WEIGHT + n - 1))
            # The median of n is itself known to 1.25 standard deviations / sqrt(n).
            if mine > max(level + BEYOND * noise * math.sqrt(1 + 1.57 / n), *times):
                yield (
                    me.run_id,
                    (
                        f"{mine:.4f} s/token against {level:.4f} (spread {noise:.4f}) of {n} siblings of the same "
                        f"configuration with equal bytes and hit rate"
                    ),
                )


def _position(sibling: Sibling) -> tuple[float, float] | None:
    """Place in the order: the recorded one of a plan, else the time of the start."""
    run = sibling.run
    start = number(run.get("started_wall_ns"))
    index = number(run.get("cell_index"))
    if index is not None and run.get("plan_id"):
        return (index, start or 0.0)
    return None if start is None else (start, 0.0)


def _drift(family: Sequence[Sibling]) -> Iterator[Sign]:
    """The runs that a drift with the order made slower; order means something within one plan (or outside any)."""
    plans: dict[Any, list[Sibling]] = {}
    for one in family:
        plans.setdefault(one.run.get("plan_id"), []).append(one)
    for runs in plans.values():
        yield from _drift_of(runs)


def _drift_of(runs: Sequence[Sibling]) -> Iterator[Sign]:
    cells: dict[tuple[Any, ...], list[tuple[tuple[float, float], float, str]]] = {}
    for one in runs:
        place, time = _position(one), number(one.facts.get("s_tok"))
        if place is not None and time:
            cells.setdefault(configuration(one), []).append((place, time, one.run_id))
    score, variance = 0.0, 0.0
    points: list[tuple[tuple[float, float], float, str]] = []
    for cell in cells.values():
        cell.sort()
        times = [time for _, time, _ in cell]
        if len(times) < 2:
            continue
        level = median(times) or 1.0
        score += sum((b > a) - (b < a) for at, a in enumerate(times) for b in times[at + 1 :])
        variance += len(times) * (len(times) - 1) * (2 * len(times) + 5) / 18
        points.extend((place, time / level, run_id) for place, time, run_id in cell)
    if len(points) < DRIFT_RUNS or not variance:
        return
    z = (score - math.copysign(1, score)) / math.sqrt(variance) if score else 0.0
    if abs(z) < DRIFT_Z:
        return
    points.sort()
    third = max(len(points) // 3, 1)
    early, late = (median(time for _, time, _ in part) or 1.0 for part in (points[:third], points[-third:]))
    fresh, growth = min(early, late), max(early, late) / min(early, late) - 1
    if growth < DRIFT_SIZE:
        return
    way = "slower" if late > early else "faster"
    for _, own, run_id in points:
        if own > fresh * (1 + DRIFT_FLAGGED):
            yield (
                run_id,
                (
                    f"{len(points)} runs grow {way} with their position in the order ({growth:.0%}, z = {z:.1f}), this one "
                    f"is {own / fresh - 1:.0%} slower than their best part"
                ),
            )


_ENTRY: tuple[tuple[str, Callable[[float, float], bool], str], ...] = (
    ("entry_cpu_temp_c", lambda mine, level: mine >= level + HOTTER_C, "at {:.0f} °C"),
    ("entry_clock_cap", lambda mine, level: mine <= level - LOWER_CAP, "with the clock capped at {:.0%}"),
    ("entry_mem_available_mib", lambda mine, level: mine <= level * (1 - LESS_MEMORY), "with {:.0f} MiB available"),
)


def _preheat_s(sibling: Sibling) -> float:
    asked = sibling.run.get("asked")
    return (number(asked.get("preheat_s")) or 0.0) if isinstance(asked, Mapping) else 0.0


def _entry(family: Sequence[Sibling]) -> Iterator[Sign]:
    # A cell that was to be heated first enters hot by design: it is judged among those that were, too.
    alike: dict[float, list[Sibling]] = {}
    for one in family:
        alike.setdefault(_preheat_s(one), []).append(one)
    for runs in alike.values():
        yield from _entry_of(runs)


def _entry_of(runs: Sequence[Sibling]) -> Iterator[Sign]:
    for fact, worse, words in _ENTRY:
        states = _known(runs, fact)
        level = median(value for value, _ in states)
        if level is None or len(states) < 3:
            continue
        shown = words.split("{")[1]
        for mine, one in states:
            if worse(mine, level):
                yield one.run_id, f"entered {words.format(mine)} against the siblings' {('{' + shown).format(level)}"


RULES: tuple[Callable[[Sequence[Sibling]], Iterator[Sign]], ...] = (_faults, _compute, _time, _drift, _entry)
