"""The metrics CSV (`--csv`): a file's bytes in, its preamble, columns and trailers out.

The file (contract "CSV sink", generations "Metrics CSV headers"):

    # bmoe_metrics v2                      none before 0.8; v1 has no engine=
    # engine=0.19.0
    # model=a b.gguf arch=qwen3moe ...     any number of lines; a wrapped one goes on without its #
    step,steps,wall_ms,...                 the header; columns are known by name, unknown ones are kept
    1,48,0.141,...                         a row a token
    # summary tokens=48 s/tok=0.000 ...    a trailer a turn: in a session there are several, in mid-file

A killed engine leaves whole rows and no trailer. Encodings and line ends are those of `text.py`. -1 in the columns where the
contract says so, and anything not finite, is None; everything else is as the file says it. What could not be understood
is a `Problem` with its line, and stops nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bmoe_proto.contract.columns import METRICS, OLDEST_METRICS, PREAMBLE, TRAILER, done_spelling
from bmoe_proto.contract.preamble import read_pairs
from bmoe_proto.contract.tables import Problem, Problems, columns_of
from bmoe_proto.contract.text import readable, to_utf8

_VERSION = re.compile(r"# bmoe_metrics v(\d+)\s*")
_SUMMARY = "# summary"
_LOOK = 1 << 16  # how far a file that is not ours is looked at for a reason
# Rows begin with a digit; every line that does not is looked at on its own. The file is read as if one line end stood above it.
_SPECIAL = re.compile(rb"\n(?![-0-9])([^\n]*)")


class NotOursError(ValueError):
    """The bytes are no file of this engine; the message says why."""


@dataclass(frozen=True, slots=True)
class Trailer:
    """A `# summary` line: `values` by the engine's keys, `done` by the `BMOE_DONE` spellings."""

    line: int
    turn: int
    values: Mapping[str, Any]

    @property
    def done(self) -> dict[str, Any]:
        """The values under the spellings of BMOE_DONE."""
        return {done_spelling(key): value for key, value in self.values.items()}


@dataclass(frozen=True, slots=True)
class MetricsFile:
    """One metrics CSV. All columns are equally long; `turns` gives every row's turn, also where the file has no such column.

    `version`: of the preamble, 0 without one. `names`: the header. `encoding`: as `text.to_utf8` tells it.
    """

    version: int
    preamble: Mapping[str, Any]
    names: Sequence[str]
    columns: Mapping[str, list[Any]]
    turns: Sequence[int]
    trailers: Sequence[Trailer]
    problems: Sequence[Problem]
    more_problems: int = 0
    encoding: str = "utf-8"

    def __len__(self) -> int:
        return len(self.turns)

    @property
    def unknown(self) -> list[str]:
        """Columns the contract does not know: patched engines add their own."""
        return [name for name in self.names if name not in METRICS]


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows between two lines of another kind: their bytes as they stand, in UTF-8 with LF, and where they stand.

    `start`: of the first row in the file. `trailers`: how many came before it. `torn`: the last row has no line end.
    """

    names: tuple[str, ...]
    data: bytes
    start: int
    trailers: int
    torn: bool

    def rows(self) -> list[str]:
        """The rows, without line ends."""
        return readable(self.data if self.torn else self.data[:-1]).split("\n")


@dataclass(slots=True)
class Lines:
    """Line numbers of places in a file, counted only where somebody asks, and from the place asked about before."""

    data: bytes
    start: int = 0
    line: int = 1

    def at(self, start: int) -> int:
        """The 1-based number of the line that begins at `start`."""
        if start < self.start:
            self.start, self.line = 0, 1
        self.line += self.data.count(b"\n", self.start, start)
        self.start = start
        return self.line


@dataclass(frozen=True, slots=True)
class Layout:
    """A file with its rows not yet read. `trailers`: place and values of each. `lines`: line numbers of places."""

    version: int
    preamble: Mapping[str, Any]
    names: Sequence[str]
    segments: Sequence[Segment]
    trailers: Sequence[tuple[int, Mapping[str, Any]]]
    problems: Problems
    lines: Lines
    encoding: str


def read_layout(data: bytes) -> Layout:
    """Everything of a file but its rows. Raises NotOursError when it is none of this engine's."""
    utf8, encoding = to_utf8(data)
    utf8 = utf8.replace(b"\r\n", b"\n") if b"\r" in utf8 else utf8
    return _Reader(utf8, Lines(utf8), encoding).read()


def parse_metrics(data: bytes) -> MetricsFile:
    """Read a whole file. Raises NotOursError when it is none of this engine's."""
    layout = read_layout(data)
    columns: dict[str, list[Any]] = {name: [] for name in layout.names}
    turns: list[int] = []
    ends: dict[int, int] = {}  # trailer to the turn of the row before it
    for segment in layout.segments:
        found, count = _rows(segment, layout)
        for name, column in columns.items():
            column.extend(found.get(name) or [None] * count)
        turns += _turns(found, count, segment.trailers)
        if count:
            ends[segment.trailers] = turns[-1]
    trailers: list[Trailer] = []
    for at, (start, values) in enumerate(layout.trailers):
        # A turn has one trailer, so the next one's number follows the last; rows say it where some were written.
        turn = trailers[-1].turn + 1 if trailers else 0
        trailers.append(Trailer(layout.lines.at(start), max(turn, ends.get(at, -1)), values))
    return MetricsFile(
        layout.version,
        layout.preamble,
        layout.names,
        columns,
        turns,
        trailers,
        layout.problems,
        layout.problems.more,
        layout.encoding,
    )


