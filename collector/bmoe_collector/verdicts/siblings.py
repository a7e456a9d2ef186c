"""Contamination: what only a run's siblings can show. Rows and facts in, one `contaminated` verdict or none out.

Siblings are runs of the same model on the same phone from the same plan, folder or day. Five signs, from published
campaigns in which order or device state masqueraded as configuration:

1. major faults per token at least ten times a sibling's with the same policy for the dense weights;
2. compute per token rising while active experts fall: fewer experts cannot cost more, so the one with fewer is at fault;
3. one configuration, equal bytes and hit rate, and a time beyond its siblings' spread;
4. time drifting with the position in the order (a Mann-Kendall test within each configuration, 1 % two-sided);
5. an entry clearly hotter, clocked lower or with less memory than the siblings'.

Only the cell that is worse is flagged, never the clean one beside it. Runs that are another kind of number (traced,
unfinished, warm-ups) are no reference for anybody.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
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


def contaminated(me: Sibling, siblings: Sequence[Sibling]) -> list[Verdict]:
    """The verdict on `me` among its siblings, with every sign in its evidence."""
    others = [sibling for sibling in siblings if sibling.run_id != me.run_id]
    return contaminated_among([me, *others], only=me.run_id).get(me.run_id, [])


def contaminated_among(group: Sequence[Sibling], *, only: str | None = None) -> dict[str, list[Verdict]]:
    """The verdicts of a whole group (or of one of it) by run id; runs without one are left out."""
    found: dict[str, list[Verdict]] = {}
    fit = [one for one in group if not one.codes & NO_REFERENCE and not one.run.get("unmeasured")]
    drifts: dict[str, str] = {}
    for family in _families(fit):
        drifts.update(_drift(family))
    for me in fit:
        if only is not None and me.run_id != only:
            continue
        others = [other for other in fit if other is not me and _related(me, other)]
        signs = [*_faults(me, others), *_compute(me, others), *_time(me, others)]
        if me.run_id in drifts:
            signs.append(drifts[me.run_id])
        signs.extend(_entry(me, others))
        if signs:
            found[me.run_id] = [fail("contaminated", "; ".join(signs))]
    return found


def _related(me: Sibling, other: Sibling) -> bool:
    """Same model, same phone, both real or both simulated, as far as both know."""
    return bool(me.run.get("simulated")) == bool(other.run.get("simulated")) and all(
        _same(me.run, other.run, name) for name in ("agent_uuid", "model_identity")
    )


def _families(group: Sequence[Sibling]) -> Iterator[list[Sibling]]:
    """Runs whose order means something: of one phone, one model and one plan (or of none)."""
    families: dict[Any, list[Sibling]] = {}
    for one in group:
        run = one.run
        key = (run.get("agent_uuid"), run.get("model_identity"), bool(run.get("simulated")), run.get("plan_id"))
        families.setdefault(key, []).append(one)
    yield from families.values()


def _same(mine: Mapping[str, Any], theirs: Mapping[str, Any], name: str) -> bool:
    """True unless both know it and differ."""
    return mine.get(name) is None or theirs.get(name) is None or mine[name] == theirs[name]


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


def _faults(me: Sibling, others: Sequence[Sibling]) -> Iterator[str]:
    mine = number(me.facts.get("majflt_tok"))
    if mine is None:
        return
    # Another policy for the dense weights faults by design.
    alike = [
        other for other in others if all(me.facts.get(k) == other.facts.get(k) for k in ("dense_weights", "streaming"))
    ]
    rates = [(rate, other) for other in alike if (rate := number(other.facts.get("majflt_tok"))) is not None]
    if not rates:
        return
    least, who = min(rates, key=lambda pair: pair[0])
    if mine >= FAULT_FACTOR * max(least, FAULT_FLOOR):
        yield f"{mine:.1f} major faults per token against {least:.1f} of {_name(who)}"


_COMPUTE = (
    ("compute residual", "compute_residual_s_tok", ("threads", "overlap", "streaming", "spec")),
    # The I/O lanes' CPU is in it, so what is read must be comparable too.
    ("CPU", "cpu_s_tok", ("threads", "overlap", "streaming", "spec", "cache_mb", "dense_weights")),
)


def _compute(me: Sibling, others: Sequence[Sibling]) -> Iterator[str]:
    width = number(me.facts.get("active_experts"))
    if not width:
        return
    for what, fact, same in _COMPUTE:
        mine = number(me.facts.get(fact))
        wider: dict[float, list[float]] = {}
        for other in others:
            theirs, their_width = number(other.facts.get(fact)), number(other.facts.get("active_experts"))
            alike = all(me.facts.get(key) == other.facts.get(key) for key in same)
            if alike and theirs and their_width and their_width * (1 - FEWER_EXPERTS) > width:
                wider.setdefault(round(their_width, 3), []).append(theirs)
        for their_width, costs in sorted(wider.items()):
            level = median(costs)
            if mine is not None and level is not None and mine > level * (1 + COMPUTE_MARGIN):
                yield f"{what} {mine:.4f} s/token with {width:g} active experts against {level:.4f} with {their_width:g}"
                return


def _equal_work(me: Sibling, other: Sibling) -> bool:
    """Equal bytes read and equal hit rate, as far as both know them; equal unknowns are not equal work."""
    bytes_of = [number(one.facts.get("read_mib_tok")) for one in (me, other)]
    hits = [number(one.facts.get("cache_hit_pct")) for one in (me, other)]
    mine, theirs = bytes_of
    if mine is None or theirs is None or abs(mine - theirs) > EQUAL_BYTES * max(mine, theirs):
        return False
    if (hits[0] is None) != (hits[1] is None):
        return False
    return hits[0] is None or hits[1] is None or abs(hits[0] - hits[1]) <= EQUAL_HIT_POINTS


def _time(me: Sibling, others: Sequence[Sibling]) -> Iterator[str]:
    mine = number(me.facts.get("s_tok"))
    if mine is None:
        return
    key = configuration(me)
    times = known(
        other.facts.get("s_tok") for other in others if configuration(other) == key and _equal_work(me, other)
    )
    level, noise = median(times), spread(times)
    if len(times) < 2 or not level or noise is None:
        return
    if len(times) == 2:
        noise = abs(times[0] - times[1]) / 1.128  # a range of two, as a standard deviation
    usual, n = USUAL_SPREAD * level, len(times)
    noise = math.sqrt((USUAL_WEIGHT * usual**2 + (n - 1) * noise**2) / (USUAL_WEIGHT + n - 1))
    # The median of n is itself known to 1.25 standard deviations / sqrt(n).
    if mine > max(level + BEYOND * noise * math.sqrt(1 + 1.57 / n), *times):
        yield (
            f"{mine:.4f} s/token against {level:.4f} (spread {noise:.4f}) of {len(times)} siblings of the same "
            f"configuration with equal bytes and hit rate"
        )


def _position(sibling: Sibling) -> tuple[float, float] | None:
    """Place in the order: the recorded one of a plan, else the time of the start."""
    run = sibling.run
    start = number(run.get("started_wall_ns"))
    index = number(run.get("cell_index"))
    if index is not None and run.get("plan_id"):
        return (index, start or 0.0)
    return None if start is None else (start, 0.0)


def _drift(family: Sequence[Sibling]) -> dict[str, str]:
    """Evidence by run id for the runs that a drift with the order made slower."""
    cells: dict[tuple[Any, ...], list[tuple[tuple[float, float], float, str]]] = {}
    for one in family:
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
        return {}
    z = (score - math.copysign(1, score)) / math.sqrt(variance) if score else 0.0
    if abs(z) < DRIFT_Z:
        return {}
    points.sort()
    third = max(len(points) // 3, 1)
    early, late = (median(time for _, time, _ in part) or 1.0 for part in (points[:third], points[-third:]))
    fresh, growth = min(early, late), max(early, late) / min(early, late) - 1
    if growth < DRIFT_SIZE:
        return {}
    way = "slower" if late > early else "faster"
    return {
        run_id: f"{len(points)} runs grow {way} with their position in the order ({growth:.0%}, z = {z:.1f}), "
        f"this one is {own / fresh - 1:.0%} slower than their best part"
        for _, own, run_id in points
        if own > fresh * (1 + DRIFT_FLAGGED)
    }


def _entry(me: Sibling, others: Sequence[Sibling]) -> Iterator[str]:
    def compare(name: str) -> tuple[float, float] | None:
        mine = number(me.facts.get(name))
        theirs = known(other.facts.get(name) for other in others)
        level = median(theirs)
        return None if mine is None or level is None or len(theirs) < 2 else (mine, level)

    if (pair := compare("entry_cpu_temp_c")) and pair[0] >= pair[1] + HOTTER_C:
        yield f"entered at {pair[0]:.0f} °C against the siblings' {pair[1]:.0f}"
    if (pair := compare("entry_clock_cap")) and pair[0] <= pair[1] - LOWER_CAP:
        yield f"entered with the clock capped at {pair[0]:.0%} against the siblings' {pair[1]:.0%}"
    if (pair := compare("entry_mem_available_mib")) and pair[0] <= pair[1] * (1 - LESS_MEMORY):
        yield f"entered with {pair[0]:.0f} MiB available against the siblings' {pair[1]:.0f}"
