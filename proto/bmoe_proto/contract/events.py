"""What the engine said, as small frozen values: the parser's output.

In: built by `stdout.StdoutParser`. Out: `line` (1-based, where the event starts), `event` (its kind) and `to_json()`
(the object `bmoe events` prints). `values` hold the contract's keys with their names and types, unknown keys included;
unmeasured and non-finite are None. Generated text is kept as bytes, since it may be no text at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from bmoe_proto.contract.deltas import so_far
from bmoe_proto.contract.text import readable


def _json(kind: str, line: int, values: Mapping[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {"event": kind, "line": line, **values}
    # A key of the engine's may not pass for ours.
    out["event"] = kind
    out["line"] = line
    return out


@dataclass(frozen=True, slots=True)
class _Told:
    """A telemetry line that is an object of keys and nothing more."""

    event: ClassVar[str] = ""
    line: int
    values: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """The object `bmoe events` prints."""
        return _json(self.event, self.line, self.values)


@dataclass(frozen=True, slots=True)
class Load(_Told):
    """BMOE_LOAD: experts were read for this token. `turn` as in the CSV."""

    event: ClassVar[str] = "load"
    turn: int = 0


@dataclass(frozen=True, slots=True)
class Ready(_Told):
    """BMOE_READY: the session has its model."""

    event: ClassVar[str] = "ready"


@dataclass(frozen=True, slots=True)
class Begin(_Told):
    """BMOE_BEGIN: a request is being worked on."""

    event: ClassVar[str] = "begin"


@dataclass(frozen=True, slots=True)
class Decide(_Told):
    """BMOE_DECIDE: the answer to a decide request."""

    event: ClassVar[str] = "decide"


@dataclass(frozen=True, slots=True)
class Error(_Told):
    """BMOE_ERROR: a rejected request, or with `fatal` the end of the process."""

    event: ClassVar[str] = "error"


@dataclass(frozen=True, slots=True)
class Progress:
    """BMOE_PROGRESS: one token. `values` without the texts; `text` and `reasoning` are this line's new bytes.

    `reset`: they replace what came before. `delta_text` and `delta_reasoning` are the characters they complete; they
    are None where the line had no such key. Engines before 0.18 sent the whole text every time: then `cumulative` is
    true and the new bytes were found by comparing with the line before. `turn` counts turns that ended in BMOE_DONE.
    """

    event: ClassVar[str] = "progress"
    line: int
    values: Mapping[str, Any]
    text: bytes
    reasoning: bytes
    delta_text: str | None
    delta_reasoning: str | None
    reset: bool = False
    cumulative: Mapping[str, bytes] | None = None
    turn: int = 0

    def to_json(self) -> dict[str, Any]:
        """The object `bmoe events` prints: deltas decoded as one byte stream per text."""
        out = _json(self.event, self.line, self.values)
        if self.cumulative is not None:
            out.update({key: so_far(value) for key, value in self.cumulative.items()})
            return out
        if self.reset:
            out["reset"] = 1
        if self.delta_reasoning is not None:
            out["delta_reasoning"] = self.delta_reasoning
        if self.delta_text is not None:
            out["delta_text"] = self.delta_text
        return out


@dataclass(frozen=True, slots=True)
class Done:
    """BMOE_DONE: the summary of a turn. `values` without the texts; None where the line had no such text."""

    event: ClassVar[str] = "done"
    line: int
    values: Mapping[str, Any]
    text: bytes | None
    reasoning: bytes | None
    turn: int = 0

    def to_json(self) -> dict[str, Any]:
        """The object `bmoe events` prints."""
        out = _json(self.event, self.line, self.values)
        if self.reasoning is not None:
            out["reasoning"] = readable(self.reasoning)
        if self.text is not None:
            out["text"] = readable(self.text)
        return out


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer block: the whole generated text between its banners. Not `complete`: the output ended inside it."""

    event: ClassVar[str] = "answer"
    line: int
    text: bytes
    complete: bool = True

    def to_json(self) -> dict[str, Any]:
        """The object `bmoe events` prints."""
        return {"event": self.event, "line": self.line, "text": readable(self.text)}


@dataclass(frozen=True, slots=True)
class Report:
    """A line of the perf block: its name, its numbers by the names of `report.REPORT`, and its text."""

    event: ClassVar[str] = "report"
    line: int
    name: str
    facts: Mapping[str, Any]
    text: str

    def to_json(self) -> dict[str, Any]:
        """The object `bmoe events` prints."""
        return {"event": self.event, "line": self.line, "name": self.name, "facts": dict(self.facts), "text": self.text}


@dataclass(frozen=True, slots=True)
class Other:
    """A line nothing here understands, a malformed telemetry line included: kept as it is."""

    event: ClassVar[str] = "other"
    line: int
    raw: bytes

    @property
    def text(self) -> str:
        """The line, decoded."""
        return readable(self.raw)

    def to_json(self) -> dict[str, Any]:
        """The object `bmoe events` prints."""
        return {"event": self.event, "line": self.line, "text": self.text}


Event = Load | Progress | Ready | Begin | Done | Decide | Error | Answer | Report | Other