def _rows(segment: Segment, layout: Layout) -> tuple[dict[str, list[Any]], int]:
    rows = segment.rows()
    problems = layout.problems
    first = layout.lines.at(segment.start)
    if segment.torn and rows[-1].count(",") != len(segment.names) - 1:
        problems.tell(first + len(rows) - 1, f"the last row was cut off: {rows[-1][:80]!r}")
        rows.pop()
    numbers = range(first, first + len(rows))
    found, taken = columns_of(rows, numbers, segment.names, METRICS, problems)
    return found, len(taken)


def _turns(found: Mapping[str, list[Any]], count: int, trailers: int) -> list[int]:
    """Turns of a segment's rows: the column where there is one, else trailers passed and steps starting over."""
    told = found.get("turn")
    if told is not None and None not in told:
        return told
    here = trailers
    before = 0
    out: list[int] = []
    for at in range(count):
        step = found["step"][at] or 0
        if at and step <= before:
            here += 1
        before = step
        turn = told[at] if told is not None else None
        out.append(here if turn is None else turn)
    return out


def is_header(line: str) -> bool:
    """Whether a line is the header of a metrics CSV: the oldest columns are all there."""
    return set(OLDEST_METRICS) <= {name.strip() for name in line.split(",")}


def is_row(line: str) -> bool:
    """Whether a line that begins with no digit may still be a row: a patched engine's first column may be a word."""
    return bool(line) and line[0] not in "# \t" and not is_header(line)


@dataclass(slots=True)
class _Reader:
    """Reads one file from top to bottom; what is between two lines of another kind than rows is left as it is."""

    data: bytes
    lines: Lines
    encoding: str
    version: int = 0
    preamble: dict[str, Any] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    trailers: list[tuple[int, Mapping[str, Any]]] = field(default_factory=list)
    problems: Problems = field(default_factory=Problems)
    header: tuple[str, ...] = ()  # of the rows being read
    here: int = 0  # where the line being read begins

    def read(self) -> Layout:
        data = self.data
        at = 0  # where what is not yet read begins
        for start, end in self._special_lines():
            line = readable(data[start:end])
            if self.header and is_row(line):
                continue
            self._segment(at, start)
            self.here = start
            self._line(line)
            at = end + 1
        self._segment(at, len(data))
        if not self.names:
            raise NotOursError(self._why_not())
        return Layout(
            self.version,
            self.preamble,
            self.names,
            self.segments,
            self.trailers,
            self.problems,
            self.lines,
            self.encoding,
        )

    def _tell(self, what: str) -> None:
        self.problems.tell(self.lines.at(self.here), what)

    def _special_lines(self) -> Iterator[tuple[int, int]]:
        """Start and end of every line that does not begin as a row does; what follows the last LF is a line if not empty."""
        data = self.data
        if data and not data[:1].isdigit() and data[:1] != b"-":
            end = data.find(b"\n")
            yield 0, len(data) if end < 0 else end
        for found in _SPECIAL.finditer(data):
            if found.end() != found.start() + 1 or found.end() != len(data):
                yield found.start() + 1, found.end()

    def _segment(self, start: int, end: int) -> None:
        if start >= end:
            return
        data = self.data[start:end]
        if self.header:
            torn = not data.endswith(b"\n")
            self.segments.append(Segment(self.header, data, start, len(self.trailers), torn))
        else:
            self.here = start
            self._tell(f"lines before any header, the first {readable(data[:80])!r}")

    def _line(self, line: str) -> None:
        if line.startswith(_SUMMARY):
            self.trailers.append((self.here, read_pairs(line[len(_SUMMARY) :], TRAILER)))
        elif line.startswith("#"):
            found = _VERSION.fullmatch(line)
            if found:
                self.version = int(found[1])
            else:
                self._pairs(line.lstrip("# "))
        elif is_header(line):
            self._header([name.strip() for name in line.split(",")])
        elif "=" in line and not self.header:
            self._pairs(line.strip())  # a preamble line that was wrapped
        elif line.strip():
            self._tell(f"neither row, preamble nor trailer: {line[:80]!r}")

    def _pairs(self, text: str) -> None:
        pairs = read_pairs(text, PREAMBLE)
        if not pairs and text.strip():
            self._tell(f"preamble line without key=value: {text[:80]!r}")
        for key, value in pairs.items():
            if key in self.preamble and self.preamble[key] != value:
                self._tell(f"{key}={value} after {key}={self.preamble[key]}: the first one stands")
            else:
                self.preamble[key] = value

    def _header(self, names: list[str]) -> None:
        if len(set(names)) != len(names):
            self._tell("a column is named twice: the last one stands")
        self.header = tuple(names)
        self.names += [name for name in dict.fromkeys(names) if name not in self.names]

    def _why_not(self) -> str:
        text = readable(self.data[:_LOOK])
        first = next((line for line in text.split("\n") if line.strip() and not line.startswith("#")), "")
        if first.lstrip().startswith('"'):
            return "a quoted CSV, which this engine never writes"
        if not text.strip():
            return "the file is empty"
        if self.version:
            return "a bmoe_metrics preamble and no header of columns behind it"
        return f"no header naming {', '.join(OLDEST_METRICS)}; it begins {first[:60]!r}"
