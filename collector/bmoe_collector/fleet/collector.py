"""The collector: watches phones come and go and keeps one drainer for each that is paired and in reach.

In: the store, what this host can reach. Out: a full database, until stopped. It holds nothing that the database does
not: any number of collectors may share one database (leases keep them from draining one phone twice), and any may be
killed at any moment.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from bmoe_proto import calls

from bmoe_collector.common import BmoeError
from bmoe_collector.fleet import queue
from bmoe_collector.fleet.drainer import Drainer, Timers
from bmoe_collector.fleet.phone import AWAY, PhoneBoard, PhoneNow
from bmoe_collector.fleet.settler import Settler
from bmoe_collector.fleet.tenure import renew_all
from bmoe_collector.ingest.ingestor import Ingestor
from bmoe_collector.reach.adb import ADDRESS, AdbError
from bmoe_collector.reach.routes import Reach, Sighting, best_routes
from bmoe_collector.store.engine import Store
from bmoe_collector.store.leases import new_holder

LOG = logging.getLogger("bmoe.fleet")
PATIENCE = 3


@dataclass(slots=True)
class _Address:
    """A phone without a cable that is not connected: when to ask adb for it again."""

    next_try: float = 0.0
    pause_s: float = 1.0


def _settled(phone: PhoneNow) -> bool:
    if phone.state == "ready":
        return phone.drained
    if phone.state == "held":
        return phone.held_alive
    return (phone.state in AWAY and not phone.failures) or given_up(phone)


def given_up(phone: PhoneNow) -> bool:
    """Whether it failed so often in a row that nobody waits for it who waits for an end."""
    return phone.failures >= PATIENCE


class Collector:
    """Drains phones in threads of its own; `run` is the loop, or `start` puts it into a thread."""

    def __init__(
        self,
        store: Store,
        ingestor: Ingestor,
        reach: Reach,
        *,
        only: Collection[bytes] | None = None,
        timers: Timers | None = None,
    ) -> None:
        """`only` limits it to some phones, by uuid."""
        self.board = PhoneBoard()
        self._store = store
        self._ingestor = ingestor
        self._reach = reach
        self._only = set(only) if only is not None else None
        self._timers = timers or Timers()
        self._holder = new_holder()
        self._settler = Settler(ingestor, self._timers.files_s, self._settled, self._unsettled)
        ingestor.later = self._settler.add
        self._drainers: dict[bytes, Drainer] = {}
        self._addresses: dict[str, _Address] = {}
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._looked = threading.Event()
        self._thread: threading.Thread | None = None
        self._problem = ""  # why the newest look saw less than there is

    def start(self) -> None:
        """Run in a thread."""
        self._thread = threading.Thread(target=self.run, name="collector", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ask `run` to end; what is being committed is committed first."""
        self._stopping.set()
        self._wake.set()

    def join(self) -> None:
        """Wait for a started collector to end."""
        if self._thread is not None:
            self._thread.join()

    def run(self, until: Callable[[], bool] | None = None) -> None:
        """Look, drain, look again: until `stop`, or until `until` (asked every second after the first look) says so."""
        tracker: threading.Thread | None = None
        if self._reach.adb is not None:
            arguments = (self._wake.set, self._stopping)
            tracker = threading.Thread(target=self._reach.adb.track, args=arguments, name="adb-track", daemon=True)
            tracker.start()
        self._settler.start()
        look_at = 0.0
        try:
            while not self._stopping.is_set():
                now = time.monotonic()
                if self._wake.is_set() or now >= look_at:
                    self._wake.clear()
                    self._look()
                    look_at = now + self._timers.look_s
                for drainer in self._drainers.values():
                    drainer.tick()
                renew_all(self._store, self._holder, [drainer.tenure for drainer in self._drainers.values()])
                if until is not None and self._looked.is_set() and until():
                    break
                self._wake.wait(min(1.0, self._timers.silence_s / 4))
        finally:
            self._stopping.set()
            for drainer in self._drainers.values():
                drainer.stop()
            for drainer in self._drainers.values():
                drainer.join(60)
            self._settler.stop()
            if tracker is not None:
                tracker.join(5)

    # ------------------------------------------------------------ what to wait for

    def drained(self) -> bool:
        """Whether every phone in reach has nothing more to send now.

        One that another living collector holds is that one's; one that failed three times in a row is not waited for.
        """
        return all(_settled(phone) for phone in self.board.all())

    def idle(self) -> bool:
        """Whether every phone in reach is drained and runs nothing."""
        busy = [phone for phone in self.board.all() if phone.state == "ready" and phone.doing not in {"", "idle"}]
        return self.drained() and not busy

    def _settled(self, uuid: bytes) -> None:
        drainer = self._drainers.get(uuid)
        if drainer is not None:
            drainer.settled()

    def _unsettled(self, uuid: bytes, error: Exception, tries: int) -> None:
        drainer = self._drainers.get(uuid)
        if drainer is not None:
            drainer.unsettled(error, tries)

    # ------------------------------------------------------------ looking

    def _look(self) -> None:
        try:
            problem = self._look_around()
        except (BmoeError, OSError) as error:
            # This host's own files, say: phones that are being drained are drained on, and it is looked again.
            problem = str(error)
        if problem and problem != self._problem:
            LOG.warning("look", extra={"detail": problem})
        self._problem = problem
        self._looked.set()

    def _look_around(self) -> str:
        """Give each phone its ways; returns why adb shows none, empty when it does."""
        try:
            sightings = self._reach.sightings()
            problem = self._reach.adb_problem
        except AdbError as error:
            sightings, problem = [], str(error)
        routes = best_routes(sightings)
        for uuid, ways in routes.items():
            if self._only is None or uuid in self._only:
                self._drainer(uuid, ways[0]).set_routes(ways)
        for uuid, drainer in self._drainers.items():
            if uuid not in routes:
                drainer.set_routes([])
                self._why_away(uuid, sightings)
        self._call_addresses(sightings)
        return problem

    def _why_away(self, uuid: bytes, sightings: list[Sighting]) -> None:
        """A phone adb still lists has a better word than `away`."""
        where = self.board.get(uuid).where
        for sighting in sightings:
            if sighting.where == where and sighting.state in AWAY:
                self.board.update(uuid, state=sighting.state, detail=sighting.detail, drained=False, failures=0)

    def _drainer(self, uuid: bytes, first: Sighting) -> Drainer:
        drainer = self._drainers.get(uuid)
        if drainer is None:
            self.board.update(uuid, where=first.where)
            drainer = Drainer(
                uuid,
                self._store,
                self._ingestor,
                self._reach,
                self.board,
                self._holder,
                self._timers,
                self._settler,
                self._connected,
            )
            drainer.set_routes([first])
            self._drainers[uuid] = drainer
            drainer.start()
        return drainer

    def _call_addresses(self, sightings: list[Sighting]) -> None:
        """Connect again to phones without a cable that adb has forgotten; a server that was killed forgets them all."""
        if self._reach.adb is None:
            return
        here = {sighting.where for sighting in sightings}
        reached = {sighting.uuid for sighting in sightings if sighting.state == "reachable"}
        now = time.monotonic()
        for phone in self._reach.host.phones():
            if phone.uuid in reached or (self._only is not None and phone.uuid not in self._only):
                continue
            for address in phone.places:
                if not ADDRESS.match(address):
                    continue
                entry = self._addresses.setdefault(address, _Address())
                if address in here or now < entry.next_try:
                    continue
                try:
                    self._reach.adb.connect(address, timeout_s=5.0)
                    entry.pause_s = 1.0
                    self._wake.set()
                except AdbError as error:
                    LOG.debug("connect", extra={"where": address, "detail": str(error)})
                    entry.pause_s = min(entry.pause_s * 2, 60.0)
                entry.next_try = time.monotonic() + entry.pause_s

    # ------------------------------------------------------------ the queue

    def _connected(self, uuid: bytes, client: calls.AgentClient) -> None:
        """Submit what waits for this phone."""
        for queue_id, plan in queue.waiting(self._store, uuid):
            reply = client.submit(plan)
            if reply.refused:
                queue.settle(self._store, queue_id, "refused", "; ".join(reply.refused))
            else:
                queue.settle(self._store, queue_id, "submitted")
            LOG.info(
                "queued plan",
                extra={"phone": uuid.hex(), "plan": plan.plan_id, "refused": list(reply.refused)},
            )
