"""One stored run as plain values: what the store hands to derivation, verdicts, comparison and display.

The store fills it (`store.load.load_run`), everything else reads it. Nothing here touches a database or a file, so
whatever works on a `RunRecord` can be tested on a hand-made one. Unmeasured is None everywhere (law 5).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

Value = int | float | str | bool | None
"""What a cell of a row may hold."""

SIMULATED = "a simulated run: nothing here is a measurement of any phone"
"""What every page about such a run says."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Equally long columns of one source: contract column name to values, in the order of generation.

    `columns["turn"]` and `columns["step"]` are always there. An unknown column of the source is kept under its name.
    """

    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def get(self, name: str) -> list[Any]:
        """The column's values, or None for every row where the source had no such column."""
        found = self.columns.get(name)
        return list(found) if found is not None else [None] * len(self)


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One generation or decision of a run; a one-shot run has turn 0 alone."""

    turn: int | None  # numbering of generations.md: None for a rejected request
    request_id: int | None
    tokens: int | None
    cancelled: bool
    text: bytes
    reasoning: bytes
    summary: Mapping[str, Any] = field(default_factory=dict)  # the BMOE_DONE spellings; trailer keys mapped onto them
    decide: Mapping[str, Any] | None = None
    error: Mapping[str, Any] | None = None
    request: Mapping[str, Any] | None = None  # what was asked, when an agent asked it
    state: str = "done"  # telemetry.proto TurnReport.state
    begin_boot_ns: int | None = None
    end_boot_ns: int | None = None


@dataclass(frozen=True, slots=True)
class ReportLine:
    """One line of the perf block: name before the colon, numbers by the report table's names."""

    name: str
    facts: Mapping[str, Any]
    text: str
    turn: int = 0


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """One reading of the kernel, parsed: values by the names of `bmoe_proto.kernel`."""

    boot_ns: int
    source: str  # "agent" or "host"
    kind: str  # "fast", "entry", "exit", "launch", "turn", "idle"
    values: Mapping[str, Value]
    took_ms: float | None = None
    refused: Mapping[str, str] = field(default_factory=dict)  # node to the reason it could not be read


@dataclass(frozen=True, slots=True)
class ResidencyRecord:
    """One look at how much of the model is in memory."""

    boot_ns: int
    part: str  # "whole", "dense", "expert", "layer:<n>"
    method: str  # "sample", "sweep", "unavailable"
    problem: str
    bytes: int | None
    fraction: float | None
    standard_error: float | None
    cost_ms: float | None


@dataclass(frozen=True, slots=True)
class GateRecord:
    """What a gate asked, saw and did (telemetry.proto GateReport)."""

    gate: str
    asked: str
    bound: float | None
    last: float | None
    unit: str
    state: str  # "held", "waited", "gave_up", "unreadable"
    waited_s: float
    policy: str
    readings: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, slots=True)
class NoteRecord:
    """A note, watchdog report, gap or launch of the record."""

    boot_ns: int
    code: str
    text: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    source: str = "agent"


@dataclass(frozen=True, slots=True)
class ArtifactRecord:
    """A file of the run in the artifact store."""

    name: str
    kind: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Everything stored of one run.

    `run` has the columns of the `runs` table by name: run_id, source ("agent" or "import"), outcome, cause, evidence,
    exit_code, signal, exit_observed, simulated, agent_uuid, device_name, device_model, engine_name, engine_version,
    engine_sha256, model_name, model_size, model_identity, argv (list of str), environment, prompt (bytes),
    prompt_sha256, labels, plan_id, plan_name, plan_sha256, cell, cell_index, repeat, block, attempt, started_wall_ns,
    started_boot_ns, ended_boot_ns, clock_uncertainty_ns, boot_id, n_tokens, n_turns, unmeasured, question ...
    """

    run: Mapping[str, Any]
    preamble: Mapping[str, Any] = field(default_factory=dict)  # resolved configuration, numbers as numbers
    csv: Rows = field(default_factory=Rows)
    stdout: Rows = field(default_factory=Rows)
    turns: Sequence[TurnRecord] = ()
    report: Sequence[ReportLine] = ()
    trailers: Sequence[Mapping[str, Any]] = ()  # per turn, keys as the file has them
    ready: Mapping[str, Any] = field(default_factory=dict)  # BMOE_READY
    loads: Sequence[Mapping[str, Any]] = ()  # BMOE_LOAD facts, with "turn" and "step"
    others: Sequence[str] = ()  # lines nothing understood
    samples: Sequence[SampleRecord] = ()
    residency: Sequence[ResidencyRecord] = ()
    gates: Sequence[GateRecord] = ()
    notes: Sequence[NoteRecord] = ()
    artifacts: Sequence[ArtifactRecord] = ()
    sidecar: Mapping[str, Any] = field(default_factory=dict)  # a .metrics file's keys
    observer: Mapping[str, Any] = field(default_factory=dict)  # ObserverCost in ms and counts
    completeness: Mapping[str, Any] = field(default_factory=dict)  # complete, reasons, frames, gaps

    @property
    def run_id(self) -> str:
        """32 hex digits."""
        return str(self.run["run_id"])

    def tokens(self) -> Rows:
        """One row a token; where stdout and CSV both give a value the CSV's stands (design: each source its table)."""
        if not len(self.csv):
            return self.stdout
        if not len(self.stdout):
            return self.csv
        return _merge(self.csv, self.stdout)


def _merge(first: Rows, second: Rows) -> Rows:
    """Join two sources by (turn, step), the first one's values standing wherever it has any."""
    names = list(dict.fromkeys([*first.columns, *second.columns]))
    theirs_keys = list(zip(second.get("turn"), second.get("step"), strict=True))
    places = {key: at for at, key in enumerate(theirs_keys)}
    keys = list(zip(first.get("turn"), first.get("step"), strict=True))
    if keys == theirs_keys and len(places) == len(keys):
        columns = _side_by_side(names, first, second)  # as usual: both sources tell of the same tokens
    else:
        columns = _by_key(names, first, second, keys, places)
    order = [
        (-1 if turn is None else turn, step or 0) for turn, step in zip(columns["turn"], columns["step"], strict=True)
    ]
    if any(after < before for before, after in pairwise(order)):
        places_of = sorted(range(len(order)), key=order.__getitem__)
        columns = {name: [column[at] for at in places_of] for name, column in columns.items()}
    return Rows(columns)


def _side_by_side(names: Sequence[str], first: Rows, second: Rows) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {}
    for name in names:
        mine, theirs = first.columns.get(name), second.columns.get(name)
        if mine is None or theirs is None or None not in mine:
            columns[name] = list(theirs if mine is None and theirs is not None else mine or ())
        else:
            pairs = zip(mine, theirs, strict=True)
            columns[name] = [value if value is not None else other for value, other in pairs]
    return columns


def _by_key(
    names: Sequence[str], first: Rows, second: Rows, keys: Sequence[tuple[Any, Any]], places: Mapping[Any, int]
) -> dict[str, list[Any]]:
    known = set(keys)
    lone = [at for key, at in places.items() if key not in known]
    columns: dict[str, list[Any]] = {}
    for name in names:
        mine, theirs = first.get(name), second.get(name)
        column = [
            value if value is not None else (theirs[places[key]] if key in places else None)
            for key, value in zip(keys, mine, strict=True)
        ]
        column.extend(theirs[at] for at in lone)
        columns[name] = column
    return columns
