"""A session cell: the requests, one outstanding at a time, and what came of each. Sans-IO.

In: the cell's turns, the engine's events (`phase.Event`) and the time. Out: bytes to write to the engine's stdin, turn
reports for the record, and when to close. The runner does the writing.

Rules, from the contract ("Session mode") and generations.md ("Behaviour seen on a real 0.19 build"):

- A request is raw UTF-8 with nothing escaped that need not be (an escaped character keeps only its low byte) and its
  text last, since the engine finds keys by searching the line.
- Closing stdin lets queued turns finish first, so nothing is ever queued.
- A cancel that arrives before BMOE_BEGIN is lost: it is sent after, and again until the turn has ended.

A turn goes `sent` -> `began` -> one of `done`, `decided`, `cancelled`, `rejected`, `fatal`; what was never sent is
`not_run`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from bmoe_proto.v1 import telemetry_pb2 as pb

from bmoe_agent.phase import Event

CANCEL_LINE = b'{"cmd":"cancel"}\n'
CLOSE_LINE = b'{"cmd":"close"}\n'
CANCEL_AGAIN_NS = 500_000_000


@dataclass(frozen=True, slots=True)
class Report:
    """One step of one turn, for the record."""

    index: int
    request_id: int
    state: str
    request: bytes = b""
    detail: str = ""


@dataclass(slots=True)
class Step:
    """What to do now."""

    write: bytes = b""
    reports: list[Report] = field(default_factory=list)
    close: bool = False
    next_ns: int | None = None  # look again at this time even if nothing happens


def request_line(turn: pb.Turn, request_id: int) -> bytes:
    """The turn as one line of the contract's requests."""
    if turn.kind == "decide":
        body: dict[str, object] = {"cmd": "decide", "id": request_id}
        if turn.HasField("reuse_prefix"):
            body["reuse_prefix"] = turn.reuse_prefix
        body |= {"choices": list(turn.choices), "suffix": turn.suffix, "prefix": turn.prefix}
    else:
        body = {"cmd": "generate", "id": request_id}
        for key in ("n_predict", "think", "clear_kv"):
            if turn.HasField(key):
                body[key] = getattr(turn, key)
        body["prompt"] = turn.prompt
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


class Session:
    """The turns of one session cell."""

    def __init__(self, turns: Sequence[pb.Turn]) -> None:
        self.turns = list(turns)
        self.states = ["" for _ in turns]
        self.current: int | None = None  # index of the outstanding turn
        self.closed = False
        self.stopping = ""  # why no further turn will be sent
        self._next = 0
        self._free_since_ns: int | None = None  # since when the engine waits for a request
        self._began_ns = 0
        self._cancel_sent_ns: int | None = None

    @property
    def sent(self) -> int:
        """Turns whose request was written."""
        return sum(1 for state in self.states if state and state != "not_run")

    @property
    def ended(self) -> int:
        """Turns that came to an end of their own: done, decided, cancelled or rejected."""
        return sum(1 for state in self.states if state in {"done", "decided", "cancelled", "rejected"})

    @property
    def unplanned_cancels(self) -> int:
        """Turns cut short although the plan did not ask for it."""
        return sum(
            1
            for turn, state in zip(self.turns, self.states, strict=True)
            if state == "cancelled" and not (turn.HasField("cancel_after_ms") or turn.HasField("cancel_after_tokens"))
        )

    @property
    def unexpected_rejections(self) -> int:
        """Turns the engine refused although the plan did not expect it."""
        return sum(
            1
            for turn, state in zip(self.turns, self.states, strict=True)
            if state == "rejected" and not turn.expect_rejected
        )

    @property
    def finished(self) -> bool:
        """Whether nothing is outstanding and nothing will be sent."""
        return self.current is None and (self._next >= len(self.turns) or bool(self.stopping))

    def stop(self, why: str) -> None:
        """Send no further turn; the outstanding one goes on to its end unless it is cancelled too."""
        self.stopping = self.stopping or why

    def on(self, event: Event) -> list[Report]:
        """Take one of the engine's events."""
        if event.name == "ready":
            self._free_since_ns = event.boot_ns
            return []
        if event.name == "error" and event.fatal:
            self.stop("fatal error")
            return self._end(event, "fatal")
        if self.current is None or event.request_id not in {self.current + 1, None, 0}:
            return []
        if event.name == "begin":
            self._began_ns = event.boot_ns
            self.states[self.current] = "began"
            return [Report(self.current, self.current + 1, "began")]
        if event.name == "done":
            return self._end(event, "cancelled" if event.cancelled else "done")
        if event.name == "decided":
            return self._end(event, "cancelled" if event.cancelled else "decided")
        if event.name == "error":
            return self._end(event, "rejected")
        return []

    def step(self, now_ns: int, turn_tokens: int) -> Step:
        """What to do at this time; `turn_tokens` is how many tokens the outstanding turn has."""
        step = Step()
        if self.closed:
            return step
        if self.current is not None:
            self._consider_cancel(now_ns, turn_tokens, step)
            return step
        if self.finished:
            if self._free_since_ns is not None or self.stopping:
                self.closed = True
                step.close = True
                step.write = CLOSE_LINE
            return step
        if self._free_since_ns is None:
            return step
        turn = self.turns[self._next]
        due_ns = self._free_since_ns + turn.idle_before_ms * 1_000_000
        if now_ns < due_ns:
            step.next_ns = due_ns
            return step
        index = self._next
        line = request_line(turn, index + 1)
        self._next += 1
        self.current = index
        self.states[index] = "sent"
        self._cancel_sent_ns = None
        step.write = line
        step.reports.append(Report(index, index + 1, "sent", line))
        return step

    def abandon(self, why: str) -> list[Report]:
        """The engine is gone, or its stdin is: whatever was not sent is `not_run`."""
        self.closed = True
        self.stop(why)
        reports = []
        for index, state in enumerate(self.states):
            if not state:
                self.states[index] = "not_run"
                reports.append(Report(index, index + 1, "not_run", detail=why))
        return reports

    def restore(self, reports: Sequence[pb.TurnReport]) -> None:
        """Continue from a record: the reports of an agent that was killed, in order."""
        for report in reports:
            if report.index < len(self.states):
                self.states[report.index] = report.state
        outstanding = [index for index, state in enumerate(self.states) if state in {"sent", "began"}]
        self.current = outstanding[-1] if outstanding else None
        self._next = max((index + 1 for index, state in enumerate(self.states) if state), default=0)

    def _consider_cancel(self, now_ns: int, turn_tokens: int, step: Step) -> None:
        assert self.current is not None
        if self.states[self.current] != "began":
            return
        turn = self.turns[self.current]
        due = False
        if turn.HasField("cancel_after_tokens"):
            due |= turn_tokens >= turn.cancel_after_tokens
        if turn.HasField("cancel_after_ms"):
            at_ns = self._began_ns + turn.cancel_after_ms * 1_000_000
            due |= now_ns >= at_ns
            if not due:
                step.next_ns = at_ns
        if not due:
            return
        if self._cancel_sent_ns is None or now_ns - self._cancel_sent_ns >= CANCEL_AGAIN_NS:
            self._cancel_sent_ns = now_ns
            step.write = CANCEL_LINE
        step.next_ns = self._cancel_sent_ns + CANCEL_AGAIN_NS

    def _end(self, event: Event, state: str) -> list[Report]:
        if self.current is None:
            return []
        index = self.current
        self.current = None
        self._free_since_ns = event.boot_ns
        self.states[index] = state
        return [Report(index, index + 1, state, detail=event.message)]
