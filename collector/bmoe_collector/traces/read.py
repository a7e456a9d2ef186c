"""Read a trace file lazily: a CSV of the contract's three kinds, or the Parquet it was kept as.

A trace is UTF-8 text: `#` lines (the kind and version, static facts of the run, for a route trace one line a layer), a header
row, then one row an event. Columns are read by name; a missing one becomes null, an unknown one is kept. A row whose
key columns do not parse is left out and counted in `Trace.malformed`; a last line without its newline was torn by the
writer's death and is left out and told in `Trace.torn`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import polars as pl

from bmoe_collector.common import UserError

_HEAD_BYTES = 1 << 20
HELD_BYTES = 256 << 20
_PAIR = re.compile(r"([A-Za-z_][\w/]*)=(.*?)(?=\s+[A-Za-z_][\w/]*=|$)")

COLUMNS: Mapping[str, Mapping[str, Any]] = {
    "route": {
        "turn": pl.Int32,
        "phase": pl.Int8,
        "step": pl.Int32,
        "layer": pl.Int32,
        "slot": pl.Int32,
        "expert": pl.Int32,
        "weight": pl.Float64,
        "residency": pl.Int8,
        "expert_bytes": pl.Int64,
        "dropped": pl.Int8,
    },
    "compute": {
        "turn": pl.Int32,
        "phase": pl.Int8,
        "step": pl.Int32,
        "seq": pl.Int32,
        "layer": pl.Int32,
        "op": pl.String,
        "name": pl.String,
        "wall_ns": pl.Int64,
        "majflt": pl.Int64,
    },
    "io": {
        "turn": pl.Int32,
        "phase": pl.Int8,
        "step": pl.Int32,
        "layer": pl.Int32,
        "expert": pl.Int32,
        "proj": pl.Int32,
        "lane": pl.Int32,
        "spec": pl.Int8,
        "offset": pl.Int64,
        "req_bytes": pl.Int64,
        "read_bytes": pl.Int64,
        "latency_ns": pl.Int64,
    },
}
"""Columns of each kind with their types (contract, "Route trace" and "Decode traces")."""

KEYS: Mapping[str, tuple[str, ...]] = {
    "route": ("turn", "phase", "step", "layer", "slot", "expert"),
    "compute": ("turn", "phase", "step", "layer", "wall_ns"),
    "io": ("turn", "phase", "step", "read_bytes", "latency_ns"),
}
"""Columns without which a row says nothing."""


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """Static bytes of one MoE layer: one expert's, and what is not an expert's."""

    expert_bytes: int | None
    dense_bytes: int | None


@dataclass(frozen=True)
class Trace:
    """An opened trace. `raw` is every row of the file, unread, `size` about how many bytes they take in memory.

    `left_out` is how many rows did not parse where they are known and no longer in `raw`, None where they are in it. Text that
    is small beside memory is read once and held, at first the columns that are asked for; else it is read as asked.
    """

    kind: str
    source: str
    facts: Mapping[str, str]
    layers: Mapping[int, LayerFacts]
    raw: pl.LazyFrame
    size: int
    left_out: int | None = None
    torn: str | None = None
    absent: tuple[str, ...] = ()
    _read: dict[str, pl.DataFrame] = field(default_factory=dict, repr=False, compare=False)

    @property
    def frame(self) -> pl.LazyFrame:
        """Every row that parses, with every column."""
        return self._with(self.raw.collect_schema().names())

    @cached_property
    def malformed(self) -> int:
        """Rows left out because a key column did not parse."""
        if self.left_out is not None:
            return self.left_out
        if self.size <= HELD_BYTES:
            self._with(())
            return int(self._read["broken"].item())
        return int(self.raw.select(self._broken.sum()).collect(engine="streaming").item() or 0)

    def rows(self, chosen: Selection, *columns: str, **made: pl.Expr) -> pl.LazyFrame:
        """Columns of the selected rows. Who needs several frames asks first for the one with the most columns."""
        needed = (*columns, *(name for each in made.values() for name in each.meta.root_names()))
        return chosen.of(self._with(needed)).select(*columns, **made)

    def portions(self, chosen: Selection, *columns: str, **made: pl.Expr) -> Iterator[pl.DataFrame]:
        """The same, read, in portions that fit in memory, at least one; a layer's rows are all in one."""
        count = -(-self.size // HELD_BYTES)
        if count <= 1:
            yield self.rows(chosen, *columns, **made).collect(engine="streaming")
            return
        rows = chosen.of(self.frame)
        layers = rows.select(pl.col("layer").unique().sort()).collect(engine="streaming")["layer"].to_list()
        each = max(1, len(layers) // count)
        for at in range(0, max(1, len(layers)), each):
            some = pl.col("layer").is_in(layers[at : at + each], nulls_equal=True)
            yield rows.filter(some).select(*columns, **made).collect(engine="streaming")

    @property
    def _broken(self) -> pl.Expr:
        return pl.any_horizontal(*(pl.col(key).is_null() for key in KEYS[self.kind]))

    def _with(self, columns: Collection[str]) -> pl.LazyFrame:
        """Every row that parses, with these columns at least and those that say which rows parse and are selected."""
        if self.left_out is not None:
            return self.raw
        if self.size > HELD_BYTES:
            return self.raw.filter(~self._broken)
        held = self._read.get("rows")
        if held is None or not set(columns) <= set(held.columns):
            first = dict.fromkeys((*KEYS[self.kind], "layer", *columns))
            found = (self.raw.select(list(first)) if held is None else self.raw).collect(engine="streaming")
            broken = found.select(self._broken)
            held = found.filter(~broken.to_series()) if broken.to_series().any() else found
            self._read.update(rows=held, broken=broken.sum())
        return held.lazy()

    def notes(self) -> tuple[str, ...]:
        """What a reader of any view of this file must know."""
        said = []
        if self.malformed:
            said.append(f"{self.malformed} rows did not parse and are left out")
        if self.torn is not None:
            said.append(f"the last line is torn and left out: {self.torn[:80]!r}")
        if self.absent:
            said.append(f"this file has no column {', '.join(self.absent)}")
        return tuple(said)

    def fact(self, name: str) -> int | None:
        """A whole number of the preamble, None where it is not said."""
        try:
            return int(self.facts[name])
        except (KeyError, ValueError):
            return None

    @cached_property
    def layer_granularity(self) -> bool:
        """Whether a compute trace has one row a layer segment (`--compute-trace-layers`)."""
        if self.kind != "compute":
            return False
        other = self.rows(Selection(), "op").filter(pl.col("op") != "LAYER").head(1).collect()
        return other.height == 0


@dataclass(frozen=True, slots=True)
class Selection:
    """Which rows a view is about; None selects all. Ranges are inclusive."""

    phase: int | None = None
    turn: int | None = None
    steps: tuple[int, int] | None = None
    layers: tuple[int, int] | None = None

    def of(self, frame: pl.LazyFrame) -> pl.LazyFrame:
        """Rows of `frame` inside the selection."""
        if self.phase is not None:
            frame = frame.filter(pl.col("phase") == self.phase)
        if self.turn is not None:
            frame = frame.filter(pl.col("turn") == self.turn)
        if self.steps is not None:
            frame = frame.filter(pl.col("step").is_between(*self.steps))
        if self.layers is not None:
            frame = frame.filter(pl.col("layer").is_between(*self.layers))
        return frame


@dataclass(frozen=True, slots=True)
class View:
    """What a view found: `facts` about the whole, `rows` in the order to show them, `notes` a reader must know."""

    name: str
    facts: Mapping[str, Any]
    rows: Sequence[dict[str, Any]]
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As `bmoe trace --json` prints it."""
        return {"view": self.name, "facts": dict(self.facts), "rows": list(self.rows), "notes": list(self.notes)}


def open_trace(path: str | Path, kind: str | None = None) -> Trace:
    """Open a trace file.

    Raises:
        UserError: it is not there, is no trace, or is of another kind than `kind`.
    """
    file = Path(path)
    try:
        with file.open("rb") as stream:
            head = stream.read(_HEAD_BYTES)
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from error
    if head[:4] == b"PAR1":
        from bmoe_collector.traces.keep import open_kept

        return _checked(open_kept(file), kind, file)
    if head[:2] in {b"\xff\xfe", b"\xfe\xff"}:
        raise UserError(f"{file}: is UTF-16; traces are read as UTF-8: convert it first (iconv -f UTF-16 -t UTF-8)")
    found, facts, layers, header = read_head(head.decode("utf-8-sig", "replace"))
    if found is None:
        raise UserError(
            f"{file}: is not a decode trace: no `# route_trace`, `# compute_trace` or `# io_trace` header in it"
        )
    good_end, torn = _torn(file)
    absent = tuple(name for name in COLUMNS[found] if name not in header)
    raw = _scan(file, found, header, good_end)
    return _checked(Trace(found, str(file), facts, layers, raw, good_end, torn=torn, absent=absent), kind, file)


def _checked(trace: Trace, kind: str | None, file: Path) -> Trace:
    if kind is not None and trace.kind != kind:
        named = {"route": "a route trace", "compute": "a compute trace", "io": "an I/O trace"}
        raise UserError(f"{file}: is {named[trace.kind]}, not {named[kind]}: use `bmoe trace {trace.kind} {file}`")
    return trace


def read_head(text: str) -> tuple[str | None, dict[str, str], dict[int, LayerFacts], list[str]]:
    """Kind, facts, layers and column names from a trace's first lines; kind None when it is no trace."""
    kind: str | None = None
    facts: dict[str, str] = {}
    layers: dict[int, LayerFacts] = {}
    header: list[str] = []
    for line in text.splitlines():
        if line.startswith("#"):
            said = re.match(r"#\s*(route|compute|io)_trace\b", line)
            if said:
                kind = said[1]
                continue
            pairs = {key: value.strip() for key, value in _PAIR.findall(line[1:].strip())}
            layer = _whole(pairs.get("layer")) if "expert_bytes" in pairs else None
            if layer is not None:
                layers[layer] = LayerFacts(_whole(pairs.get("expert_bytes")), _whole(pairs.get("dense_bytes")))
            else:
                facts.update(pairs)
        elif line.strip():
            header = [name.strip() for name in line.split(",")]
            break
    if kind is None and header:
        kind = next((name for name, keys in KEYS.items() if set(keys) <= set(header)), None)
    if kind is not None and not set(KEYS[kind]) <= set(header):
        return (kind if not header else None), facts, layers, header
    return kind, facts, layers, header


def _whole(text: str | None) -> int | None:
    try:
        return int(text or "")
    except ValueError:
        return None


def _torn(file: Path) -> tuple[int, str | None]:
    """Where the last whole line ends, and the torn line after it."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        stream.seek(max(0, size - 65536))
        tail = stream.read()
    if not tail or tail.endswith(b"\n"):
        return size, None
    last = tail[tail.rfind(b"\n") + 1 :]
    return size - len(last), last.decode("utf-8", "replace")


def _scan(file: Path, kind: str, header: list[str], good_end: int) -> pl.LazyFrame:
    types = COLUMNS[kind]
    if not header or good_end == 0:
        return pl.LazyFrame(schema=dict(types))
    torn = good_end != file.stat().st_size
    source: Any = file
    if torn and good_end <= HELD_BYTES:
        with file.open("rb") as stream:
            source = stream.read(good_end)
    raw = pl.scan_csv(
        source,
        comment_prefix="#",
        schema_overrides={name: types[name] for name in header if name in types},
        ignore_errors=True,
        truncate_ragged_lines=True,
        quote_char=None,
        infer_schema_length=200,
        encoding="utf8-lossy",
    )
    try:
        found = raw.collect_schema().names()
    except pl.exceptions.PolarsError as error:
        raise UserError(f"{file}: its rows cannot be read: {str(error).splitlines()[0]}") from None
    if missing := [name for name in types if name in header and name not in found]:
        # a line of blanks or odd line ends above it: the columns' names are not where a CSV has them
        raise UserError(f"{file}: its header of columns cannot be read as a CSV's: no column {', '.join(missing)}")
    if torn and source is file:
        raw = raw.head(int(raw.select(pl.len()).collect(engine="streaming").item()) - 1)
    added = [pl.lit(None, dtype=dtype).alias(name) for name, dtype in types.items() if name not in header]
    raw = raw.with_columns(added)
    if "weight" in types:
        raw = raw.with_columns(pl.col("weight").fill_nan(None))
    return raw
