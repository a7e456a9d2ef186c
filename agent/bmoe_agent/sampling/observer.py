"""What the agent itself costs (law 6): its CPU, switches, storage I/O and how late its own timers fire.

In: nothing but this process's own counters. Out: `ObserverCost` since the engine was launched: what gates and a pre-heat took
before it is not watching. A late timer is the only sign an app gets of having been frozen or of a dozing phone, so the largest
slip is kept.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable

from bmoe_proto.kernel_proc import io
from bmoe_proto.v1 import telemetry_pb2 as pb

from bmoe_agent.roots import Roots
from bmoe_agent.sampling.sampler import Sampler


class Observer:
    """Counts from its construction on, with what an agent before this one had `carried` to its last word."""

    def __init__(
        self,
        roots: Roots | None = None,
        cpu_ns: Callable[[], int] = time.process_time_ns,
        carried: pb.ObserverCost | None = None,
    ) -> None:
        self._carried = carried or pb.ObserverCost()
        self._node = "proc/self/io"
        # Its own cost is always this machine's, whatever tree the sensors look at.
        self._roots = Roots() if roots is None or roots.substituted else roots
        self._cpu_ns = cpu_ns
        self._max_slip_ns = 0
        self._began = self._counts()

    def slept(self, wanted_ns: int, took_ns: int) -> int:
        """Note one wait of the agent's loop; returns how much later than wanted it ended."""
        slip = max(0, took_ns - wanted_ns)
        self._max_slip_ns = max(self._max_slip_ns, slip)
        return slip

    def cost(self, sampler: Sampler | None = None) -> pb.ObserverCost:
        """The cost so far, the sampler's counts with it when there is one."""
        now = [max(0, here - there) for here, there in zip(self._counts(), self._began, strict=True)]
        before = self._carried
        return pb.ObserverCost(
            cpu_ns=before.cpu_ns + now[0],
            wakeups=before.wakeups + now[1],
            preemptions=before.preemptions + now[2],
            read_bytes=before.read_bytes + now[3],
            write_bytes=before.write_bytes + now[4],
            max_timer_slip_ns=max(before.max_timer_slip_ns, self._max_slip_ns),
            samples=before.samples + (sampler.samples if sampler else 0),
            sampling_ns=before.sampling_ns + (sampler.sampling_ns if sampler else 0),
        )

    def _counts(self) -> tuple[int, int, int, int, int]:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        read_bytes = write_bytes = 0
        try:
            counters = io(self._roots.read(self._node).decode("ascii", "replace"))
            read_bytes = int(counters.get("io_read_bytes") or 0)
            write_bytes = int(counters.get("io_write_bytes") or 0)
        except OSError:
            # Not measured on kernels without task I/O accounting; rusage's block counts are the next best.
            read_bytes, write_bytes = usage.ru_inblock * 512, usage.ru_oublock * 512
        return (self._cpu_ns(), usage.ru_nvcsw, usage.ru_nivcsw, read_bytes, write_bytes)


def boot_ns() -> int:
    """CLOCK_BOOTTIME, the clock of the record; MONOTONIC where the platform has none."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime_ns(clock)
