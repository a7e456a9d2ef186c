"""Files of finished runs from one phone: fetched by offset, verified by sha256, stored, then acknowledged.

In: what agents said about ended runs, and what the database still awaits of them. Out: artifacts in the store. A
broken fetch goes on where it stopped, in a later process too: the part lies under the content's sha256 in
`<data dir>/partial/`.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import grpc
from bmoe_proto import calls
from bmoe_proto.v1 import telemetry_pb2 as pb

from bmoe_collector.common import data_dir
from bmoe_collector.ingest.ingestor import Ingestor, Wanted

LOG = logging.getLogger("bmoe.fleet")
SHA256_BYTES = 32
MOST_FILES = 256  # of one run; an engine writes a handful
MOST_AWAITED = 100_000
SMALL_BYTES = 16 << 20  # fetched however full the disk is: a write that fails says so by itself
KEPT_FREE_BYTES = 1 << 30  # of the disk that parts lie on


class _DiffersError(Exception):
    """What the phone gives is not the file that its run's record names."""


class FileFetcher:
    """The files of one phone's runs."""

    def __init__(self, ingestor: Ingestor, uuid: bytes, folder: Path | None = None) -> None:
        """`folder` holds parts of files; the user's data directory without one."""
        self._ingestor = ingestor
        self._uuid = uuid
        self._folder = folder or data_dir() / "partial"
        self._awaited: dict[tuple[bytes, str], Wanted] = {}
        self._differed: set[tuple[bytes, str]] = set()  # not asked for again by this process

    def expect(self, ended: pb.FollowReply.Ended) -> None:
        """Remember the files of a run whose every block was sent."""
        for facts in ended.artifacts[:MOST_FILES]:
            if len(facts.sha256) == SHA256_BYTES and len(self._awaited) < MOST_AWAITED:
                item = Wanted(ended.run_id, facts.name, facts.kind, facts.size, facts.sha256)
                if (item.run_id, item.name) not in self._differed:
                    self._awaited[item.run_id, item.name] = item

    def resume(self) -> None:
        """Remember what the database still awaits: a collector that was killed had not fetched it."""
        for item in self._ingestor.wanted(self._uuid):
            if len(item.sha256) == SHA256_BYTES:
                self._awaited.setdefault((item.run_id, item.name), item)
        self._sweep()

    def _sweep(self) -> None:
        """Remove parts of files that are stored: a collector was killed, or lost its lease, before it removed them."""
        awaited = {item.sha256.hex() for item in self._awaited.values()}
        for path in self._folder.glob(f"*-{self._uuid.hex()[:8]}.part"):
            sha256 = path.name.partition("-")[0]
            if sha256 not in awaited and self._ingestor.artifacts.has(sha256):
                path.unlink(missing_ok=True)

    def pending(self) -> int:
        """How many files are still to come."""
        return len(self._awaited)

    def fetch(
        self,
        client: calls.AgentClient,
        may_acknowledge: bool,
        check: Callable[[], None],
    ) -> int:
        """Fetch what is awaited; returns how many were stored. `check` may raise to stop between pieces.

        A file the agent does not give now (a cell is being measured) stays awaited, and so do those behind it: being asked
        costs the phone something too. One it does not have any more, or of
        which it gives something else than its record says, is given up: it would be awaited for ever, and keep the others
        waiting.
        """
        stored = 0
        for key, item in list(self._awaited.items()):
            if not self._ingestor.owns(self._uuid, item.run_id):
                LOG.warning("file of another phone's run", extra={"run": item.run_id.hex()[:32], "file": item.name})
                del self._awaited[key]
                continue
            # The phone may tell of a file again after it was stored: word of an ended run was on its way when another
            # stream or another collector fetched it. It may have been deleted there since.
            held = self._ingestor.holds(item.run_id, item.name, item.sha256)
            try:
                if not held and not self._store(client, item, check):
                    continue
            except calls.Busy as busy:
                LOG.info("files wait", extra={"count": len(self._awaited), "why": str(busy)})
                break
            if may_acknowledge:
                client.acknowledge_artifact(item.run_id, item.name, item.sha256)
            self._place(item).unlink(missing_ok=True)
            del self._awaited[key]
            stored += not held
        return stored

    def _store(
        self,
        client: calls.AgentClient,
        item: Wanted,
        check: Callable[[], None],
    ) -> bool:
        """Fetch one file into the store; False when it cannot be had, now or ever. Raises `calls.Busy`."""
        try:
            path = self._part(client, item, check)
        except calls.Busy:
            raise
        except calls.Refused as error:
            told = {"run": item.run_id.hex(), "file": item.name, "why": str(error)}
            if error.code is not grpc.StatusCode.NOT_FOUND:
                LOG.info("file waits", extra=told)
                return False
            self._give_up(item, str(error))
            return False
        except _DiffersError as error:
            if len(self._differed) < MOST_AWAITED:
                self._differed.add((item.run_id, item.name))
            self._give_up(item, str(error))
            return False
        if path is None:
            return False
        self._ingestor.artifact(item.run_id, item.name, item.kind, str(path), item.sha256)
        return True

    def _give_up(self, item: Wanted, why: str) -> None:
        """Put on record that it cannot be had; the phone, which is not told, keeps what it has."""
        LOG.warning("file given up", extra={"run": item.run_id.hex(), "file": item.name, "why": why})
        self._ingestor.artifact_given_up(item.run_id, item.name, why)
        self._place(item).unlink(missing_ok=True)
        del self._awaited[item.run_id, item.name]

    def _place(self, item: Wanted) -> Path:
        return self._folder / f"{item.sha256.hex()}-{self._uuid.hex()[:8]}.part"

    def _part(self, client: calls.AgentClient, item: Wanted, check: Callable[[], None]) -> Path | None:
        """Bring the part on this host to the whole file; None when it cannot be had whole now.

        Raises _DiffersError when the phone's file is another one: it gave the same wrong content twice, from the first byte on
        the second time, or more than the record says.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._place(item)
        seen = b""
        for _ in range(3):
            have = path.stat().st_size if path.exists() else 0
            free = shutil.disk_usage(self._folder).free
            if item.size - have > free - KEPT_FREE_BYTES and item.size - have > SMALL_BYTES:
                LOG.warning(
                    "no room", extra={"run": item.run_id.hex(), "file": item.name, "size": item.size, "free": free}
                )
                return None
            self._extend(client, item, path, check)
            with path.open("rb") as done:
                digest = hashlib.file_digest(done, "sha256").digest()
            if digest == item.sha256:
                return path
            if path.stat().st_size < item.size:
                return None  # the stream ended early; the part is kept for the next time
            LOG.warning("file differs", extra={"run": item.run_id.hex(), "file": item.name, "sha256": digest.hex()})
            path.unlink()
            if digest == seen:
                raise _DiffersError("the phone's file is not the one its run's record names: its sha256 is another")
            seen = digest
        return None

    def _extend(self, client: calls.AgentClient, item: Wanted, path: Path, check: Callable[[], None]) -> None:
        """Ask for what a part lacks. Raises OSError that names the part when it cannot be written."""
        try:
            self._write(client, item, path, check)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None

    def _write(self, client: calls.AgentClient, item: Wanted, path: Path, check: Callable[[], None]) -> None:
        with path.open("ab") as file:
            if file.tell() > item.size:
                file.truncate(0)
            if file.tell() == item.size:
                return
            for chunk in client.fetch(item.run_id, item.name, file.tell()):
                check()
                if chunk.offset != file.tell():
                    raise calls.CallError(f"file {item.name}: offset {chunk.offset} came where {file.tell()} was due")
                if file.tell() + len(chunk.data) > item.size:
                    path.unlink()
                    raise _DiffersError(f"the phone gives more than the {item.size} bytes its run's record says")
                file.write(chunk.data)
