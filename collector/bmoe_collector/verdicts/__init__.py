"""Verdicts: what kind of number a run is and whether to use it. A RunRecord and its siblings in, verdicts out.

`judge(record, siblings)` applies every rule; the rules are small functions, grouped by what they look at. The order of
verdicts is the order of the design's table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bmoe_collector.meaning.derive import Derived, derive
from bmoe_collector.record import RunRecord
from bmoe_collector.verdicts import kind, memory, phone, usable
from bmoe_collector.verdicts.rule import Case, Rule, Severity, Sibling, Verdict
from bmoe_collector.verdicts.siblings import contaminated, contaminated_among

RULES: tuple[Rule, ...] = (*usable.RULES, *phone.RULES, *memory.RULES, *kind.RULES)
"""Every rule that needs the run alone."""

CODES: tuple[str, ...] = (
    "untrustworthy_output", "instrumented", "load_all", "incomplete", "contaminated", "gate_gave_up", "throttled_entry",
    "big_cores_excluded", "foreign_load", "not_awake", "dense_refaulting", "reclaimed", "cache_below_cycle",
    "o_direct_not_achieved", "device_idle", "think_ignored", "short_run", "not_streaming", "stochastic", "lossy",
    "speculative", "simulated",
)  # fmt: skip
"""Every code, in the design's order."""


def judge_alone(record: RunRecord, derived: Derived, siblings: Sequence[Sibling] = ()) -> list[Verdict]:
    """Every verdict but contamination."""
    case = Case(record, derived, siblings)
    return ordered(verdict for rule in RULES for verdict in rule(case))


def judge(record: RunRecord, siblings: Iterable[RunRecord | Sibling] = ()) -> list[Verdict]:
    """Every verdict on a run among its siblings (records, or what is stored of them)."""
    derived = derive(record)
    others = [one if isinstance(one, Sibling) else _sibling(one) for one in siblings]
    alone = judge_alone(record, derived, others)
    me = Sibling.of(record, derived, (verdict.code for verdict in alone))
    return ordered([*alone, *contaminated(me, others)])


def _sibling(record: RunRecord) -> Sibling:
    derived = derive(record)
    return Sibling.of(record, derived, (verdict.code for verdict in judge_alone(record, derived)))


def ordered(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """In the order of the table; within one code as found."""
    return sorted(verdicts, key=lambda verdict: CODES.index(verdict.code))


__all__ = [
    "CODES",
    "RULES",
    "Case",
    "Rule",
    "Severity",
    "Sibling",
    "Verdict",
    "contaminated",
    "contaminated_among",
    "judge",
    "judge_alone",
    "ordered",
]
