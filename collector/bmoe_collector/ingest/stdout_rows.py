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
from bmoe_proto.contract.quick import LINE, VALUES
from bmoe_proto.contract.stdout import StdoutParser

from bmoe_collector.ingest.sink import PROGRESS, Sink
from bmoe_collector.store.engine import to_json, view

assert PROGRESS.columns == VALUES, "the short cut's values are the table's columns"
NO_LOAD: tuple[Any, Any] = (None, None)


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
        self.unseen = 0  # tokens the engine counts beyond the lines that are here, where there are any
        self.short_turns = 0  # ended with fewer tokens than asked
        self.steps_asked: int | None = None
        self._answer: said.Answer | None = None
        self._load: tuple[Any, Any] = NO_LOAD
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
        parser, at, size = self._parser, 0, len(data)
        while at < size:
            if parser.plain and self._load is NO_LOAD:
                at = self._quick(data, at, boot_ns, uncertainty_ns)
                if at == size:
                    return
            # One line by the parser, then perhaps quickly on; all of the rest where it holds something back.
            end = data.find(b"\n", at, size) + 1 or size
            self._events(parser.feed(data[at:end]), boot_ns, uncertainty_ns)
            at = end

    def _quick(self, data: bytes, at: int, boot_ns: int | None, uncertainty_ns: int | None) -> int:
        """Take usual lines from `at` on as `_events` would; returns where the first other one begins."""
        rows, place = self._sink.take("tokens_stdout")
        run_no, turn, line = self._sink.run_no, self._parser.turn, self._parser.lines
        first, before = place, line
        match = LINE.match
        texts: list[bytes] = []
        reasonings: list[bytes] = []
        steps = self._turn_steps
        while (found := match(data, at)) is not None:
            mb, ms, step, of, wall, io, compute, mgmt, stall, read, hit, majflt, cpu, dense, thought, text = (
                found.groups()
            )
            line += 1 if mb is None else 2
            steps = int(of)
            cache_hit, resident = float(hit), float(dense)
            rows.append(
                (
                    run_no, place, turn, int(step), steps, float(wall), float(io), float(compute), float(mgmt),
                    float(stall), float(read), None if cache_hit == -1 else cache_hit, int(majflt), float(cpu),
                    None if resident == -1 else resident, mb and float(mb), ms and float(ms), None, thought or None, text,
                    line, boot_ns, uncertainty_ns, None,
                )
            )  # fmt: skip
            place += 1
            texts.append(text)
            reasonings.append(thought)
            at = found.end()
        if place != first:
            said, thought = b"".join(texts), b"".join(reasonings)
            self._parser.took(line - before, said, thought)
            self._sink.give("tokens_stdout", place)
            self._text += said
            self._reasoning += thought
            self.tokens += place - first
            self._turn_tokens += place - first
            self._turn_steps = steps
        return at

    def _events(self, found: Iterable[said.Event], boot_ns: int | None, uncertainty_ns: int | None) -> None:
        self._boot_ns = boot_ns
        rows, at = self._sink.take("tokens_stdout")
        run_no, split = self._sink.run_no, PROGRESS.checked
        for event in found:
            kind = type(event)
            if kind is said.Load:
                self._loaded(event)
            elif kind is said.Progress:
                assert isinstance(event, said.Progress)
                values, extra = split(event.values)
                text, reasoning, reset = event.text, event.reasoning, event.reset
                mb, ms = self._load
                self._load = NO_LOAD
                rows.append(
                    (
                        *(run_no, at, event.turn, *values, mb, ms, reset or None, reasoning or None, text, event.line),
                        *(boot_ns, uncertainty_ns, None if extra is None else to_json(extra)),
                    )
                )
                at += 1
                self.tokens += 1
                self._turn_tokens += 1
                self._turn_steps = event.values.get("steps")
                if reset:
                    self._text[:] = text
                    self._reasoning[:] = reasoning
                else:
                    self._text += text
                    self._reasoning += reasoning
            else:
                self._control(event)
        self._sink.give("tokens_stdout", at)

    def _loaded(self, event: said.Event) -> None:
        assert isinstance(event, said.Load)
        mb, ms = event.values.get("mb"), event.values.get("ms")
        usual = isinstance(mb, float) and isinstance(ms, float) and len(event.values) == 2
        if usual and self._load is NO_LOAD:
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
        self._compare(tokens)
        self.short_turns += self._turn_steps is not None and self._turn_tokens < self._turn_steps
        self.cancelled += cancelled
        self.done += 1
        self.turns += 1
        self._new_turn()

    def _compare(self, told: int | None) -> None:
        """There is a line for every generated token (telemetry.md, BMOE_PROGRESS): fewer means that output was lost."""
        if told is not None and 0 < self._turn_tokens < told:
            self.unseen += told - self._turn_tokens

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
        self._load = NO_LOAD

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
        if self._load is not NO_LOAD:
            mb, ms = self._load
            self._other(0, "BMOE_LOAD " + to_json({"mb": mb, "ms": ms}))
            self._load = NO_LOAD
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
        self._compare(told)
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
