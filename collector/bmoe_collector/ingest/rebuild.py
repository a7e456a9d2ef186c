"""Rows made again from the raw record (law 1).

In: stored blocks and artifacts. Out: the same rows. Blocks are read in the order the phone wrote them: segment after
segment by what each names as its predecessor, whatever order they arrived in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from bmoe_proto import framing
from sqlalchemy import Connection, bindparam, delete, select, update

from bmoe_collector.ingest import finish
from bmoe_collector.ingest.reader import RunReader
from bmoe_collector.ingest.record import put_segment
from bmoe_collector.ingest.sink import Sink
from bmoe_collector.store.artifacts import Artifacts
from bmoe_collector.store.engine import Store
from bmoe_collector.store.find import find
from bmoe_collector.store.schema import BLOCKS, DERIVED, NOTES, RUNS, SEGMENTS

_SEGMENTS = (
    select(SEGMENTS.c.segment, SEGMENTS.c.previous)
    .where(SEGMENTS.c.run_no == bindparam("of_run"))
    .order_by(SEGMENTS.c.place)
)

PAGE_BLOCKS = 256
MOST_ROWS = 20_000
"""Rows that wait in memory while a run is read again: an engine may print millions of lines."""


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


def stored_blocks(connection: Connection, run_no: int) -> Iterator[tuple[str, int, bytes]]:
    """Every stored block of a run in the order of writing: its segment, where it begins there, its bytes."""
    for segment in stored_order(connection, run_no):
        after = -1
        while True:
            page = connection.execute(
                select(BLOCKS.c.offset, BLOCKS.c.data)
                .where(BLOCKS.c.run_no == run_no, BLOCKS.c.segment == segment, BLOCKS.c.offset > after)
                .order_by(BLOCKS.c.offset)
                .limit(PAGE_BLOCKS)
            ).all()
            for offset, data in page:
                yield segment, offset, bytes(data)
                after = offset
            if len(page) < PAGE_BLOCKS:
                break


def read_again(
    connection: Connection, run_no: int, run_id: str, full: Callable[[Sink], None] = Sink.forget
) -> RunReader:
    """A reader that has read all that is stored. When many rows wait in its sink, `full` is told to take them."""
    reader = RunReader(run_no, run_id)
    for segment, start, data in stored_blocks(connection, run_no):
        block = framing.read_block(data)
        raw = block.raw()
        reader.block(segment, block.first_seq, framing.split_frames(raw), raw)
        reader.offsets[segment] = start + len(data)
        if reader.sink.waiting() > MOST_ROWS:
            full(reader.sink)
    return reader


def reparse_in(connection: Connection, artifacts: Artifacts, run_no: int, run_id: str) -> RunReader:
    """Make an agent's run again inside an open transaction."""
    for table in DERIVED:
        gone = delete(table).where(table.c.run_no == run_no)
        if table is NOTES:  # what this host added is no part of the phone's record
            gone = gone.where(NOTES.c.at < finish.HOST_NOTES)
        connection.execute(gone)
    connection.execute(update(RUNS).where(RUNS.c.run_no == run_no).values(problems=None))
    reader = read_again(connection, run_no, run_id, lambda sink: sink.flush(connection))
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
