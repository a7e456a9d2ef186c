"""Rules about memory, the cache and the reads: refaulting, reclaim, a cache too small, O_DIRECT refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from bmoe_collector.meaning.derive import Derived
from bmoe_collector.meaning.memory import DURING, sample_mib
from bmoe_collector.meaning.numbers import known, mean, number
from bmoe_collector.verdicts.rule import Case, Rule, Verdict, warn

REFAULTS_TOK = 100.0
FALL = 0.10


def dense_refaulting(case: Case) -> Iterator[Verdict]:
    """Hundreds of major faults per token after warm-up: dense weights are being re-read from flash."""
    derived = case.derived
    warm = _head(derived)
    rate = mean(derived.rows.get("majflt")[warm:]) if "majflt" in derived.rows.columns else None
    after = f" after the first {warm} tokens" if warm else ""
    source = "the token rows"
    if rate is None:
        rate, after, source = derived.cache.majflt_tok, "", "the end record"
    if rate is None:
        rate, source = _faults_by_samples(case), "the agent's samples of the engine"
    if rate is not None and rate >= REFAULTS_TOK:
        yield warn("dense_refaulting", f"{rate:.0f} major faults per token{after} ({source})")


def _head(derived: Derived) -> int:
    """Tokens at the start that may be warm-up: the one found in the first generation; where none can be told, its half."""
    if not derived.turns:
        return len(derived.rows) // 2
    first = derived.turns[0]
    if first.steady.found:
        return first.steady.warmup_tokens or 0
    own = len(derived.rows) if len(derived.turns) == 1 else derived.rows.get("turn").count(first.turn.turn)
    return own // 2


def _window(case: Case) -> tuple[int, int] | None:
    """When the decode phase began and ended on the phone's clock, from the stamps of the token lines or the turns."""
    stamps = [int(stamp) for stamp in known(case.derived.rows.get("boot_ns"))]
    if not stamps:
        stamps = [
            int(stamp) for turn in case.record.turns for stamp in known((turn.begin_boot_ns, turn.end_boot_ns)) if stamp
        ]
    return (min(stamps), max(stamps)) if len(stamps) > 1 else None


def _faults_by_samples(case: Case) -> float | None:
    """Faults of the engine per token, between the first and last sample inside the decode phase."""
    window = _window(case)
    stamps = known(case.derived.rows.get("boot_ns"))
    if window is None or not stamps:
        return None
    inside = [
        (sample.boot_ns, faults)
        for sample in case.record.samples
        if window[0] <= sample.boot_ns <= window[1] and (faults := number(sample.values.get("majflt"))) is not None
    ]
    if len(inside) < 2:
        return None
    (begin, before), (end, after) = inside[0], inside[-1]
    tokens = sum(begin < stamp <= end for stamp in stamps)
    return (after - before) / tokens if tokens else None


def reclaimed(case: Case) -> Iterator[Verdict]:
    """`rss_anon_mib` falling while `cache_budget_mib` stands: the kernel is taking the cache."""
    rows = case.derived.rows
    anon = rows.get("rss_anon_mib")
    fall = _deepest_fall(anon, rows.get("cache_budget_mib"))
    source = "rss_anon_mib"
    if not known(anon) and (window := _window(case)) is not None:
        inside = [
            sample_mib(sample, "rss_anon_kib")
            for sample in case.record.samples
            if sample.kind in DURING and sample.source == "agent" and window[0] <= sample.boot_ns <= window[1]
        ]
        fall = _deepest_fall(inside, [None] * len(inside))
        source = "the engine's anonymous memory"
    if fall is not None:
        high, low = fall
        yield warn(
            "reclaimed",
            f"{source} fell from {high:.0f} to {low:.0f} MiB ({1 - low / high:.0%}) with the budget standing",
        )


def _deepest_fall(anon: Sequence[Any], budgets: Sequence[Any]) -> tuple[float, float] | None:
    """The (high, low) of the deepest fall under one budget, None when it is under a tenth."""
    worst: tuple[float, float] | None = None
    high, budget = 0.0, None
    for value, bound in zip(anon, budgets, strict=True):
        level = number(value)
        if level is None:
            continue
        if bound != budget:
            high, budget = 0.0, bound
        high = max(high, level)
        if high > 0 and level <= high * (1 - FALL) and (worst is None or level / high < worst[1] / worst[0]):
            worst = (high, level)
    return worst


def cache_below_cycle(case: Case) -> Iterator[Verdict]:
    """A cache smaller than one token's routed bytes cannot hold a token cycle: the hit rate is near zero."""
    config, cache = case.derived.config, case.derived.cache
    size = config.cache_mb if config.cache_mb is not None else cache.budget_mib
    if not size or config.streaming is False:
        return
    said: list[str] = []
    if config.cache_cycle_mb and size < config.cache_cycle_mb:
        said.append(f"one token may route {config.cache_cycle_mb:g} MiB (cache_cycle_mb)")
    if cache.token_demand_mib and size < cache.token_demand_mib:
        said.append(f"one token routed {cache.token_demand_mib:g} MiB, measured")
    if said:
        hit = "" if cache.hit_pct is None else f"; hit rate {cache.hit_pct:.1f} %"
        yield warn("cache_below_cycle", f"a cache of {size:g} MiB, and {' and '.join(said)}{hit}")


def o_direct_not_achieved(case: Case) -> Iterator[Verdict]:
    """`o_direct` is what the shard opens achieved, not what was asked for."""
    config = case.derived.config
    if config.streaming and config.o_direct_asked and config.o_direct is False:
        yield warn(
            "o_direct_not_achieved", "direct reads were asked for (no --no-odirect) and the preamble says o_direct=0"
        )


RULES: tuple[Rule, ...] = (dense_refaulting, reclaimed, cache_below_cycle, o_direct_not_achieved)
