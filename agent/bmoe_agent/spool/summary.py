"""What is known of a run at a glance, and the ledger of runs that were deleted after they were acknowledged.

In: a run's frames, or the ledger's lines. Out: `RunSummary`. Recorded cells are a plan's only state, so a run that was
delivered and deleted must still say that its cell is done: `deleted.jsonl` holds one JSON object a line with the fields
of `RunSummary` (bytes as hex). A line that cannot be read is skipped.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable

from bmoe_proto.v1 import telemetry_pb2 as pb

from bmoe_agent.spool import layout


@dataclasses.dataclass(slots=True)
class RunSummary:
    """A run by its first and last frames."""

    run_id: bytes
    plan_id: str = ""
    plan_name: str = ""
    cell: str = ""
    cell_index: int = 0
    repeat: int = 0
    attempt: int = 0
    started: bool = False  # RunStarted is there
    started_boot_ns: int = 0
    started_wall_ns: int = 0
    boot_id: str = ""
    ended: bool = False
    launched: bool = False
    outcome: str = "started"
    cause: str = ""
    bytes: int = 0
    deleted: bool = False

    def take(self, frame: pb.Frame) -> None:
        """Learn from a frame."""
        what = frame.WhichOneof("what")
        if what == "run_started":
            told = frame.run_started
            self.started = True
            self.plan_id, self.plan_name = told.plan_id, told.plan_name
            self.cell, self.cell_index, self.repeat = told.cell.name, told.cell.index, told.cell.repeat
            self.attempt = told.attempt
            self.started_boot_ns = frame.boot_ns
            self.started_wall_ns = told.clock.wall_ns
            self.boot_id = told.clock.boot_id or self.boot_id
        elif what == "segment_opened":
            self.boot_id = self.boot_id or frame.segment_opened.boot_id
            self.started_wall_ns = self.started_wall_ns or frame.segment_opened.wall_ns
        elif what == "run_ended":
            self.ended = True
            self.launched = frame.run_ended.launched
            self.outcome = frame.run_ended.outcome or "started"
            self.cause = frame.run_ended.cause

    def listing(self, *, acknowledged: bool) -> pb.RunListing:
        """As the service lists it."""
        return pb.RunListing(
            run_id=self.run_id,
            plan_id=self.plan_id,
            cell=self.cell,
            outcome=self.outcome,
            started_boot_ns=self.started_boot_ns,
            started_wall_ns=self.started_wall_ns,
            spool_bytes=self.bytes,
            ended=self.ended,
            acknowledged=acknowledged,
            cell_index=self.cell_index,
            attempt=self.attempt,
        )


def read_ledger(root: str) -> list[RunSummary]:
    """The runs that were deleted, in order."""
    known = {field.name for field in dataclasses.fields(RunSummary)}
    found: list[RunSummary] = []
    try:
        with open(os.path.join(root, layout.LEDGER), "rb") as file:
            lines = file.read().splitlines()
    except FileNotFoundError:
        return found
    for line in lines:
        try:
            facts = json.loads(line)
            run_id = bytes.fromhex(facts.pop("run_id"))
            found.append(RunSummary(run_id, **{name: value for name, value in facts.items() if name in known}))
        except (ValueError, TypeError, KeyError, AttributeError):
            continue  # a torn last line of a phone that lost power
    return found


def write_ledger(root: str, summaries: Iterable[RunSummary]) -> None:
    """Add runs to the ledger, durably."""
    path = os.path.join(root, layout.LEDGER)
    lines: list[bytes] = []
    for summary in summaries:
        facts = dataclasses.asdict(summary) | {"run_id": summary.run_id.hex(), "deleted": True}
        lines.append(json.dumps(facts).encode("ascii") + b"\n")
    new = not os.path.exists(path)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            lines.insert(0, b"\n")  # a torn line stays alone
        try:
            layout.write_whole(descriptor, b"".join(lines))
            os.fsync(descriptor)
        except OSError:
            # Half a line would be skipped, and its cell run again: nothing is deleted, and the lines come again whole.
            os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)
    if new:
        layout.sync_directory(root)
