"""What a verdict is and what a rule gets to see.

A rule is a small function: a `Case` in, the verdicts it finds out, each with a code, a severity and the evidence: one
sentence with the numbers. Codes and severities are the design's table ("What a number means"). Rules never raise on a
record that lacks something; what is not known shows nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from bmoe_collector.meaning.derive import Derived
from bmoe_collector.meaning.facts import facts_of
from bmoe_collector.record import RunRecord

Severity = Literal["info", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What kind of number a run is, or why not to use it."""

    code: str
    severity: Severity
    evidence: str

    def to_json(self) -> dict[str, str]:
        """The object `bmoe show` prints."""
        return {"code": self.code, "severity": self.severity, "evidence": self.evidence}


@dataclass(frozen=True, slots=True)
class Sibling:
    """Another run of the same model on the same phone, from the same plan, folder or day: its row and its facts."""

    run: Mapping[str, Any]
    facts: Mapping[str, Any]
    codes: frozenset[str] = frozenset()  # its own verdicts, contamination apart

    @property
    def run_id(self) -> str:
        """32 hex digits."""
        return str(self.run["run_id"])

    @classmethod
    def of(cls, record: RunRecord, derived: Derived, codes: Iterable[str] = ()) -> Sibling:
        """A run as its siblings see it."""
        return cls(record.run, facts_of(record, derived), frozenset(codes))


@dataclass(frozen=True, slots=True)
class Case:
    """One run before the judge."""

    record: RunRecord
    derived: Derived
    siblings: Sequence[Sibling] = field(default_factory=tuple)


Rule = Callable[[Case], Iterable[Verdict]]


def info(code: str, evidence: str) -> Verdict:
    """What kind of number it is."""
    return Verdict(code, "info", evidence)


def warn(code: str, evidence: str) -> Verdict:
    """Do not use the number without reading the evidence."""
    return Verdict(code, "warn", evidence)


def fail(code: str, evidence: str) -> Verdict:
    """Do not use the number."""
    return Verdict(code, "fail", evidence)
