"""What the agent costs: idle, and while it records a run at 20 tokens a second with a connected collector.

`run()` gives one row per bench: `ratio` is the agent's share of one core, from the kernel's own clock of the process
(nanoseconds, threads that ended included). Start-up and the first second are not counted.
"""

import contextlib
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bmoe_proto import calls
from bmoe_proto.v1 import telemetry_pb2 as pb
from support.agent_records import cell, client, plan
from support.agents import Agent, agent, wait_for

IDLE_S = 15.0
RUN_S = 20.0
TOKENS_PER_S = 20


def cpu_ns(pid: int) -> int:
    """CPU time of another process: clock_getcpuclockid(3)'s arithmetic."""
    return time.clock_gettime_ns((~pid << 3) | 2)


def share(pid: int, seconds: float) -> float:
    """Share of one core a process takes over the next seconds."""
    before, began = cpu_ns(pid), time.monotonic_ns()
    time.sleep(seconds)
    return (cpu_ns(pid) - before) / (time.monotonic_ns() - began)


@contextlib.contextmanager
def follower(phone: Agent) -> Iterator[dict[str, int]]:
    """A collector that follows and acknowledges, as far as the agent can tell."""
    seen = {"bytes": 0, "messages": 0}
    done = threading.Event()
    queue: list[pb.FollowRequest] = [pb.FollowRequest(open=pb.FollowRequest.Open(may_acknowledge=True))]
    more = threading.Condition()

    def requests() -> Iterator[pb.FollowRequest]:
        while not done.is_set():
            with more:
                while not queue and not done.is_set():
                    more.wait(0.5)
                waiting, queue[:] = list(queue), []
            yield from waiting

    def follow(connected: calls.AgentClient) -> None:
        with contextlib.suppress(calls.CallError, StopIteration):
            for reply in connected.follow(requests()):
                if reply.WhichOneof("say") == "batch":
                    seen["bytes"] += len(reply.batch.blocks)
                    seen["messages"] += 1
                    at = reply.batch.at
                    cursor = pb.Cursor(run_id=at.run_id, segment=at.segment, offset=at.offset + len(reply.batch.blocks))
                    with more:
                        queue.append(pb.FollowRequest(acknowledge=cursor))
                        more.notify()

    with client(phone) as connected:
        thread = threading.Thread(target=follow, args=(connected,), daemon=True)
        thread.start()
        try:
            yield seen
        finally:
            done.set()
            with more:
                more.notify()
            connected.close()
            thread.join(10)


def _measure(implementation: str) -> dict[str, Any]:
    limit = 0.01 if implementation == "upb" else 0.02
    with tempfile.TemporaryDirectory() as folder, agent(Path(folder), f"tok_s={TOKENS_PER_S},load_s=0.1") as phone:
        phone.env["PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"] = implementation
        phone.start()
        assert phone.process is not None
        asked = plan([cell("bench", n_predict=int(TOKENS_PER_S * (RUN_S + 15)))])
        with follower(phone) as seen, client(phone) as connected:
            connected.submit(asked)
            wait_for(lambda: connected.status().tokens > TOKENS_PER_S, "tokens")
            before = dict(seen)
            ratio = share(phone.process.pid, RUN_S)
            got = {key: seen[key] - before[key] for key in seen}
            connected.cancel(asked.plan_id)
            wait_for(lambda: connected.status().state == "idle", "the end of the run")
        phone.stop()
    return {
        "bench": f"agent_run_{implementation}",
        "what": f"agent's share of a core at {TOKENS_PER_S} tokens/s, default sampling, collector connected, {implementation}",
        "ratio": ratio,
        "limit": limit,
        "ok": ratio < limit,
        "detail": f"{100 * ratio:.2f} % of a core over {RUN_S:g} s; {got['bytes'] / RUN_S:.0f} bytes/s on the wire in "
        f"{got['messages'] / RUN_S:.1f} messages/s; load {os.getloadavg()[0]:.1f}",
    }


def _idle() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, agent(Path(folder)) as phone:
        phone.start()
        assert phone.process is not None
        time.sleep(1)
        ratio = share(phone.process.pid, IDLE_S)
        phone.stop()
    return {
        "bench": "agent_idle",
        "what": "idle agent's share of a core",
        "ratio": ratio,
        "limit": 0.003,
        "ok": ratio < 0.003,
        "detail": f"{100 * ratio:.3f} % of a core over {IDLE_S:g} s; load {os.getloadavg()[0]:.1f}",
    }


def run() -> list[dict[str, Any]]:
    """All rows; takes about 70 s."""
    return [_idle(), _measure("upb"), _measure("python")]


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    for row in run():
        print(row)
