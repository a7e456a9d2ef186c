"""The agent's service without an agent: a spool, a supervisor that only notes what it is asked, and a client."""

import hashlib
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from bmoe_agent.serve.port import Measuring, RefusedError
from bmoe_agent.serve.server import Server
from bmoe_agent.serve.service import AgentService
from bmoe_agent.spool import Spool
from bmoe_proto import calls, proof
from bmoe_proto.v1 import telemetry_pb2 as pb

STORE = b"S" * 16


class PlainSupervisor:
    """What the service needs of an agent."""

    def __init__(self, spool: Spool) -> None:
        self.spool = spool
        self.the_secret = proof.new_secret()
        self.cell: Measuring | None = None
        self.plans: list[pb.Plan] = []
        self.told: list[tuple[bytes, pb.Note]] = []

    def submit(self, plan):
        if not plan.cells:
            raise RefusedError("a plan without cells")
        self.plans.append(plan)
        return pb.SubmitReply(plan_id=plan.plan_id)

    def cancel(self, plan_id, *, only_current_cell):
        return pb.CancelReply(cancelled=True, detail=f"{plan_id} {only_current_cell}")

    def listing(self):
        return [pb.PlanListing(plan_id=plan.plan_id, cells=len(plan.cells)) for plan in self.plans]

    def status(self):
        return pb.StatusReply(state=self.state(), engines=["bmoe-cli"])

    def state(self):
        return "measuring" if self.cell else "idle"

    def measuring(self):
        return self.cell

    def clock(self):
        return pb.ClockPair(
            boot_ns=time.clock_gettime_ns(time.CLOCK_BOOTTIME), wall_ns=time.time_ns(), boot_id="boot-1"
        )

    def tell(self, run_id, note):
        self.told.append((run_id, note))
        return True

    def secret(self):
        return self.the_secret

    def rotate(self, new_secret, keep_for_store, *, forget):
        self.the_secret = new_secret or self.the_secret
        self.spool.kept_for = b"" if forget else keep_for_store or self.spool.kept_for


class Served:
    """A running service and what is behind it."""

    def __init__(self, folder, *, kept_for=STORE, name=None, tcp_port=None, heartbeat_s=0.3, quiet_s=0.3) -> None:
        self.spool = Spool(folder, 1 << 30, kept_for=kept_for, low_water_bytes=0)
        self.supervisor = PlainSupervisor(self.spool)
        self.uuid = os.urandom(16)
        self.name = name or f"bmoe-test-{secrets.token_hex(6)}"
        self._timers = {"heartbeat_s": heartbeat_s, "quiet_s": quiet_s}
        self.server: Server
        self.start(tcp_port)

    def start(self, tcp_port=None):
        service = AgentService(
            self.spool, self.supervisor, agent_uuid=self.uuid, agent_version="0.1.0", name=self.name, **self._timers
        )
        self.server = Server(service, self.name, tcp_port=tcp_port)
        self.server.start(self.supervisor.the_secret, self.uuid)

    def restart(self):
        """The service anew, as after a restart of the agent: sessions are forgotten."""
        self.server.stop(0)
        self.start()

    def client(self, *, store=STORE, secret=None, **options):
        options.setdefault("expect_uuid", self.uuid)
        options.setdefault("deadline_s", 20.0)
        return calls.connect(f"unix-abstract:{self.name}", secret or self.supervisor.the_secret, store, **options)

    def close(self):
        self.server.stop(0)
        self.spool.close()


@contextmanager
def served(folder, **options):
    """A service for the length of a `with`."""
    made = Served(folder, **options)
    try:
        yield made
    finally:
        made.close()


class Asking:
    """The requests of one `follow`: its opening, then acknowledgements as they are put in."""

    def __init__(self, *cursors, may_acknowledge=True, **options) -> None:
        self._queue: queue.Queue[pb.FollowRequest | None] = queue.Queue()
        opened = pb.FollowRequest.Open(may_acknowledge=may_acknowledge, **options)
        getattr(opened, "from").extend(cursors)
        self._queue.put(pb.FollowRequest(open=opened))

    def acknowledge(self, run_id, segment, offset):
        self._queue.put(pb.FollowRequest(acknowledge=pb.Cursor(run_id=run_id, segment=segment, offset=offset)))

    def close(self):
        self._queue.put(None)

    def __iter__(self) -> Iterator[pb.FollowRequest]:
        return iter(self._queue.get, None)


def make_run(spool, run_id, *, outputs=3, size=50, artifacts=None, end=True, started_wall_ns=0):
    """A run in a spool; returns the open writer when it is not ended. `artifacts`: names to bytes."""
    writer = spool.open_run(run_id)
    clock = pb.ClockPair(wall_ns=started_wall_ns, boot_id="boot-1")
    writer.append("run_started", pb.RunStarted(cell=pb.Cell(name="c"), clock=clock), 1)
    writer.sync()
    for at in range(outputs):
        writer.append("output", pb.Output(stream=pb.STREAM_STDOUT, offset=at, data=os.urandom(size)), at)
        writer.flush()
    if not end:
        return writer
    facts = []
    for name, data in (artifacts or {}).items():
        with open(os.path.join(spool.files_directory(run_id), name), "wb") as file:
            file.write(data)
        facts.append(pb.ArtifactFacts(name=name, kind="metrics", size=len(data), sha256=hashlib.sha256(data).digest()))
    writer.end(pb.RunEnded(outcome="ok", launched=True, artifacts=facts), 99)
    return None


class Relay:
    """A program that listens on a name of its own and passes every byte on to another; it can stand still."""

    def __init__(self, target: str) -> None:
        self.name = f"bmoe-test-relay-{secrets.token_hex(6)}"
        self._target = target
        self._flowing = threading.Event()
        self._flowing.set()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"\0{self.name}")
        self._listener.listen()
        self._opened = [self._listener]
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def stand_still(self):
        """Nothing passes any more, and nobody is told: a frozen phone, or a link that was cut."""
        self._flowing.clear()

    def close(self):
        self._flowing.set()
        for end in self._opened:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self._thread.join()

    def _accept(self):
        with suppress(OSError):
            while True:
                inner, _ = self._listener.accept()
                outer = socket.socket(socket.AF_UNIX)
                outer.connect(f"\0{self._target}")
                self._opened.extend((inner, outer))
                for ends in ((inner, outer), (outer, inner)):
                    threading.Thread(target=self._pump, args=ends, daemon=True).start()

    def _pump(self, source, sink):
        with suppress(OSError):
            while data := source.recv(65536):
                self._flowing.wait()
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@contextmanager
def relay(target):
    """A relay for the length of a `with`."""
    made = Relay(target)
    try:
        yield made
    finally:
        made.close()
