"""Where a running engine is: the least reading of its stdout that running it needs (law 1).

In: complete lines of stdout with their boot time. Out: `Phases` (load, prefill, decode, ...), `Event`s for what the
session and the sampler act upon, the number of tokens and their recent rate. Everything else is read on the host.

A one-shot engine prints nothing between its start and the first token, so load and prefill are one phase there
("load"). What the model generated can look like telemetry, but only inside the answer block of a one-shot run:
after that block begins, nothing counts as telemetry any more (contract, "End-of-run lines").
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Phase = Literal["load", "ready", "prefill", "decode", "finishing", "fatal"]
EventName = Literal["ready", "begin", "first_token", "done", "decided", "error", "answer"]
RATE_WINDOW_NS = 5_000_000_000

# Numbers of at most 18 digits: what is longer is no count, and Python refuses to read one of thousands.
_ID = re.compile(rb'"id"\s*:\s*(-?\d{1,18})(?!\d)')
_FATAL = re.compile(rb'"fatal"\s*:\s*true')
_CANCELLED = re.compile(rb'"cancelled"\s*:\s*true')
_TOKENS = re.compile(rb'"tokens"\s*:\s*(\d{1,18})(?!\d)')
_STEPS = re.compile(rb'"steps"\s*:\s*(\d{1,18})(?!\d)')
_GENERATED = re.compile(rb"generation: (\d{1,18}) tokens")
_HEAD_BYTES = 512  # keys of a control line stand before its texts


@dataclass(frozen=True, slots=True)
class Event:
    """Something of the engine's that the agent acts upon."""

    name: EventName
    boot_ns: int
    request_id: int | None = None
    fatal: bool = False
    cancelled: bool = False
    tokens: int | None = None
    message: str = ""


class Phases:
    """Feed it stdout's lines; it knows where the engine is."""

    def __init__(self, *, session: bool) -> None:
        self.session = session
        self.phase: Phase = "load"
        self.tokens = 0
        self.turn_tokens = 0
        self.turns_ended = 0
        self.ready = False
        self.saw_end = False  # the perf block, or a DONE, DECIDE or ERROR
        self.reported_tokens: int | None = None
        self.steps_asked: int | None = None  # what the engine says it was asked for, all turns together
        self.fatal_message = ""
        self.last_token_boot_ns: int | None = None
        self._answer = False
        self._recent: deque[tuple[int, int]] = deque()

    def feed(self, lines: Sequence[bytes], boot_ns: int) -> list[Event]:
        """Take complete lines that were seen at `boot_ns`, oldest first."""
        events: list[Event] = []
        before = self.tokens
        for line in lines:
            if line.startswith(b"BMOE_PROGRESS "):
                if not self._answer:
                    self._token(line, events, boot_ns)
            elif self._answer:
                self._report(line)
            elif line.startswith(b"BMOE_"):
                self._control(line, boot_ns, events)
            elif not self.session and line.rstrip(b"\r\n") == b"=== answer ===":
                self._answer = True
                self.phase = "finishing"
                events.append(Event("answer", boot_ns))
        if self.tokens != before:
            self._recent.append((boot_ns, self.tokens))
            while len(self._recent) > 2 and boot_ns - self._recent[0][0] > RATE_WINDOW_NS:
                self._recent.popleft()
        return events

    def rate_tok_s(self, boot_ns: int) -> float | None:
        """Tokens a second over the last seconds by the tail's stamps; None without two stamps or after a silence."""
        if len(self._recent) < 2 or boot_ns - self._recent[-1][0] > RATE_WINDOW_NS:
            return None
        (first_ns, first), (last_ns, last) = self._recent[0], self._recent[-1]
        return (last - first) * 1e9 / (last_ns - first_ns) if last_ns > first_ns else None

    @property
    def got_tokens(self) -> int:
        """Tokens generated: the lines counted, or what the report says when there were no lines."""
        return max(self.tokens, self.reported_tokens or 0)

    def _token(self, line: bytes, events: list[Event], boot_ns: int) -> None:
        self.tokens += 1
        self.turn_tokens += 1
        self.last_token_boot_ns = boot_ns
        if self.phase != "decode":
            if steps := _STEPS.search(line[:_HEAD_BYTES]):
                self.steps_asked = (self.steps_asked or 0) + int(steps[1])
            self.phase = "decode"
            events.append(Event("first_token", boot_ns))

    def _control(self, line: bytes, boot_ns: int, events: list[Event]) -> None:
        tag, _, rest = line.partition(b" ")
        head = rest[:_HEAD_BYTES]
        if tag == b"BMOE_READY":
            self.ready = True
            self.phase = "ready"
            events.append(Event("ready", boot_ns))
        elif tag == b"BMOE_BEGIN":
            self.phase = "prefill"
            self.turn_tokens = 0
            self._recent.clear()
            events.append(Event("begin", boot_ns, _request_id(head)))
        elif tag in {b"BMOE_DONE", b"BMOE_DECIDE"}:
            self._ended()
            tokens = _TOKENS.search(head)
            events.append(
                Event(
                    "done" if tag == b"BMOE_DONE" else "decided",
                    boot_ns,
                    _request_id(head),
                    cancelled=bool(_CANCELLED.search(head)),
                    tokens=int(tokens[1]) if tokens else None,
                )
            )
        elif tag == b"BMOE_ERROR":
            fatal = bool(_FATAL.search(head))
            self._ended()
            message = _message(rest)
            if fatal:
                self.phase = "fatal"
                self.fatal_message = message or "no message"
            events.append(Event("error", boot_ns, _request_id(head), fatal=fatal, message=message))

    def _ended(self) -> None:
        self.saw_end = True
        self.turns_ended += 1
        self.phase = "ready"
        self._recent.clear()

    def _report(self, line: bytes) -> None:
        """After the answer began: the last generation line that follows a perf banner is the engine's own."""
        if line.rstrip(b"\r\n") == b"=== perf ===":
            self.saw_end = True
        elif self.saw_end and (found := _GENERATED.match(line)):
            self.reported_tokens = int(found[1])


def _request_id(head: bytes) -> int | None:
    found = _ID.search(head)
    return int(found[1]) if found else None


def _message(rest: bytes) -> str:
    try:
        value = json.loads(rest.decode("utf-8", "replace"))
        return str(value["msg"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return rest[:300].decode("utf-8", "replace").strip()
