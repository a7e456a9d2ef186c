"""From the wire into the database: blocks with their rows and the cursor in one transaction.

In: batches of a phone's spool (`FollowReply.Batch`) and fetched artifacts. Out: committed rows, and the cursor that may
now be acknowledged (law 2). Every call can be repeated and any process killed at any moment: the database then holds
exactly what the spool held, once (law 3).

The parser of a live run stays in memory; one that is missing, or that does not stand where the database stands because
another collector went on meanwhile, is made again from the stored blocks. Calls for one run must not overlap in time; the
lease of a phone sees to that across hosts. Calls for different runs may: what waits for SQLite is committed together.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bmoe_proto.v1 import telemetry_pb2 as pb
from sqlalchemy import Connection, and_, bindparam, select

from bmoe_collector.ingest import finish
from bmoe_collector.ingest.pieces import Piece, whole_blocks
from bmoe_collector.ingest.reader import RunReader
from bmoe_collector.ingest.rebuild import chain, read_again, reparse_in
from bmoe_collector.ingest.record import new_run, put_progress
from bmoe_collector.store.artifacts import Artifacts
from bmoe_collector.store.bulk import bulk
from bmoe_collector.store.engine import Store
from bmoe_collector.store.facts import forget_judgement
from bmoe_collector.store.schema import ARTIFACTS, BLOCKS, CURSORS, RUN_FACTS, RUNS
from bmoe_collector.store.turns import Together

log = logging.getLogger(__name__)
KEEP_READERS = 512
KEEP_BYTES = 256 << 20
"""Most parsers that are kept, and of the output they hold: the ones used longest ago are made again when they are needed."""
ID_BYTES = 16
IDLE_S = 60.0
"""How long a transaction may stand still before a server ends it, for the sake of the host that takes over."""
# Statements of every batch are made once: making one costs more than running it.
_NUMBERED = select(RUNS.c.run_no, RUNS.c.agent_uuid).where(RUNS.c.run_id == bindparam("of"))
_CURSORS = select(CURSORS.c.segment, CURSORS.c.offset).where(CURSORS.c.run_no == bindparam("of"))
_METRICS = select(ARTIFACTS.c.name).where(
    ARTIFACTS.c.run_no == bindparam("of"), ARTIFACTS.c.kind == "metrics", ARTIFACTS.c.state == "stored"
)
BLOCK_COLUMNS = ("run_no", "segment", "offset", "first_seq", "frames", "data")


class IngestError(Exception):
    """A batch that cannot be taken; `cursor` says where the store stands for that segment."""

    def __init__(self, message: str, cursor: pb.Cursor) -> None:
        super().__init__(message)
        self.cursor = cursor


@dataclass(frozen=True, slots=True)
class Wanted:
    """A file of a run that has not been fetched yet."""

    run_id: bytes
    name: str
    kind: str
    size: int
    sha256: bytes


@dataclass(frozen=True, slots=True)
class Unsettled:
    """A run whose record or files grew after it had ended: its streams are to be kept as files, it is to be judged."""

    agent_uuid: str
    run_id: str
    awaits_files: bool = False  # judging now would have to be done again soon
    grew: bool = True  # the record did, not only its files
    reader: RunReader | None = None  # that has the streams still


class Ingestor:
    """Puts what phones send into one store."""

    def __init__(
        self,
        store: Store,
        artifacts: Artifacts,
        *,
        settle: bool = True,
        later: Callable[[Unsettled], None] | None = None,
    ) -> None:
        """What follows an ended run's commit (streams as files, judging) is done at once, or by whoever is told of it by
        `later`; with `settle` false it is left to `catch_up`.
        """
        self.store = store
        self.artifacts = artifacts
        self.later = later or (self.settle if settle else lambda _: None)
        self._together = Together(lambda: store.write(IDLE_S), alone=store.dialect != "sqlite")
        self._readers: OrderedDict[str, RunReader] = OrderedDict()

    def cursors(self, agent_uuid: bytes | str, run_ids: Sequence[bytes] | None = None) -> list[pb.Cursor]:
        """Where the store stands for an agent's segments: what `FollowRequest.Open.from` takes.

        With `run_ids`, only for those runs (the ones the phone still has), so that the message stays small.
        """
        wanted = None if run_ids is None else {run_id.hex() for run_id in run_ids}
        query = (
            select(RUNS.c.run_id, CURSORS.c.segment, CURSORS.c.offset)
            .join(RUNS, RUNS.c.run_no == CURSORS.c.run_no)
            .where(CURSORS.c.agent_uuid == _hex(agent_uuid))
        )
        with self.store.read() as connection:
            return [
                _cursor(run_id, segment, offset)
                for run_id, segment, offset in connection.execute(query)
                if wanted is None or run_id in wanted
            ]

    def blocks(
        self, agent_uuid: bytes | str, cursor: pb.Cursor, data: bytes, under: Callable[[Connection], None] | None = None
    ) -> pb.Cursor:
        """Commit a batch that begins at `cursor`; returns the cursor to acknowledge.

        Blocks that are here already are skipped. Raises IngestError for a batch that leaves a hole or is of another
        phone's run, or after committing what came before bytes that are no block. A batch that grows beyond
        `pieces.MOST_RAW_BYTES` is committed in several transactions, so that no batch costs more memory than that. `under` is the
        last that is done in each, and raises what speaks against committing it.
        """
        if len(cursor.run_id) != ID_BYTES or len(cursor.segment) != ID_BYTES:
            raise IngestError(
                f"ids of {len(cursor.run_id)} and {len(cursor.segment)} bytes; they have {ID_BYTES}", cursor
            )
        at = 0
        while True:
            here = pb.Cursor(run_id=cursor.run_id, segment=cursor.segment, offset=cursor.offset + at)
            pieces, trouble, taken = whole_blocks(here, data, at)
            stands = self._pieces_in(agent_uuid, here, pieces, trouble, under)
            at += taken
            if not taken or at >= len(data):
                return stands

    def _pieces_in(
        self,
        agent_uuid: bytes | str,
        cursor: pb.Cursor,
        pieces: list[Piece],
        trouble: str,
        under: Callable[[Connection], None] | None,
    ) -> pb.Cursor:
        """One transaction of `blocks`."""
        run_id, segment, agent = cursor.run_id.hex(), cursor.segment.hex(), _hex(agent_uuid)

        def take(connection: Connection) -> tuple[RunReader, list[Piece], int]:
            run_no = self._run(connection, cursor, agent, pieces)
            if run_no is None:
                why = f"a batch from byte {cursor.offset} on leaves a hole" if cursor.offset else "no whole block"
                raise IngestError(f"run {run_id[:8]}: {trouble or why}", _cursor(run_id, segment, 0))
            reader = self._reader(connection, run_no, run_id)
            committed = reader.offsets.get(segment, 0)
            fresh = self._fresh(connection, reader, segment, committed, pieces, cursor)
            if fresh:
                self._commit(connection, reader, segment, fresh, agent)
                if under is not None:
                    under(connection)
            return reader, fresh, committed

        try:
            reader, fresh, committed = self._together.run(take)
        except BaseException:
            self._readers.pop(run_id, None)
            raise
        if reader.ended is not None and fresh:
            self._readers.pop(run_id, None)
            awaits = any(facts.sha256 for facts in reader.ended.artifacts)
            self.later(Unsettled(agent, run_id, awaits, reader=None if reader.disordered else reader))
        stands = _cursor(run_id, segment, fresh[-1].end if fresh else committed)
        if trouble:
            raise IngestError(f"run {run_id[:8]}, segment {segment[:8]}: {trouble}", stands)
        return stands

    def _run(self, connection: Connection, cursor: pb.Cursor, agent_uuid: str, pieces: Sequence[Piece]) -> int | None:
        """The run's number, made when it is new; None when it is new and nothing of it came. A phone adds to its own alone."""
        run_id = cursor.run_id.hex()
        found = connection.execute(_NUMBERED, {"of": run_id}).first()
        if found is None:
            if not pieces or cursor.offset:
                return None
            return new_run(connection, run_id, "agent", agent_uuid=agent_uuid)
        if found[1] != agent_uuid:
            raise IngestError(
                f"run {run_id[:8]} is another phone's ({str(found[1])[:8]}): nothing of it is taken from {agent_uuid[:8]}",
                _cursor(run_id, cursor.segment.hex(), 0),
            )
        return int(found[0])

    def _reader(self, connection: Connection, run_no: int, run_id: str) -> RunReader:
        """The run's parser, standing where the database stands."""
        stored = {row[0]: row[1] for row in connection.execute(_CURSORS, {"of": run_no})}
        reader = self._readers.get(run_id)
        if reader is None or reader.run_no != run_no or reader.offsets != stored:
            reader = read_again(connection, run_no, run_id)
            reader.sink.forget()
            reader.offsets = stored
        if run_id not in self._readers:
            self._forget_old()
        self._readers[run_id] = reader
        self._readers.move_to_end(run_id)
        return reader

    def _forget_old(self) -> None:
        held = sum(reader.held_bytes for reader in tuple(self._readers.values()))
        while self._readers and (len(self._readers) >= KEEP_READERS or held > KEEP_BYTES):
            held -= self._readers.popitem(last=False)[1].held_bytes

    def _fresh(
        self,
        connection: Connection,
        reader: RunReader,
        segment: str,
        committed: int,
        pieces: list[Piece],
        cursor: pb.Cursor,
    ) -> list[Piece]:
        """The blocks that are not here yet; what comes again is compared with what is here."""
        if cursor.offset > committed:
            raise IngestError(
                f"run {reader.run_id[:8]}, segment {segment[:8]}: a batch from byte {cursor.offset} on leaves a hole, "
                f"the store has {committed} bytes: ask again from there",
                _cursor(reader.run_id, segment, committed),
            )
        fresh = [piece for piece in pieces if piece.offset >= committed]
        for piece in pieces:
            if piece.offset >= committed:
                break
            kept = connection.execute(
                select(BLOCKS.c.data).where(
                    BLOCKS.c.run_no == reader.run_no, BLOCKS.c.segment == segment, BLOCKS.c.offset == piece.offset
                )
            ).scalar()
            if kept is None or bytes(kept) != piece.data:
                log.warning("run %s: other bytes than stored at %d of %s", reader.run_id, piece.offset, segment)
                raise IngestError(
                    f"run {reader.run_id[:8]}, segment {segment[:8]}: the phone sends other bytes for offset "
                    f"{piece.offset} than it sent before; what was stored first is kept",
                    _cursor(reader.run_id, segment, committed),
                )
        if fresh and fresh[0].offset > committed:
            raise IngestError(
                f"run {reader.run_id[:8]}, segment {segment[:8]}: blocks do not begin where the store stands",
                _cursor(reader.run_id, segment, committed),
            )
        return fresh

    def _commit(
        self, connection: Connection, reader: RunReader, segment: str, fresh: list[Piece], agent_uuid: str
    ) -> None:
        """Raw blocks, the rows made from them and the cursor, in the transaction that is open."""
        if reader.ended is not None:
            _unjudge(connection, reader.run_no)
        with reader.sink.flowing(connection) as send:
            for piece in fresh:
                reader.block(segment, piece.first_seq, piece.frames, piece.raw)
                send()
        reader.offsets[segment] = fresh[-1].end
        rows = [(reader.run_no, segment, p.offset, p.first_seq, len(p.frames), p.data) for p in fresh]
        bulk(connection, BLOCKS, BLOCK_COLUMNS, rows)
        put_progress(connection, reader, segment, agent_uuid)
        if _in_order(reader, segment) and not _file_rows(connection, reader.run_no):
            reader.sink.flush(connection)
            finish.columns(connection, self.artifacts, reader)
            return
        # A segment came that belongs before one already read, or a file's rows are here before the record's: everything
        # is made again, in the order of writing.
        self._readers.pop(reader.run_id, None)
        again = reparse_in(connection, self.artifacts, reader.run_no, reader.run_id)
        reader.ended = again.ended
        reader.disordered = True

    def artifact(self, run_id: bytes | str, name: str, kind: str, path: str, sha256: bytes | str) -> bool:
        """Store a fetched file and make its rows; False when it was here already.

        Raises ArtifactError when the file is not what `sha256` says.
        """
        run_hex, sha = _hex(run_id), _hex(sha256)
        self.artifacts.put_file(path, sha)
        with self.store.write() as connection:
            run = connection.execute(_NUMBERED, {"of": run_hex}).first()
            if run is None:
                raise LookupError(f"artifact {name} of run {run_hex}: no such run is stored")
            fresh = finish.artifact(connection, self.artifacts, run.run_no, name, kind, sha)
            awaits = fresh and _unjudge(connection, run.run_no)
        if fresh:
            self.later(Unsettled(run.agent_uuid or "", run_hex, awaits, grew=False))
        return fresh

    def artifact_given_up(self, run_id: bytes | str, name: str, why: str) -> None:
        """Note that a file cannot be had any more: the run stays incomplete for that reason."""
        run_hex = _hex(run_id)
        with self.store.write() as connection:
            run = connection.execute(_NUMBERED, {"of": run_hex}).one()
            finish.given_up(connection, run_hex, name, why)
            awaits = _unjudge(connection, run.run_no)
        self.later(Unsettled(run.agent_uuid or "", run_hex, awaits, grew=False))

    def wanted(self, agent_uuid: bytes | str) -> list[Wanted]:
        """Files of an agent's ended runs that have not been fetched yet, oldest run first."""
        query = (
            select(RUNS.c.run_id, ARTIFACTS.c.name, ARTIFACTS.c.kind, ARTIFACTS.c.size, ARTIFACTS.c.sha256)
            .join(RUNS, RUNS.c.run_no == ARTIFACTS.c.run_no)
            .where(RUNS.c.agent_uuid == _hex(agent_uuid), ARTIFACTS.c.state == "awaited")
            .where(ARTIFACTS.c.kind.not_in(("stdout", "stderr")))
            .order_by(RUNS.c.run_no, ARTIFACTS.c.name)
        )
        with self.store.read() as connection:
            return [
                Wanted(bytes.fromhex(run_id), name, kind, size, bytes.fromhex(sha))
                for run_id, name, kind, size, sha in connection.execute(query)
            ]

    def owns(self, agent_uuid: bytes | str, run_id: bytes | str) -> bool:
        """Whether a run came from this phone, so that it may give its files."""
        query = select(RUNS.c.run_no).where(RUNS.c.run_id == _hex(run_id), RUNS.c.agent_uuid == _hex(agent_uuid))
        with self.store.read() as connection:
            return connection.execute(query).first() is not None

    def holds(self, run_id: bytes | str, name: str, sha256: bytes | str) -> bool:
        """Whether a run's file is stored already, however it came: then it may be acknowledged without fetching."""
        query = (
            select(ARTIFACTS.c.name)
            .join(RUNS, RUNS.c.run_no == ARTIFACTS.c.run_no)
            .where(RUNS.c.run_id == _hex(run_id), ARTIFACTS.c.name == name)
            .where(ARTIFACTS.c.sha256 == _hex(sha256), ARTIFACTS.c.state == "stored")
        )
        with self.store.read() as connection:
            return connection.execute(query).first() is not None

    def settle(self, run: Unsettled) -> None:
        """Keep an ended run's streams as files and judge it; repeating it does no harm."""
        if run.grew:
            finish.streams(self.store, self.artifacts, run.run_id, run.reader)
        finish.judge(self.store, [run.run_id])

    def unsettled(self, agent_uuid: bytes | str) -> list[Unsettled]:
        """Ended runs whose last step a killed collector did not get to."""
        agent = _hex(agent_uuid)
        kept = (ARTIFACTS.c.run_no == RUNS.c.run_no, ARTIFACTS.c.kind.in_(("stdout", "stderr")))
        streams = select(RUNS.c.run_id).join(ARTIFACTS, and_(*kept)).where(ARTIFACTS.c.state == "awaited")
        facts = select(RUNS.c.run_id).outerjoin(RUN_FACTS, RUN_FACTS.c.run_no == RUNS.c.run_no)
        unjudged = facts.where(RUNS.c.ended, RUN_FACTS.c.run_no.is_(None))
        run_ids: list[str] = []
        with self.store.read() as connection:
            for query in (streams, unjudged):
                run_ids += connection.execute(query.where(RUNS.c.agent_uuid == agent)).scalars()
        awaiting = {item.run_id.hex() for item in self.wanted(agent)}
        return [Unsettled(agent, run_id, run_id in awaiting) for run_id in dict.fromkeys(run_ids)]

    def catch_up(self, agent_uuid: bytes | str) -> list[str]:
        """Settle what `unsettled` finds; returns the runs' ids."""
        found = self.unsettled(agent_uuid)
        for run in found:
            self.settle(run)
        return [run.run_id for run in found]

    def seen(self, status: pb.StatusReply) -> None:
        """Remember a phone's facts as it told them in `Status`."""
        from bmoe_collector.ingest.record import offers_of, put_device

        with self.store.write() as connection:
            put_device(connection, status.device, offers_of(status))


def _unjudge(connection: Connection, run_no: int) -> bool:
    """What was found of a run is of less than is here now: should nobody get to judging it again, `unsettled` tells.

    Returns whether files of it are still awaited.
    """
    forget_judgement(connection, run_no)
    return any(state == "awaited" for state, _ in finish.artifact_states(connection, run_no).values())


def _file_rows(connection: Connection, run_no: int) -> bool:
    """Whether a metrics file came before the record it goes with did: its turns stand where stdout's belong.

    The phone sends files after the end, but an end that was damaged on the phone is said again later.
    """
    return connection.execute(_METRICS, {"of": run_no}).first() is not None


def _in_order(reader: RunReader, segment: str) -> bool:
    """Whether what was just read follows what was read before, in the order the phone wrote it."""
    order = list(reader.segments)
    return order[-1] == segment and chain({name: reader.segments[name].previous for name in order}) == order


def _cursor(run_id: str, segment: str, offset: int) -> pb.Cursor:
    return pb.Cursor(run_id=bytes.fromhex(run_id), segment=bytes.fromhex(segment), offset=offset)


def _hex(value: bytes | str) -> str:
    return value if isinstance(value, str) else value.hex()
