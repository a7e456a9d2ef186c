"""Many phones in one process: the agent's own service and spool for each, replaying a recorded run.

`python fleet_load.py RECORDING FOLDER STORE COUNT`: an agent's home with one run, where spools may lie, the store's id, how
many. A line of JSON in, a line out:

    {}                                    the phones: uuid, secret, socket
    {"do": "backlog", "phones": N, "runs": N}   whole runs as fast as it goes into the first N phones
    {"do": "live"}                        every phone records runs one after the other in real time, each at a place of its own
    {"do": "connected"}                   how many phones have a reader
    {"do": "measure", "seconds": S}       lags over that time
    {"do": "rest"}                        the runs that are under way end at once, and no more begin
    {"do": "drained", "within": S}        waits until everything is acknowledged; when that began and ended, monotonic
"""

from __future__ import annotations

import heapq
import json
import math
import random
import secrets
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bmoe_agent.serve.server import Server
from bmoe_agent.serve.service import AgentService
from bmoe_proto import proof
from bmoe_proto.v1 import telemetry_pb2 as pb

sys.path.insert(0, str(Path(__file__).resolve().parent))

from fleet_record import BETWEEN_NS, Lags, Phone, Recording


class Supervisor:
    """What the service asks of an agent, for one phone."""

    def __init__(self, phone: Phone, recording: Recording) -> None:
        self._phone = phone
        self._device = pb.DeviceFacts()
        self._device.CopyFrom(recording.started.device)
        self._device.agent_uuid, self._device.name = phone.uuid, phone.name
        self._secret = proof.new_secret()

    def submit(self, plan):
        return pb.SubmitReply(plan_id=plan.plan_id, refused=["a replay"])

    def cancel(self, plan_id, *, only_current_cell):
        return pb.CancelReply()

    def listing(self):
        return []

    def status(self):
        return pb.StatusReply(device=self._device, state=self.state())

    def state(self):
        return "measuring" if self._phone.measuring else "between"

    def measuring(self):
        return self._phone.measuring

    def clock(self):
        boot_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        return pb.ClockPair(boot_ns=boot_ns, wall_ns=time.time_ns(), boot_id="replay")

    def tell(self, run_id, note):
        return False

    def secret(self):
        return self._secret

    def rotate(self, new_secret, keep_for_store, *, forget):
        return None


class Load:
    """All phones, and the thread that lets them record."""

    def __init__(self, home: Path, folder: Path, store_id: bytes, count: int) -> None:
        self.recording = Recording(home)
        self.lags = Lags()
        self.phones = [Phone(self.recording, folder, number, store_id, self.lags) for number in range(count)]
        self.services: list[AgentService] = []
        self.servers: list[Server] = []
        self.facts: list[dict[str, str]] = []
        for phone in self.phones:
            name = f"bmoe-bench-{secrets.token_hex(6)}"
            supervisor = Supervisor(phone, self.recording)
            service = AgentService(phone.spool, supervisor, agent_uuid=phone.uuid, agent_version="bench", name=name)
            self.servers.append(Server(service, name))
            self.servers[-1].start(supervisor.secret(), phone.uuid)
            self.services.append(service)
            self.facts.append({"uuid": phone.uuid.hex(), "secret": supervisor.secret().hex(), "socket": name})
        self._resting = threading.Event()
        self._thread: threading.Thread | None = None

    def backlog(self, phones: int, runs: int) -> dict[str, Any]:
        """Each of the first phones records so many runs, the last of which ended just now."""
        began, plan_id = time.monotonic(), secrets.token_hex(16)
        for phone in self.phones[:phones]:
            phone.plan_id = plan_id
            at_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - runs * (self.recording.length_ns + BETWEEN_NS)
            for _ in range(runs):
                at_ns = phone.whole(at_ns)
        self.lags.again()
        used = sum(phone.spool.used_bytes for phone in self.phones)
        return {"runs": phones * runs, "bytes": used, "seconds": time.monotonic() - began}

    def drained(self, within: float) -> dict[str, Any]:
        """Wait until nothing is left on any phone: when the first block was read and the last thing acknowledged."""
        deadline = time.monotonic() + within
        while not all(phone.empty() for phone in self.phones):
            if time.monotonic() > deadline:
                left = sum(phone.spool.backlog_bytes() for phone in self.phones)
                return {"left_bytes": left, "left_runs": sum(len(phone.spool.runs()) for phone in self.phones)}
            time.sleep(0.05)
        return {"began": self.lags.first_read, "ended": self.lags.last_acknowledged}

    def connected(self) -> int:
        """How many phones have a reader."""
        return sum(bool(service._followers) for service in self.services)

    def live(self) -> None:
        """Begin to record in real time."""
        self._resting.clear()
        plan_id = secrets.token_hex(16)
        for phone in self.phones:
            phone.plan_id = plan_id
        self._thread = threading.Thread(target=self._record, name="record")
        self._thread.start()

    def rest(self) -> None:
        """End what is under way, and begin no more."""
        self._resting.set()
        assert self._thread is not None
        self._thread.join()
        for phone in self.phones:
            if phone.busy:
                phone.finish()

    def measure(self, seconds: float) -> dict[str, Any]:
        """Lags of what is acknowledged within so many seconds from now."""
        began = time.monotonic()
        self.lags.again(began)
        time.sleep(seconds)
        self.lags.since = math.inf
        # what is still to be acknowledged has a lag too
        now = time.monotonic()
        for phone in self.phones:
            phone.spool.overdue(began, now)
        waiting = sum(phone.spool.backlog_bytes() for phone in self.phones)
        return {
            "blocks": quantiles(self.lags.blocks),
            "frames": quantiles(self.lags.frames),
            "slips": quantiles(self.lags.slips),
            "waiting_bytes": waiting,
        }

    def _record(self) -> None:
        now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        heap: list[tuple[int, int]] = []
        for phone in self.phones:
            phone.begin(now_ns - int(self.recording.length_ns * random.random()))
            heap.append((phone.due_ns(), phone.number))
        heapq.heapify(heap)
        while not self._resting.is_set():
            due_ns, number = heap[0]
            late_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - due_ns
            if late_ns < 0:
                time.sleep(-late_ns / 1e9)
                continue
            if self.lags.since < math.inf:
                self.lags.slips.append(late_ns / 1e9)
            phone = self.phones[number]
            if not phone.busy:
                phone.begin(due_ns)
            elif not phone.step():
                heapq.heapreplace(heap, (due_ns + BETWEEN_NS, number))
                continue
            heapq.heapreplace(heap, (phone.due_ns(), number))


def quantiles(values: list[float]) -> dict[str, float | int]:
    """How many, the median, the 99th percentile and the largest."""
    found = sorted(values) or [float("nan")]
    at = {"p50": found[len(found) // 2], "p99": found[min(len(found) - 1, len(found) * 99 // 100)], "max": found[-1]}
    return {"n": len(values), **{name: round(value, 4) for name, value in at.items()}}


def main() -> None:
    """Serve until stdin ends."""
    home, folder, store_id, count = sys.argv[1:]
    load = Load(Path(home), Path(folder), bytes.fromhex(store_id), int(count))
    recording = load.recording
    told = {"phones": load.facts, "tokens": recording.tokens, "tok_s": recording.tok_s}
    print(json.dumps({**told, "run_s": recording.length_ns / 1e9}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        reply = getattr(load, asked.pop("do"))(**asked)
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
