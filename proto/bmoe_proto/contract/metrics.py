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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bmoe_proto.contract.columns import METRICS, OLDEST_METRICS, PREAMBLE, TRAILER, done_spelling
from bmoe_proto.contract.preamble import read_pairs
from bmoe_proto.contract.tables import Problem, Problems, columns_of
from bmoe_proto.contract.text import to_utf8

_VERSION = re.compile(r"# bmoe_metrics v(\d+)\s*")
_SUMMARY = "# summary"


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


def parse_metrics(data: bytes) -> MetricsFile:
    """Read a whole file. Raises NotOursError when it is none of this engine's."""
    utf8, encoding = to_utf8(data)
    return _Reader(utf8.decode("utf-8", "replace"), encoding).read()


def is_header(line: str) -> bool:
    """Whether a line is the header of a metrics CSV: the oldest columns are all there."""
    return set(OLDEST_METRICS) <= {name.strip() for name in line.split(",")}


@dataclass(slots=True)
class _Reader:
    """Reads one file from top to bottom: rows between two lines of another kind are taken together."""

    text: str
    encoding: str
    version: int = 0
    preamble: dict[str, Any] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    columns: dict[str, list[Any]] = field(default_factory=dict)
    turns: list[int] = field(default_factory=list)
    trailers: list[Trailer] = field(default_factory=list)
    problems: Problems = field(default_factory=Problems)
    header: list[str] = field(default_factory=list)  # of the rows being read

    def read(self) -> MetricsFile:
        lines = self.text.split("\n")
        if "\r" in self.text:
            lines = [line.removesuffix("\r") for line in lines]
        torn = bool(lines[-1])
        if not torn:
            lines.pop()
        at = 0
        while at < len(lines):
            if self._special(lines[at]):
                self._line(lines[at], at + 1)
                at += 1
                continue
            end = at + 1
            while end < len(lines) and not self._special(lines[end]):
                end += 1
            self._rows(lines[at:end], at + 1, torn=torn and end == len(lines))
            at = end
        if not self.names:
            raise NotOursError(self._why_not(lines))
        return MetricsFile(
            self.version,
            self.preamble,
            self.names,
            self.columns,
            self.turns,
            self.trailers,
            self.problems,
            self.problems.more,
            self.encoding,
        )

    def _special(self, line: str) -> bool:
        return not line or line[0] in "# \t" or (line[0].isalpha() and is_header(line))

    def _line(self, line: str, number: int) -> None:
        if line.startswith(_SUMMARY):
            self._trailer(line, number)
        elif line.startswith("#"):
            found = _VERSION.fullmatch(line)
            if found:
                self.version = int(found[1])
            else:
                self._pairs(line.lstrip("# "), number)
        elif is_header(line.strip()):
            self._header([name.strip() for name in line.strip().split(",")], number)
        elif line.strip() and "=" in line and not self.header:
            self._pairs(line.strip(), number)  # a preamble line that was wrapped
        elif line.strip():
            self.problems.tell(number, f"neither row, preamble nor trailer: {line[:80]!r}")

    def _pairs(self, text: str, number: int) -> None:
        pairs = read_pairs(text, PREAMBLE)
        if not pairs and text.strip():
            self.problems.tell(number, f"preamble line without key=value: {text[:80]!r}")
        for key, value in pairs.items():
            if key in self.preamble and self.preamble[key] != value:
                self.problems.tell(number, f"{key}={value} after {key}={self.preamble[key]}: the first one stands")
            else:
                self.preamble[key] = value

    def _header(self, names: list[str], number: int) -> None:
        if len(set(names)) != len(names):
            self.problems.tell(number, "a column is named twice: the last one stands")
        self.header = names
        rows = len(self.turns)
        for name in names:
            if name not in self.columns:
                self.names.append(name)
                self.columns[name] = [None] * rows

    def _rows(self, lines: list[str], first: int, *, torn: bool) -> None:
        if not self.header:
            self.problems.tell(first, f"{len(lines)} lines before any header, the first {lines[0][:80]!r}")
            return
        if torn and lines[-1].count(",") != len(self.header) - 1:
            self.problems.tell(first + len(lines) - 1, f"the last row was cut off: {lines[-1][:80]!r}")
            lines = lines[:-1]
        numbers = range(first, first + len(lines))
        found, taken = columns_of(lines, numbers, self.header, METRICS, self.problems)
        for name, column in self.columns.items():
            column.extend(found.get(name) or [None] * len(taken))
        self._count_turns(found, len(taken))

    def _count_turns(self, found: Mapping[str, list[Any]], rows: int) -> None:
        """Turns of new rows: the column where there is one, else trailers passed and steps starting over."""
        here = len(self.trailers)
        turns = found.get("turn")
        before = 0
        for at in range(rows):
            turn = turns[at] if turns is not None else None
            step = found["step"][at] or 0
            if turn is None:
                if at and step <= before:
                    here += 1
                turn = here
            before = step
            self.turns.append(turn)

    def _trailer(self, line: str, number: int) -> None:
        values = read_pairs(line[len(_SUMMARY) :], TRAILER)
        # A turn has one trailer, so the next one's number follows the last; rows say it where some were written.
        turn = self.trailers[-1].turn + 1 if self.trailers else 0
        if self.turns and self.turns[-1] > turn:
            turn = self.turns[-1]
        self.trailers.append(Trailer(number, turn, values))

    def _why_not(self, lines: Sequence[str]) -> str:
        first = next((line for line in lines if line.strip() and not line.startswith("#")), "")
        if first.lstrip().startswith('"'):
            return "a quoted CSV, which this engine never writes"
        if not self.text.strip():
            return "the file is empty"
        if self.version:
            return "a bmoe_metrics preamble and no header of columns behind it"
        return f"no header naming {', '.join(OLDEST_METRICS)}; it begins {first[:60]!r}"
