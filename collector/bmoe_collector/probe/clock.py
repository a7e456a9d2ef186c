"""The phone's boot clock seen from here, for shells that may not read /proc/uptime, and to check those that may.

In: readings of this host's monotonic clock around a `Clock` call. Out: boot times with what they may be off. Pure but for `measure`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from bmoe_proto.v1 import telemetry_pb2 as pb

DRIFT = 100e-6
"""How much two crystals may part, generously."""
SLACK_NS = 50_000_000


@dataclass(frozen=True, slots=True)
class Offset:
    """The phone's boot clock at one moment of this host's monotonic clock."""

    here_ns: int
    boot_ns: int
    uncertainty_ns: int
    boot_id: str

    def place(self, low_ns: int, high_ns: int) -> tuple[int, int]:
        """Boot time of the middle between two moments here, and how far it may be off."""
        middle = (low_ns + high_ns) // 2
        away = middle - self.here_ns
        return self.boot_ns + away, self.uncertainty_ns + (high_ns - low_ns) // 2 + round(abs(away) * DRIFT)

    def choose(self, by_uptime: tuple[int, int] | None, low_ns: int, high_ns: int) -> tuple[int, int]:
        """The sample's own uptimes, unless they are not the agent's clock: a container shows the uptime of its own."""
        mine = self.place(low_ns, high_ns)
        if by_uptime is None or abs(by_uptime[0] - mine[0]) > by_uptime[1] + mine[1] + SLACK_NS:
            return mine
        return by_uptime


def measure(ask: Callable[[], pb.ClockReply], times: int = 3) -> Offset:
    """Ask a few times, keep the narrowest. Raises what `ask` raises."""
    best: Offset | None = None
    for _ in range(times):
        before = time.monotonic_ns()
        pair = ask().clock
        after = time.monotonic_ns()
        width = (after - before) // 2 + pair.uncertainty_ns
        if best is None or width < best.uncertainty_ns:
            best = Offset((before + after) // 2, pair.boot_ns, width, pair.boot_id)
    assert best is not None
    return best
