"""The engine's standard output: bytes in any pieces in, events out. No files, clocks or threads.

    parser = StdoutParser()
    events = parser.feed(data) + parser.feed(more) + parser.close()

Every line outside an answer block becomes exactly one event; nothing is dropped and nothing raises, whatever the bytes.
A line is `BMOE_<TAG> {json}` (contract "Per-token lines", "Session mode"), a line of the perf block (`report.py`), a
banner, or `Other`. Lines end at LF; a CR before it belongs to the line end. Where a format rule bends:

- JSON strings hold raw bytes, cut between the bytes of a character, and may hold control bytes; numbers may be `nan`.
- The answer block holds arbitrary text, banners and telemetry-looking lines included. With `--progress` the deltas say
  what the answer is, so the block ends where its content is what they joined to (`_Block`).
- Without `--progress` the text stands inline; the report begins at its `generation:` line.
- The last line may be cut off: half a telemetry line is `Other`, half an answer is an `Answer` that is not `complete`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bmoe_proto.contract import columns
from bmoe_proto.contract.deltas import TextStream
from bmoe_proto.contract.events import (
    Answer,
    Begin,
    Decide,
    Done,
    Error,
    Event,
    Load,
    Other,
    Progress,
    Ready,
    Report,
)
from bmoe_proto.contract.report import read_line
from bmoe_proto.contract.text import Utf8Stream, readable
from bmoe_proto.contract.values import Shapes, checked_all, json_object, take_text

MAX_LINE = 64 << 20
"""Longest line held in memory; what is longer comes in pieces, as `Other`."""

_PROGRESS = b"BMOE_PROGRESS "
_ANSWER_BANNER = b"=== answer ==="
_PERF_BANNER = b"=== perf ==="
# What engines print before every token that read experts: as common as progress lines, so read without JSON.
_LOAD = re.compile(rb'BMOE_LOAD \{"mb":(\d+\.\d+),"ms":(\d+\.\d+)\}\r?')
_TAG = re.compile(rb"BMOE_([A-Z]+) ")
_MOST_TRIES = 64  # how often a block is compared with what it should be like before that is left to its end


@dataclass(slots=True)
class _Block:
    """The answer block being read. `expected`: the deltas joined; `crlf`: line ends became CRLF on the way here."""

    line: int
    expected: bytes
    crlf: bool
    began: bool  # there were progress lines, so the banner is the engine's
    lines: list[bytes] = field(default_factory=list)
    size: int = 0
    banners: list[int] = field(default_factory=list)  # places of lines that look like the end
    tries: int = 0

    def content(self, end: int | None = None) -> bytes:
        return b"\n".join(self.lines[:end])

    def add(self, line: bytes) -> bool:
        """Take a line; true when it is the banner after exactly the text the deltas joined to."""
        if self.crlf:
            line = line.removesuffix(b"\r")
        if line == _PERF_BANNER:
            # The newline before the banner is the banner's, so the content is one shorter than its lines with ends.
            if self.size - 1 == len(self.expected) and self.content() == self.expected:
                return True
            self.banners.append(len(self.lines))
        self.lines.append(line)
        self.size += len(line) + 1
        return False

    def ended_before(self, line: bytes) -> int | None:
        """Where the block ended, when `line` follows a banner and opens a report behind a text like the expected one.

        The block may hold more than the answer deltas: reasoning in front, a stop word behind.
        """
        if not self.banners or self.banners[-1] != len(self.lines) - 1 or self.tries > _MOST_TRIES:
            return None
        if not _opens_report(line):
            return None
        self.tries += 1
        content = self.content(self.banners[-1]).strip()
        like = self.expected.strip()
        return self.banners[-1] if content.endswith(like) or content.startswith(like) else None

    def likely_end(self) -> int | None:
        """At the end of the output: the last banner that a report follows and that is not part of the expected text."""
        for at in reversed(self.banners):
            if at + 1 == len(self.lines) or _opens_report(self.lines[at + 1]):
                inside = self.expected.startswith(self.content(at) + b"\n" + _PERF_BANNER + b"\n")
                return None if inside else at
        return None

    def cut_off(self) -> bytes:
        """The text of a block without an end."""
        content = self.content()
        return content + b"\n" if self.expected.startswith(content + b"\n") else content


def _opens_report(line: bytes) -> bool:
    if not line.startswith(b"generation: "):
        return False
    found = read_line(readable(line.rstrip(b"\r")))
    return found is not None and found.whole


class StdoutParser:
    """Reads one engine process's standard output."""

    def __init__(self) -> None:
        self._encoding = Utf8Stream()
        self._rest: list[bytes] = []  # pieces of the line not yet ended
        self._rest_size = 0
        self._oversize = False  # inside a line longer than MAX_LINE
        self._line = 0
        self._turn = 0
        self._text = TextStream()
        self._reasoning = TextStream()
        self._began = False  # a progress line of this text was seen
        self._session = False
        self._in_report = False
        self._report_name = ""
        self._banners = True  # the answer banner may open a block
        self._block: _Block | None = None
        self._shapes = Shapes(columns.PROGRESS, "step")
        self._readers: Mapping[bytes, Callable[[int, dict[str, Any]], Event]] = {
            b"LOAD": lambda line, found: Load(line, checked_all(columns.LOAD, found), self._turn),
            b"PROGRESS": self._progress,
            b"READY": self._ready,
            b"BEGIN": self._begin,
            b"DONE": self._done,
            b"DECIDE": lambda line, found: Decide(line, checked_all(columns.DECIDE, found)),
            b"ERROR": lambda line, found: Error(line, checked_all(columns.ERROR, found)),
        }

    @property
    def turn(self) -> int:
        """Turns ended by BMOE_DONE so far: the number of the one being worked on."""
        return self._turn

    @property
    def lines(self) -> int:
        """Whole lines read so far."""
        return self._line

    @property
    def plain(self) -> bool:
        """Whether the next byte begins a line that means what it says: the condition for `quick.LINE`."""
        return (
            self._encoding.encoding == "utf-8"
            and not self._rest
            and self._block is None
            and not self._oversize
            and not self._in_report
            and self._began
            and not self._text.waiting
            and not self._reasoning.waiting
        )

    def took(self, lines: int, text: bytes, reasoning: bytes) -> None:
        """Lines that `quick.LINE` matched were taken without this parser: how many, and the texts they added."""
        self._line += lines
        self._text.whole += text
        self._reasoning.whole += reasoning

    def feed(self, data: bytes) -> list[Event]:
        """Take the next bytes; the events of the lines they end."""
        out: list[Event] = []
        self._take(self._encoding.feed(data), out)
        return out

    def close(self) -> list[Event]:
        """The output ends here: the events of what was still open."""
        out: list[Event] = []
        self._take(self._encoding.close(), out)
        last = b"".join(self._rest)
        self._rest = []
        self._rest_size = 0
        if last and self._oversize:
            out.append(Other(self._line, last))
        elif last:
            self._line += 1
            self._one(last, out, ended=False)
        self._oversize = False
        while self._block is not None:
            self._end_block(self._block, out, torn=bool(last))
        return out

    def _take(self, data: bytes, out: list[Event]) -> None:
        if b"\n" not in data:
            self._hold(data, out)
            return
        if self._rest:
            data = b"".join((*self._rest, data))
            self._rest = []
            self._rest_size = 0
        lines = data.split(b"\n")
        last = lines.pop()
        for line in lines:
            if self._oversize or len(line) > MAX_LINE:
                self._long(line, out)
                self._oversize = False
            else:
                self._line += 1
                self._one(line, out)
        self._hold(last, out)

    def _hold(self, data: bytes, out: list[Event]) -> None:
        if not data:
            return
        self._rest.append(data)
        self._rest_size += len(data)
        if self._rest_size > MAX_LINE:
            held = b"".join(self._rest)
            whole = (len(held) - 1) // MAX_LINE * MAX_LINE
            self._pieces(held[:whole], out)
            self._rest = [held[whole:]]
            self._rest_size = len(held) - whole

    def _long(self, line: bytes, out: list[Event]) -> None:
        """The end of a line too long to hold."""
        self._pieces(line, out)
        if not self._oversize:
            self._line += 1

    def _pieces(self, data: bytes, out: list[Event]) -> None:
        if not self._oversize:
            self._line += 1
            self._oversize = True
        out.extend(Other(self._line, data[at : at + MAX_LINE]) for at in range(0, len(data), MAX_LINE))

    def _one(self, line: bytes, out: list[Event], *, ended: bool = True) -> None:
        """One line, without its LF."""
        if self._block is not None:
            self._in_block(self._block, line, out)
        elif line.startswith(_PROGRESS):
            try:
                out.append(self._progress(self._line, json_object(line, 14)))
            except (ValueError, RecursionError):
                out.append(Other(self._line, line.removesuffix(b"\r")))
        elif (load := _LOAD.fullmatch(line)) is not None:
            self._in_report = False
            out.append(Load(self._line, {"mb": float(load[1]), "ms": float(load[2])}, self._turn))
        else:
            out.extend(self._unhurried(line, ended))

    def _unhurried(self, line: bytes, ended: bool) -> list[Event]:
        """Every line but progress lines, which come by the thousand."""
        bare = line.removesuffix(b"\r")
        tag = _TAG.match(bare)
        if tag is not None:
            self._in_report = False
            read = self._readers.get(tag[1])
            if read is not None:
                try:
                    return [read(self._line, json_object(bare, tag.end()))]
                except (ValueError, RecursionError):
                    pass
            return [Other(self._line, bare)]
        if bare == _ANSWER_BANNER and ended and self._banners and not self._session:
            self._block = _Block(self._line, bytes(self._text.whole), line.endswith(b"\r"), self._began)
            self._in_report = False
            return []
        if bare == _PERF_BANNER:
            self._open_report()
            return [Other(self._line, bare)]
        if not self._in_report and _opens_report(bare):
            self._open_report()
        if self._in_report:
            text = readable(bare)
            found = read_line(text, self._report_name)
            if found is not None and (ended or found.whole):
                self._report_name = found.name
                return [Report(self._line, found.name, found.facts, text)]
        return [Other(self._line, bare)]

    def _open_report(self) -> None:
        self._in_report = True
        self._report_name = ""

    # ---------------------------------------------------------------- the answer block

    def _in_block(self, block: _Block, line: bytes, out: list[Event]) -> None:
        end = block.ended_before(line)
        if end is not None:
            self._answered(block, block.content(end), out)
            self._one(line, out)
        elif block.add(line):
            self._answered(block, block.content(), out)
        elif block.size > MAX_LINE + 4 * len(block.expected):
            self._answered(block, block.content(), out, complete=False)

    def _answered(self, block: _Block, text: bytes, out: list[Event], *, complete: bool = True) -> None:
        out.append(Answer(block.line, text, complete))
        self._block = None
        self._new_text()
        self._open_report()

    def _end_block(self, block: _Block, out: list[Event], *, torn: bool) -> None:
        """The output ends inside a block: find the likeliest reading of it. `torn`: its last line has no end."""
        end = block.likely_end()
        if end is not None:
            self._answered(block, block.content(end), out)
            self._again(block, end + 1, out, torn=torn)
        elif block.began:
            self._answered(block, block.content() if torn else block.cut_off(), out, complete=False)
        else:
            # No progress lines before and no report behind: generated text that happens to hold the banner.
            self._block = None
            out.append(Other(block.line, _ANSWER_BANNER))
            self._banners = False
            self._again(block, 0, out, torn=torn)
            self._banners = True

    def _again(self, block: _Block, first: int, out: list[Event], *, torn: bool) -> None:
        """Read lines of a block again as what they are outside one."""
        here = self._line
        for at in range(first, len(block.lines)):
            self._line = block.line + 1 + at
            self._one(block.lines[at], out, ended=not torn or at + 1 < len(block.lines))
        self._line = here

    # ---------------------------------------------------------------- telemetry lines

    def _new_text(self) -> None:
        self._text.clear()
        self._reasoning.clear()
        self._began = False

    def _progress(self, line: int, found: dict[str, Any]) -> Progress:
        delta_text = take_text(found, "delta_text")
        delta_reasoning = take_text(found, "delta_reasoning")
        reset = bool(found.pop("reset", 0))
        if delta_text is None and delta_reasoning is None and ("text" in found or "reasoning" in found):
            return self._cumulative_progress(line, found)
        values = self._shapes.check(found)
        self._token(values)
        if reset:
            self._text.clear()
            self._reasoning.clear()
        text, shown_text = (b"", None) if delta_text is None else self._text.add(delta_text)
        reasoning, shown_reasoning = (b"", None) if delta_reasoning is None else self._reasoning.add(delta_reasoning)
        return Progress(line, values, text, reasoning, shown_text, shown_reasoning, reset, None, self._turn)

    def _token(self, values: Mapping[str, Any]) -> None:
        """A new token: where nothing announces a generation, its first step does (outputs appended to one file)."""
        if self._began and values["step"] == 1 and not self._session:
            self._new_text()
        self._began = True

    def _cumulative_progress(self, line: int, found: dict[str, Any]) -> Progress:
        """Engines before 0.18 say the whole text on every line (generations "Standard output")."""
        texts = {key: text for key in ("reasoning", "text") if (text := take_text(found, key)) is not None}
        values = self._shapes.check(found)
        self._token(values)
        new_text, replaced_text = self._text.grow_to(texts.get("text", ""))
        new_reasoning, replaced_reasoning = self._reasoning.grow_to(texts.get("reasoning", ""))
        reset = replaced_text or replaced_reasoning
        if reset:
            new_text, new_reasoning = bytes(self._text.whole), bytes(self._reasoning.whole)
        whole = {key: text.encode("utf-8", "surrogateescape") for key, text in texts.items()}
        return Progress(line, values, new_text, new_reasoning, None, None, reset, whole, self._turn)

    def _ready(self, line: int, found: dict[str, Any]) -> Ready:
        values = checked_all(columns.READY, found)
        self._session = True
        return Ready(line, values)

    def _begin(self, line: int, found: dict[str, Any]) -> Begin:
        values = checked_all(columns.BEGIN, found)
        self._session = True
        self._new_text()
        return Begin(line, values)

    def _done(self, line: int, found: dict[str, Any]) -> Done:
        text = take_text(found, "text")
        reasoning = take_text(found, "reasoning")
        values = checked_all(columns.DONE, found)
        turn = self._turn
        self._turn += 1
        self._new_text()
        return Done(
            line,
            values,
            None if text is None else text.encode("utf-8", "surrogateescape"),
            None if reasoning is None else reasoning.encode("utf-8", "surrogateescape"),
            turn,
        )


def parse(data: bytes) -> list[Event]:
    """Every event of a whole output."""
    parser = StdoutParser()
    return parser.feed(data) + parser.close()
