"""One phone's thread: hold its lease, follow its agent, commit what comes, acknowledge it, fetch its files.

In: routes to the phone (replaced by the collector when transports come and go), the ingestor. Out: rows in the
database and `PhoneNow` on the board. Order is law 2's: a batch is committed with its cursor, then acknowledged; a file
is stored under its sha256, then acknowledged. Any moment is a good one to be killed.

Liveness: the agent says something at least every five seconds. Twelve seconds of silence end the call (a frozen phone
accepts and never answers), and the phone is shown as frozen until it talks again.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bmoe_proto import calls
from bmoe_proto.v1 import telemetry_pb2 as pb

from bmoe_collector.fleet import trouble
from bmoe_collector.fleet.files import FileFetcher
from bmoe_collector.fleet.phone import AWAY, PhoneBoard
from bmoe_collector.fleet.requests import Requests
from bmoe_collector.fleet.settler import Settler
from bmoe_collector.fleet.tenure import Tenure
from bmoe_collector.fleet.trouble import LeaseLostError
from bmoe_collector.ingest.ingestor import Ingestor, Unsettled
from bmoe_collector.probe.prepare import announce
from bmoe_collector.probe.watcher import Watcher
from bmoe_collector.reach.routes import Reach, Sighting
from bmoe_collector.reach.states import ClockSeen, storage_problem
from bmoe_collector.store.engine import Store

LOG = logging.getLogger("bmoe.fleet")


@dataclass(frozen=True, slots=True)
class Timers:
    """Every period of the fleet, so that tests can turn time faster."""

    silence_s: float = 12.0
    lease_s: float = 20.0
    renew_s: float = 6.0
    retry_first_s: float = 0.5
    retry_most_s: float = 15.0
    look_s: float = 10.0
    status_s: float = 60.0
    files_s: float = 10.0


class Drainer(threading.Thread):
    """The thread of one phone; runs until `stop`."""

    def __init__(
        self,
        uuid: bytes,
        store: Store,
        ingestor: Ingestor,
        reach: Reach,
        board: PhoneBoard,
        holder: str,
        timers: Timers,
        settler: Settler,
        connected: Callable[[bytes, calls.AgentClient], None],
    ) -> None:
        """`connected` is called with every new client: it submits what is queued for this phone."""
        super().__init__(name=f"drain-{uuid.hex()[:8]}", daemon=True)
        self.uuid = uuid
        self._store = store
        self._ingestor = ingestor
        self._reach = reach
        self._board = board
        self._timers = timers
        self._settler = settler
        self._connected = connected
        self._files = FileFetcher(ingestor, uuid)
        self._routes: list[Sighting] = []
        self._routes_changed = threading.Event()
        self._stopped = threading.Event()
        self._client: calls.AgentClient | None = None
        self.tenure = Tenure(uuid, store, holder, timers.lease_s, timers.renew_s, board, self._warn)
        self._heard = 0.0  # monotonic
        self._busy = False  # committing: silence is ours, not the phone's
        self._silent = False
        self._told = ("", "")  # the trouble logged last
        self._own_failures = 0  # of this host, in a row: a phone that answers does not mend them
        self._may_acknowledge = False
        self._clock: ClockSeen | None = None
        self._probe: Watcher | None = None
        self._beat_drained = False
        self._unsettled = False

    # ------------------------------------------------------------ told by the collector

    def set_routes(self, routes: list[Sighting]) -> None:
        """The ways to the phone as they are now."""
        if routes != self._routes:
            self._routes = routes
            self._routes_changed.set()

    def stop(self) -> None:
        """End soon: what is being committed is committed, the call is dropped."""
        self._stopped.set()
        self._routes_changed.set()
        self._drop()

    def tick(self) -> None:
        """Called about every second by the collector: end a silent call."""
        now = time.monotonic()
        if self._client is not None and not self._busy and now - self._heard > self._timers.silence_s:
            self._silent = True
            self._drop()

    # ------------------------------------------------------------ the thread

    def run(self) -> None:
        """Follow again and again until stopped."""
        pause_s = self._timers.retry_first_s
        try:
            while not self._stopped.is_set():
                self._routes_changed.clear()
                got_data = False
                if not self._routes:
                    before = self._board.get(self.uuid)
                    if before.state not in AWAY or before.failures:
                        self._board.update(self.uuid, state="away", detail="", drained=False, failures=0)
                    self.tenure.give_back()
                    self._routes_changed.wait(self._timers.look_s)
                    continue
                if not self.tenure.take():
                    self._stopped.wait(self.tenure.until_free_s())
                    continue
                for route in list(self._routes):
                    if self._stopped.is_set():
                        break
                    got_data = self._follow(route)
                    if got_data:
                        break
                pause_s = self._timers.retry_first_s if got_data else min(pause_s * 2, self._timers.retry_most_s)
                self._routes_changed.wait(pause_s)
        finally:
            self.tenure.give_back()

    def _follow(self, route: Sighting) -> bool:
        """One connection from its hello to its end; True when anything came over it."""
        self._silent = False
        got_data = False
        try:
            with contextlib.closing(self._reach.open(route)) as client:
                self._heard = time.monotonic()
                self._client = client
                if self._stopped.is_set():
                    return False
                self._greet(route, client)
                for reply in self._stream(client):
                    got_data = got_data or reply
        except Exception as error:
            # one phone's trouble, whatever it is, must not end its thread: it is shown, and tried again
            self._failed(route, error)
        finally:
            self._client = None
            self._end_probe()
        return got_data

    def _begin_probe(self, route: Sighting, client: calls.AgentClient, status: pb.StatusReply) -> None:
        """Look after the phone through its shell too, for as long as this connection lasts."""
        if route.transport is None or self._reach.adb is None:
            return
        self._probe = Watcher(
            self.uuid,
            self._reach.adb,
            route.transport.transport_id,
            client,
            self._store,
            ticks_per_s=status.device.clock_ticks_per_s,
            doing=status.state,
            changed=self._judge_again,
            settled=self.settled,
        )
        self._probe.start()

    def _judge_again(self, run_ids: list[str]) -> None:
        for run_id in run_ids:
            self._settler.add(Unsettled(self.uuid.hex(), run_id, grew=False))

    def unsettled(self, error: Exception, tries: int) -> None:
        """What follows a run's end could not be done, for the so many-th time."""
        state, detail, fault = trouble.told(error)
        self._unsettled = True
        failures = max(self._board.get(self.uuid).failures, tries)
        self._board.update(self.uuid, state=state, detail=detail, drained=False, failures=failures)
        self._warn("not settled", state, detail, error if fault else None)

    def settled(self) -> None:
        """Nothing waits in the phone's log, or of its ended runs, any more: it may be drained since the last heartbeat."""
        if self._unsettled and self._client is not None:
            self._unsettled = False
            self._board.update(self.uuid, state="ready", detail="", failures=0)
        if self._beat_drained and not self._waits():
            self._board.update(self.uuid, drained=True)

    def _waits(self) -> bool:
        """Whether something of this phone is still to be done although it has sent everything."""
        probing = self._probe is not None and self._probe.pending
        return bool(self._files.pending() or probing or self._settler.pending(self.uuid))

    def _end_probe(self) -> None:
        probe, self._probe = self._probe, None
        self._beat_drained = False
        if probe is not None:
            probe.stop()

    def _greet(self, route: Sighting, client: calls.AgentClient) -> None:
        hello = client.hello
        problems = self._clock_problem(hello.clock)
        status = client.status()
        self._busy = True
        try:
            self._ingestor.seen(status)
            for run in self._ingestor.unsettled(self.uuid):
                self._settler.add(run)
        finally:
            self._heard = time.monotonic()
            self._busy = False
        self._files.resume()
        self._may_acknowledge = status.kept_for_store in {b"", self._reach.store_id}
        if full := storage_problem(status):
            problems.append(f"storage_full: {full}")
        self._board.heard(
            self.uuid,
            name=status.device.name,
            where=route.where,
            state="ready",
            detail="",
            doing=status.state,
            backlog_bytes=status.backlog_bytes,
            held_alive=False,
            failures=0,
            problems=tuple(problems),
        )
        for problem in problems:
            LOG.warning("phone problem", extra={"phone": self.uuid.hex(), "problem": problem})
        LOG.info("connected", extra={"phone": self.uuid.hex(), "where": route.where, "agent": hello.agent_version})
        if route.transport is not None:
            self._reach.host.add_place(self.uuid, route.where)
        if route.transport is not None:
            announce(client)
        self._connected(self.uuid, client)
        self._begin_probe(route, client, status)

    def _stream(self, client: calls.AgentClient) -> Iterator[bool]:
        """Follow to the end of the stream; True after every reply that was dealt with."""
        requests = Requests()
        requests.open(self._ingestor.cursors(self.uuid), self._may_acknowledge)
        try:
            for reply in client.follow(iter(requests)):
                self._heard = time.monotonic()
                self._busy = True
                try:
                    self._handle(client, reply, requests)
                    self._own_failures = 0
                finally:
                    self._heard = time.monotonic()
                    self._busy = False
                yield True
                if self._stopped.is_set():
                    return
        finally:
            requests.close()

    def _handle(self, client: calls.AgentClient, reply: pb.FollowReply, requests: Requests) -> None:
        kind = reply.WhichOneof("say")
        if kind == "batch":
            cursor = self._ingestor.blocks(self.uuid, reply.batch.at, reply.batch.blocks, self.tenure.keeping())
            self.tenure.kept()
            if self._may_acknowledge:
                requests.acknowledge(cursor)
            if self._probe is not None:
                self._probe.poke(reply.batch.at.run_id.hex())
            self._beat_drained = False
            self._board.add(self.uuid, batches=1, bytes=len(reply.batch.blocks))
            self._board.heard(self.uuid, drained=False)
        elif kind == "heartbeat":
            beat = reply.heartbeat
            if self._probe is not None:
                self._probe.heard(beat.state)
            self._beat_drained = beat.drained
            if self._files.pending() and beat.state not in {"loading", "measuring"}:
                self._fetch(client)
            self._board.heard(
                self.uuid,
                doing=beat.state,
                backlog_bytes=beat.backlog_bytes,
                drained=beat.drained and not self._waits(),
            )
        elif kind == "ended":
            self._files.expect(reply.ended)
            if self._probe is not None:
                self._probe.run_ended()
            self._board.add(self.uuid, runs_ended=1)
            self._fetch(client)
            self._board.heard(self.uuid)

    def _fetch(self, client: calls.AgentClient) -> None:
        stored = self._files.fetch(client, self._may_acknowledge, self._keep_alive)
        if stored:
            self._board.add(self.uuid, artifacts=stored)

    def _keep_alive(self) -> None:
        """Between pieces of a long file: it is ours only while the lease is, and not after `stop`."""
        if self._stopped.is_set() or not self.tenure.ours():
            raise LeaseLostError("stopped while a file was fetched")

    def _failed(self, route: Sighting, error: Exception) -> None:
        if self._stopped.is_set():
            return
        if self._silent:
            state, detail, fault = "frozen", f"nothing heard for {self._timers.silence_s:g} s", False
        else:
            state, detail, fault = trouble.told(error)
        before = self._board.get(self.uuid)
        self._own_failures += state in trouble.OUR_OWN
        self._board.update(
            self.uuid,
            where=route.where,
            state=state,
            detail=detail,
            drained=False,
            reconnects=before.reconnects + 1,
            failures=max(before.failures + 1, self._own_failures),
        )
        self._warn("lost", state, detail, error if fault else None, where=route.where)

    def _warn(self, what: str, state: str, detail: str, error: Exception | None = None, **more: str) -> None:
        """Log a trouble once, however often it is met in a row."""
        if (state, detail) != self._told:
            self._told = (state, detail)
            told = {"phone": self.uuid.hex(), **more, "state": state, "detail": detail}
            LOG.warning(what, extra=told, exc_info=error)

    def _clock_problem(self, pair: pb.ClockPair) -> list[str]:
        seen = ClockSeen.of(pair)
        jump = self._clock.jump_s(seen) if self._clock is not None else None
        self._clock = seen
        return [f"clock_jumped: by {jump:+.1f} s"] if jump is not None else []

    def _drop(self) -> None:
        client = self._client
        if client is not None:
            client.close()
