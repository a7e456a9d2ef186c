"""Engine stdout to rows: tokens, turns, report lines and what nothing understood.

In: stdout's bytes in any pieces, with the time their frame was stamped (none for an imported file). Out: rows in a
`Sink`, and the facts of the run's end that only stdout shows. Turns are numbered as the metrics CSV numbers them:
generations that ended in BMOE_DONE, from 0; a rejected request and a decision take none (generations.md, "Behaviour").
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bmoe_proto.contract import events as said
from bmoe_proto.contract.stdout import StdoutParser

from bmoe_collector.ingest.sink import PROGRESS, Sink, json_or_none
from bmoe_collector.store.engine import to_json, view


@dataclass(slots=True)
class Request:
    """What was asked in a session, as the agent recorded it."""

    index: int
    request: Any
    state: str
    detail: str = ""
    used: bool = False


class StdoutRows:
    """One engine's stdout."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._parser = StdoutParser()
        self.requests: dict[int, Request] = {}
        self.ready: Mapping[str, Any] | None = None
        self.session = False
        self.generation: Mapping[str, Any] = {}  # facts of the report's `generation` line
        self.report_seen = False
        self.fatal_error = ""
        self.tokens = 0
        self.turns = 0  # generations and decisions with an end, or begun
        self.done = 0
        self.decided = 0
        self.cancelled = 0
        self.rejected: list[int | None] = []
        self.short_turns = 0  # ended with fewer tokens than asked
        self.steps_asked: int | None = None
        self._answer: said.Answer | None = None
        self._load: tuple[Any, Any] = (None, None)
        self._begun: int | None = None
        self._open = False
        self._begin_boot_ns: int | None = None
        self._turn_tokens = 0
        self._turn_steps: int | None = None
        self._text = bytearray()
        self._reasoning = bytearray()
        self._boot_ns: int | None = None
        self._closed = False

    def feed(self, data: bytes, boot_ns: int | None = None, uncertainty_ns: int | None = None) -> None:
        """Take the next bytes of stdout."""
        self._events(self._parser.feed(data), boot_ns, uncertainty_ns)

    def _events(self, found: Iterable[said.Event], boot_ns: int | None, uncertainty_ns: int | None) -> None:
        self._boot_ns = boot_ns
        add = self._sink.add
        for event in found:
            if isinstance(event, said.Progress):
                values, extra = PROGRESS.split(event.values)
                text, reasoning = event.text, event.reasoning
                add(
                    "tokens_stdout",
                    event.turn,
                    *values,
                    *self._load,
                    event.reset or None,
                    reasoning or None,
                    text,
                    event.line,
                    boot_ns,
                    uncertainty_ns,
                    json_or_none(extra),
                )
                self._load = (None, None)
                self.tokens += 1
                self._turn_tokens += 1
                self._turn_steps = event.values.get("steps")
                if event.reset:
                    self._text[:] = text
                    self._reasoning[:] = reasoning
                else:
                    self._text += text
                    self._reasoning += reasoning
            elif isinstance(event, said.Load):
                self._loaded(event)
            else:
                self._control(event)

    def _loaded(self, event: said.Load) -> None:
        mb, ms = event.values.get("mb"), event.values.get("ms")
        usual = isinstance(mb, (int, float)) and isinstance(ms, (int, float)) and len(event.values) == 2
        if usual and self._load == (None, None):
            self._load = (mb, ms)
        else:  # a second one before its token, or keys of its own: kept whole
            self._other(event.line, "BMOE_LOAD " + to_json(dict(event.values)))

    def _other(self, line: int, text: str | bytes) -> None:
        self._sink.add("other_lines", "stdout", line, self.done, view(text))

    def _control(self, event: said.Event) -> None:
        if isinstance(event, said.Report):
            self.report_seen = True
            if event.name == "generation":
                self.generation = event.facts
            self._sink.add("report_lines", self.done, view(event.name), to_json(dict(event.facts)), view(event.text))
        elif isinstance(event, said.Other):
            self._other(event.line, event.raw)
        elif isinstance(event, said.Answer):
            self._answer = event
        elif isinstance(event, said.Ready):
            self.session = True
            self.ready = dict(event.values)
        elif isinstance(event, said.Begin):
            self._cut_open_turn()
            self.session = self._open = True
            self._begun = _number(event.values.get("id"))
            self._begin_boot_ns = self._boot_ns
        elif isinstance(event, said.Done):
            self._done(event)
        elif isinstance(event, said.Decide):
            self._decided(event)
        elif isinstance(event, said.Error):
            self._failed(event)

    def _done(self, event: said.Done) -> None:
        self.session = True
        values = event.values
        tokens = _number(values.get("tokens"))
        cancelled = values.get("cancelled") is True
        self._sink.turn(
            turn=self.done,
            request_id=_number(values.get("id")),
            kind="generate",
            state="cancelled" if cancelled else "done",
            tokens=self._turn_tokens if tokens is None else tokens,
            cancelled=cancelled,
            text=bytes(self._text) if event.text is None else event.text,
            reasoning=bytes(self._reasoning) if event.reasoning is None else event.reasoning,
            request=self._asked(values.get("id")),
            begin_boot_ns=self._begin_boot_ns,
            end_boot_ns=self._boot_ns,
            summary=values,
        )
        if tokens is not None and self._turn_tokens == 0:
            self.tokens += tokens
        self.short_turns += self._turn_steps is not None and self._turn_tokens < self._turn_steps
        self.cancelled += cancelled
        self.done += 1
        self.turns += 1
        self._new_turn()

    def _decided(self, event: said.Decide) -> None:
        self.session = True
        cancelled = event.values.get("cancelled") is True
        self._sink.turn(
            turn=None,
            request_id=_number(event.values.get("id")),
            kind="decide",
            state="cancelled" if cancelled else "decided",
            tokens=0,
            cancelled=cancelled,
            request=self._asked(event.values.get("id")),
            decide=dict(event.values),
            begin_boot_ns=self._begin_boot_ns,
            end_boot_ns=self._boot_ns,
        )
        self.cancelled += cancelled
        self.decided += 1
        self.turns += 1
        self._new_turn()

    def _failed(self, event: said.Error) -> None:
        self.session = True
        fatal = event.values.get("fatal") is True
        number = _number(event.values.get("id"))
        if fatal:
            self.fatal_error = str(event.values.get("msg") or "fatal error without a message")
        mine = self._open and number == self._begun
        # A generation that broke off has rows in the CSV, under the number it would have had.
        broken = fatal and mine and self._turn_tokens > 0
        self._sink.turn(
            turn=self.done if broken else None,
            request_id=number,
            kind="generate" if broken else "rejected",
            state="fatal" if fatal else "rejected",
            tokens=self._turn_tokens if mine else 0,
            text=bytes(self._text) if mine else b"",
            reasoning=bytes(self._reasoning) if mine else b"",
            request=self._asked(event.values.get("id")),
            error=dict(event.values),
            begin_boot_ns=self._begin_boot_ns if mine else None,
            end_boot_ns=self._boot_ns,
        )
        if not fatal:
            self.rejected.append(number)
        if mine or not self._open:
            self._new_turn()

    def _asked(self, number: Any) -> Any:
        request = self.requests.get(number) if isinstance(number, int) else None
        if request is None:
            return None
        request.used = True
        return request.request

    def _new_turn(self) -> None:
        self._open = False
        self._begun = None
        self._begin_boot_ns = None
        self._turn_tokens = 0
        self._turn_steps = None
        self._text.clear()
        self._reasoning.clear()
        self._load = (None, None)

    def _cut_open_turn(self) -> None:
        """A session's turn that never ended: what there is of it."""
        if not self._open and not (self.session and self._turn_tokens):
            return
        self._sink.turn(
            turn=self.done,
            request_id=self._begun,
            kind="generate",
            state="began",
            tokens=self._turn_tokens,
            text=bytes(self._text),
            reasoning=bytes(self._reasoning),
            request=self._asked(self._begun),
            begin_boot_ns=self._begin_boot_ns,
        )
        self.turns += 1
        self._new_turn()

    def close(self) -> None:
        """The end of stdout: the last line as it is, the one-shot's turn, a session's turn that was cut."""
        if self._closed:
            return
        self._closed = True
        self._events(self._parser.close(), None, None)
        if self._load != (None, None):
            mb, ms = self._load
            self._other(0, "BMOE_LOAD " + to_json({"mb": mb, "ms": ms}))
            self._load = (None, None)
        if self.session or self.requests:
            self._cut_open_turn()
            for number, request in self.requests.items():
                if not request.used and request.state in ("not_run", "fatal", "cancelled", "sent", "began"):
                    self._sink.turn(
                        turn=None,
                        request_id=number,
                        kind="generate",
                        state=request.state,
                        tokens=0,
                        cancelled=request.state == "cancelled",
                        request=request.request,
                    )
            return
        answer = self._answer
        told = _number(self.generation.get("tokens"))
        if self.tokens == 0 and told is not None:
            self.tokens = told
        if not self.tokens and answer is None and not self.report_seen:
            return
        self.steps_asked = self._turn_steps
        self.turns += 1
        self._sink.turn(
            turn=0,
            request_id=None,
            kind="oneshot",
            state="done" if self.report_seen else "began",
            tokens=self.tokens,
            text=answer.text if answer is not None and answer.complete else bytes(self._text),
            reasoning=bytes(self._reasoning),
        )


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
