"""The three decode traces: bytes in, header and columns out.

Formats (contract "Route trace", "Decode traces"), all with columns known by name:

    # route_trace v1                                        # compute_trace v1      # io_trace v1
    # model=<path> arch=... n_layer=... n_expert=...        # model=<path> ...      # model=<path> ...  (may be absent)
    # layer=<n> expert_bytes=<n> dense_bytes=<n>  (each)
    turn,phase,step,layer,slot,expert,weight,...            turn,...,op,name,...    turn,...,latency_ns

A path in `model=` may hold spaces. `layer` -1 is a true value in a compute trace; `weight` nan is None. Files of millions of rows
are read on the host with a data-frame library from `TraceHeader.offset` on; `parse_trace` is for small ones.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bmoe_proto.contract.columns import COMPUTE, IO, PREAMBLE, ROUTE, Table
from bmoe_proto.contract.metrics import NotOursError
from bmoe_proto.contract.preamble import read_pairs
from bmoe_proto.contract.tables import Problem, Problems, columns_of
from bmoe_proto.contract.text import readable, to_utf8

TABLES: Mapping[str, Table] = {"route": ROUTE, "compute": COMPUTE, "io": IO}
"""Kinds of trace and their columns."""

_BANNER = re.compile(r"# (route|compute|io)_trace v(\d+)\s*")
_WIDE = {"compute": "name"}  # a graph node's name may hold commas
_MOST_HEADER = 1 << 20


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """What stands above the rows. `layers`: the route trace's facts by layer. `offset`: where the rows begin, in UTF-8.

    `granularity` of a compute trace: "nodes" or "layers", told from its first row; empty without one and for others.
    """

    kind: str
    version: int
    preamble: Mapping[str, Any]
    layers: Mapping[int, Mapping[str, Any]]
    names: Sequence[str]
    offset: int
    line: int  # of the header of columns
    granularity: str = ""
    encoding: str = "utf-8"


@dataclass(frozen=True, slots=True)
class TraceFile:
    """A trace read whole: all columns are equally long."""

    header: TraceHeader
    columns: Mapping[str, list[Any]]
    problems: Sequence[Problem]
    more_problems: int = 0

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))


def read_header(data: bytes) -> TraceHeader:
    """The header from a file's first bytes (one MiB is plenty). Raises NotOursError."""
    utf8, encoding = to_utf8(data[:_MOST_HEADER])
    at = 0
    line = 0
    kind = ""
    version = 0
    preamble: dict[str, Any] = {}
    layers: dict[int, Mapping[str, Any]] = {}
    while at < len(utf8):
        end = utf8.find(b"\n", at)
        end = len(utf8) if end < 0 else end
        text = readable(utf8[at:end]).removesuffix("\r")
        at = end + 1
        line += 1
        if not kind:
            found = _BANNER.fullmatch(text)
            if found is None:
                raise NotOursError(f"no trace: it begins {text[:60]!r}")
            kind, version = found[1], int(found[2])
        elif text.startswith("#"):
            pairs = read_pairs(text.lstrip("# "), PREAMBLE)
            layer = pairs.get("layer")
            if isinstance(layer, int):
                layers[layer] = {key: value for key, value in pairs.items() if key != "layer"}
            else:
                preamble.update(pairs)
        elif text.strip():
            names = [name.strip() for name in text.split(",")]
            if not {"turn", "step", "layer"} <= set(names):
                raise NotOursError(f"a {kind} trace without a header of columns at line {line}: {text[:60]!r}")
            granularity = _granularity(names, utf8[at : at + 4096]) if kind == "compute" else ""
            return TraceHeader(kind, version, preamble, layers, names, at, line, granularity, encoding)
    raise NotOursError(f"a {kind or 'trace'} banner and no header of columns behind it")


def _granularity(names: Sequence[str], rows: bytes) -> str:
    first = readable(rows.partition(b"\n")[0]).split(",")
    at = names.index("op") if "op" in names else -1
    if at < 0 or len(first) <= at:
        return ""
    return "layers" if first[at] == "LAYER" else "nodes"


def parse_trace(data: bytes) -> TraceFile:
    """Read a whole small trace. Raises NotOursError when it is none."""
    header = read_header(data)
    utf8, _ = to_utf8(data)
    lines = utf8[header.offset :].decode("utf-8", "replace").split("\n")
    torn = bool(lines[-1])
    if not torn:
        lines.pop()
    problems = Problems()
    rows: list[str] = []
    numbers: list[int] = []
    least = len(header.names) - 1
    for number, line in enumerate(lines, header.line + 1):
        row = line.removesuffix("\r")
        if row.startswith("#") or not row.strip():
            if row.strip():
                problems.tell(number, f"a preamble line among the rows: {row[:80]!r}")
            continue
        if torn and number == header.line + len(lines) and row.count(",") < least:
            problems.tell(number, f"the last row was cut off: {row[:80]!r}")
            continue
        rows.append(row)
        numbers.append(number)
    wide = _WIDE.get(header.kind, "")
    columns, _taken = columns_of(rows, numbers, header.names, TABLES[header.kind], problems, wide)
    return TraceFile(header, columns, problems, problems.more)
