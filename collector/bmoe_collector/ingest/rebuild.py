"""Rows made again from the raw record (law 1).

In: stored blocks and artifacts. Out: the same rows. Blocks are read in the order the phone wrote them: segment after
segment by what each names as its predecessor, whatever order they arrived in.
"""

from __future__ import annotations

from collections.abc import Mapping

from bmoe_proto import framing
from sqlalchemy import Connection, bindparam, delete, select, update

from bmoe_collector.ingest import finish
from bmoe_collector.ingest.reader import RunReader
from bmoe_collector.ingest.record import put_segment
from bmoe_collector.store.artifacts import Artifacts
from bmoe_collector.store.engine import Store
from bmoe_collector.store.find import find
from bmoe_collector.store.schema import BLOCKS, DERIVED, NOTES, RUNS, SEGMENTS

_SEGMENTS = (
    select(SEGMENTS.c.segment, SEGMENTS.c.previous)
    .where(SEGMENTS.c.run_no == bindparam("of_run"))
    .order_by(SEGMENTS.c.place)
)


def chain(previous: Mapping[str, str | None]) -> list[str]:
    """Segments in the order of writing: each after its predecessor; `previous` is in order of arrival.

    A segment whose predecessor is not here stands where it arrived.
    """
    order: list[str] = []
    left = list(previous)
    while left:
        ready = next((name for name in left if previous[name] not in left or previous[name] == name), left[0])
        left.remove(ready)
        order.append(ready)
        # Its successors come right behind it, before anything else that is ready.
        while (follower := next((name for name in left if previous[name] == order[-1]), None)) is not None:
            left.remove(follower)
            order.append(follower)
    return order


def stored_order(connection: Connection, run_no: int) -> list[str]:
    """A run's stored segments in the order of writing."""
    return chain({row[0]: row[1] for row in connection.execute(_SEGMENTS, {"of_run": run_no})})


def read_again(connection: Connection, run_no: int, run_id: str) -> RunReader:
    """A reader that has read all that is stored; its rows wait in its sink."""
    reader = RunReader(run_no, run_id)
    for segment in stored_order(connection, run_no):
        offset = 0
        rows = connection.execute(
            select(BLOCKS.c.offset, BLOCKS.c.data)
            .where(BLOCKS.c.run_no == run_no, BLOCKS.c.segment == segment)
            .order_by(BLOCKS.c.offset)
        )
        for start, data in rows:
            block = framing.read_block(bytes(data))
            raw = block.raw()
            reader.block(segment, block.first_seq, framing.split_frames(raw), raw)
            offset = start + len(data)
        if segment in reader.segments:
            reader.offsets[segment] = offset
    return reader


def reparse_in(connection: Connection, artifacts: Artifacts, run_no: int, run_id: str) -> RunReader:
    """Make an agent's run again inside an open transaction."""
    for table in DERIVED:
        gone = delete(table).where(table.c.run_no == run_no)
        if table is NOTES:  # what this host added is no part of the phone's record
            gone = gone.where(NOTES.c.at < finish.HOST_NOTES)
        connection.execute(gone)
    connection.execute(update(RUNS).where(RUNS.c.run_no == run_no).values(problems=None))
    reader = read_again(connection, run_no, run_id)
    reader.sink.flush(connection)
    for segment in reader.segments:
        put_segment(connection, reader, segment)
    finish.files_again(connection, artifacts, run_no)
    finish.columns(connection, artifacts, reader)
    return reader


def reparse(store: Store, artifacts: Artifacts, run_id: str) -> None:
    """Make all rows of a run again from its raw record, and judge it again. Raises RunNotFoundError, ArtifactError."""
    with store.write() as connection:
        run_no, full = find(connection, run_id)
        source = connection.execute(select(RUNS.c.source).where(RUNS.c.run_no == run_no)).scalar_one()
        if source == "agent":
            reparse_in(connection, artifacts, run_no, full)
        else:
            from bmoe_collector.importer.write import rewrite  # imports of files are the importer's

            rewrite(connection, artifacts, run_no)
    finish.judge(store, [full])
