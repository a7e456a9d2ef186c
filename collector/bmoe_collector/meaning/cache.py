"""What the expert cache and the flash did: rows, end records and the report in, counters and rates out.

Counters (bytes, evictions, re-reads, experts) do not depend on the clock and are exact where the engine prints them
exactly. The hit rate is cumulative; dropping raises it by leaving misses out and substitution by steering the routing, so
it is never given without those two rates (contract, `cache_hit_pct`). `read_bytes` are the reads we chose, `majflt_mib`
those the kernel forced on us (contract, `majflt_mib`); stdout's `read_mb` is not turned into `read_bytes`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from bmoe_collector.meaning.config import Config
from bmoe_collector.meaning.numbers import known, last_known, number, ratio, total
from bmoe_collector.record import Rows

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Cache:
    """Cache behaviour and flash traffic of a run's generations."""

    hit_pct: float | None
    drop_rate: float | None
    substitution_rate: float | None
    reroute_rate: float | None  # slots that route-ahead sent elsewhere than the router would have
    active_experts: float | None  # routed experts of a token that were really computed
    experts_routed: int | None
    experts_dropped: int | None
    experts_reranked: int | None
    experts_substituted: int | None
    rerouted_early: int | None  # routings that route-ahead committed
    evictions: int | None
    rereads: int | None
    resident_mib: float | None
    budget_mib: float | None
    token_demand_mib: float | None
    layer_demand_mib: float | None
    read_bytes: int | None
    read_mib: float | None
    read_mib_tok: float | None
    faulted_mib: float | None
    faulted_mib_tok: float | None
    majflt: int | None
    majflt_tok: float | None
    prefetched_experts: int | None
    prefetched_useful: int | None
    prefetched_mib: float | None


def cache_of(summaries: Sequence[Mapping[str, Any]], rows: Rows, config: Config, tokens: int | None) -> Cache:
    """Sum over turns; ratios of sums. `summaries` and `rows` are the measured ones (law 5 applied)."""

    def count(key: str) -> int | None:
        whole = total(turn.get(key) for turn in summaries)
        return None if whole is None else round(whole)

    def latest(key: str) -> float | None:
        return last_known([turn.get(key) for turn in summaries])

    def highest(key: str) -> float | None:
        return max(known(turn.get(key) for turn in summaries), default=None)

    routed, dropped = count("experts_routed"), count("experts_dropped")
    reranked, moved = count("experts_reranked"), count("experts_substituted")
    drop_rate = _rate(dropped, routed, config.drop_cold_frac)
    read_bytes = total(rows.columns.get("read_bytes", ()))
    read_mib = total(turn.get("read_mib") for turn in summaries)
    if read_bytes is not None:
        per_token = ratio(read_bytes / MIB, len(rows))
    elif read_mib is not None:
        per_token = ratio(read_mib, tokens)
    else:
        per_token = ratio(total(rows.columns.get("read_mb", ())), len(rows))
    faulted = total(rows.columns.get("majflt_mib", ()))
    majflt = total(rows.columns.get("majflt", ()))
    majflt_tok = ratio(majflt, len(rows))
    if majflt_tok is None:
        majflt_tok = _mean_by_tokens(summaries, "majflt_tok")
    committed = count("ra_committed")
    agree = latest("ra_agree_pct") if committed else None
    hit = latest("cache_hit_pct")
    width = config.n_expert_used
    return Cache(
        hit_pct=hit if hit is not None else last_known(rows.get("cache_hit_pct")),
        drop_rate=drop_rate,
        substitution_rate=_rate(moved, reranked, config.substitute_lambda),
        reroute_rate=None if agree is None else 1 - agree / 100,
        active_experts=None if not width else width * (1 - (drop_rate or 0.0)),
        experts_routed=routed,
        experts_dropped=dropped,
        experts_reranked=reranked,
        experts_substituted=moved,
        rerouted_early=committed,
        evictions=_counter(summaries, "evictions"),
        rereads=_counter(summaries, "rereads"),
        resident_mib=latest("cache_resident_mib"),
        budget_mib=latest("cache_budget_mib") or last_known(rows.get("cache_budget_mib")),
        token_demand_mib=highest("token_demand_mib"),
        layer_demand_mib=highest("layer_demand_mib"),
        read_bytes=None if read_bytes is None else round(read_bytes),
        read_mib=read_mib,
        read_mib_tok=per_token,
        faulted_mib=faulted,
        faulted_mib_tok=ratio(faulted, len(rows)),
        majflt=None if majflt is None else round(majflt),
        majflt_tok=majflt_tok,
        prefetched_experts=count("spec_experts"),
        prefetched_useful=count("spec_useful"),
        prefetched_mib=total(turn.get("spec_read_mib") for turn in summaries),
    )


def _counter(summaries: Sequence[Mapping[str, Any]], key: str) -> int | None:
    """A counter over a whole session: engines print `evictions` and `rereads` as counts since the load.

    So the last turn holds the total. Counts that fall from one turn to the next are not of that kind, and add up.
    """
    counts = known(turn.get(key) for turn in summaries)
    if not counts:
        return None
    rising = all(later >= earlier for earlier, later in pairwise(counts))
    return round(counts[-1] if rising else sum(counts))


def _rate(part: int | None, whole: int | None, setting: float | None) -> float | None:
    """The measured rate; 0 where the policy is known to be off; None where nobody counted."""
    measured = ratio(part, whole)
    if measured is not None:
        return measured
    return 0.0 if setting == 0 else None


def _mean_by_tokens(summaries: Sequence[Mapping[str, Any]], key: str) -> float | None:
    pairs = [(number(turn.get(key)), number(turn.get("tokens")) or 0.0) for turn in summaries]
    told = [(value, weight) for value, weight in pairs if value is not None]
    if len(told) == 1:
        return told[0][0]
    return ratio(sum(value * weight for value, weight in told), sum(weight for _, weight in told))


@dataclass(frozen=True, slots=True)
class Speculation:
    """What drafting achieved (contract, "End-of-run lines", `mtp:` / `ngram:`)."""

    source: str | None  # "off", "mtp", "ngram", None when not known
    drafted: int | None
    accepted: int | None
    decodes: int | None
    drafted_steps: int | None
    acceptance: float | None  # accepted / drafted
    amortisation: float | None  # tokens / decodes
    coverage: float | None  # drafted_steps / decodes


def speculation_of(summaries: Sequence[Mapping[str, Any]], config: Config, tokens: int | None) -> Speculation:
    """Counters summed over turns; all rates None when nothing was drafted by design."""

    def count(key: str) -> int | None:
        whole = total(turn.get(key) for turn in summaries)
        return None if whole is None else round(whole)

    on = config.spec in {"mtp", "ngram"}
    drafted, accepted, decodes, steps = (
        count(key) for key in ("mtp_drafted", "mtp_accepted", "mtp_decodes", "drafted_steps")
    )
    return Speculation(
        source=config.spec,
        drafted=drafted if on else None,
        accepted=accepted if on else None,
        decodes=decodes if on else None,
        drafted_steps=steps if on else None,
        acceptance=ratio(accepted, drafted) if on else None,
        amortisation=ratio(tokens, decodes) if on else None,
        coverage=ratio(steps, decodes) if on else None,
    )
