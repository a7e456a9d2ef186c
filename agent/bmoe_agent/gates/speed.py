"""The speed probe: a fixed short computation, and how its speed compares with this phone's own cold one.

In: how many units of work the baseline found right for this phone. Out: seconds, and ratios (1 is as fast as cold, 0.5 half as
fast). It needs no permission and sees every cause at once: caps by a vendor's controller, a small cpuset, another app's load, a quota.

A unit is one zlib compression and one SHA-256 of a fixed buffer. Both release the interpreter's lock, so threads really run side by side.
A pass has at least 250 ms, longer than two periods of the scheduler's 100 ms quotas: a shorter one could fit into what a limited
group had saved up. One pass alone on one core and one on every allowed CPU, since a limit can show in either: big cores excluded in the
first, a quota or a shared power budget in the second.

Noise only ever makes a pass slower. So a pass that looks slow is repeated and the best one counts; what is really slow is slow every time.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass

VERSION = 1  # of the computation: a baseline of another one says nothing
PASS_S = 0.25
_WARM_S = 0.06  # governors need some milliseconds to raise the clock
_REPEATS = 6
_SLOW = 0.92


def _buffer() -> bytes:
    """64 KiB that compress about as text does, made from a recurrence and so the same everywhere."""
    state, out = 12345, bytearray()
    for _ in range(32 * 1024):
        state = (state * 1103515245 + 12345) & 0x7FFFFFFF
        out.append(97 + (state >> 16) % 24)
        out.append(32 + (state >> 21) % 3)
    return bytes(out)


_DATA = _buffer()


def units(count: int) -> None:
    """Do the work."""
    for _ in range(count):
        zlib.compress(_DATA, 6)
        hashlib.sha256(_DATA).digest()


def allowed_cpus() -> int:
    """CPUs this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def single_s(count: int) -> float:
    """Wall seconds of `count` units on one thread."""
    began = time.perf_counter()
    units(count)
    return time.perf_counter() - began


def multi_s(count: int, threads: int) -> float:
    """Wall seconds until every one of `threads` threads has done `count` units, begun together."""
    ready = threading.Barrier(threads + 1)

    def work() -> None:
        ready.wait()
        units(count)

    pool = [threading.Thread(target=work, name="speed-probe", daemon=True) for _ in range(threads)]
    for thread in pool:
        thread.start()
    ready.wait()
    began = time.perf_counter()
    for thread in pool:
        thread.join()
    return time.perf_counter() - began


def warm_up(wanted_s: float = _WARM_S) -> None:
    """Run until the clocks have had time to rise."""
    until = time.perf_counter() + wanted_s
    while time.perf_counter() < until:
        units(1)


def calibrate(pass_s: float = PASS_S) -> int:
    """Units that take at least `pass_s` on one thread here and now."""
    warm_up()
    count = 4
    while (took := single_s(count)) < pass_s / 4:
        count = count * 2 if took <= 0 else max(count + 1, min(count * 8, int(count * pass_s / 3 / took)))
    return max(1, int(count * pass_s * 1.05 / took) + 1)


@dataclass(frozen=True, slots=True)
class Speed:
    """Ratios to the cold baseline, and how many passes it took to be sure."""

    single_ratio: float
    multi_ratio: float
    single_s: float
    multi_s: float
    passes: int

    @property
    def ratio(self) -> float:
        """The worse of the two."""
        return min(self.single_ratio, self.multi_ratio)


def measure(
    count: int,
    threads: int,
    cold_single_s: float,
    cold_multi_s: float,
    single: Callable[[int], float] = single_s,
    multi: Callable[[int, int], float] = multi_s,
) -> Speed:
    """Probe now. `cold_*_s` are what the same work took when the baseline was recorded."""
    warm_up()
    passes = 0

    def best(run: Callable[[], float], cold_s: float) -> float:
        nonlocal passes
        least = float("inf")
        for _ in range(_REPEATS):
            passes += 1
            least = min(least, run())
            if cold_s / least >= _SLOW:
                break
        return least

    alone = best(lambda: single(count), cold_single_s)
    together = best(lambda: multi(count, threads), cold_multi_s)
    return Speed(cold_single_s / alone, cold_multi_s / together, alone, together, passes)
