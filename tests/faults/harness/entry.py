"""The agent's or the collector's process with its timers scaled and its wall clock set: `entry.py bmoe|bmoe-agent ARGUMENTS`.

In, by environment: BMOE_FAULTS_SCALE, a factor for every period; BMOE_FAULTS_CLOCK, a file with seconds to add to the wall
clock, read at every look; BMOE_FAULTS_PLANT, a defect that the harness must notice: `forget`, `twice`,
`descriptors`, `threads`, `memory`. Nothing else differs from the installed command.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import threading
import time
import types
from pathlib import Path

LEAKED: list[object] = []


def scale_timers(factor: float) -> None:
    """Every period of the program that is about to run."""
    if sys.argv[1] == "bmoe-agent":
        from bmoe_agent import night
        from bmoe_agent.serve.service import AgentService

        night.TROUBLE_PAUSE_S *= factor
        defaults = AgentService.__init__.__kwdefaults__
        defaults["heartbeat_s"] *= factor
    elif "collect" in sys.argv:
        from bmoe_collector.fleet.drainer import Timers

        Timers.__init__.__defaults__ = tuple(value * factor for value in Timers.__init__.__defaults__)


def set_clock(place: Path) -> None:
    """A wall clock that is off by what the file says, for the program's own modules.

    gRPC's C core reads the real one and compares it with Python's: it must not see two.
    """

    def off_s() -> float:
        try:
            return float(place.read_text() or 0)
        except (OSError, ValueError):
            return 0.0

    def wall_ns() -> int:
        return time.time_ns() + int(off_s() * 1e9)

    shown = types.ModuleType("time")
    shown.__dict__.update(vars(time))
    shown.time, shown.time_ns = lambda: time.time() + off_s(), wall_ns
    if sys.argv[1] == "bmoe-agent":
        import bmoe_agent.context
        import bmoe_agent.night
        from bmoe_agent.spool import Spool

        bmoe_agent.context.time = bmoe_agent.night.time = shown
        Spool.__init__.__kwdefaults__["wall_ns"] = wall_ns
    else:
        import bmoe_collector.fleet.phone
        import bmoe_collector.store.engine

        bmoe_collector.fleet.phone.time = bmoe_collector.store.engine.time = shown


def plant(defect: str) -> None:
    """Make the collector wrong in one way."""
    from bmoe_collector.fleet.drainer import Drainer
    from bmoe_collector.ingest import ingestor

    if defect == "twice":  # reads every block of stdout twice
        from bmoe_collector.ingest.stdout_rows import StdoutRows

        feed = StdoutRows.feed

        def twice(self, data, *more):
            feed(self, data, *more)
            feed(self, data, *more)

        StdoutRows.feed = twice
    elif defect == "forget":  # the last block of a batch is not kept, its rows and the cursor are
        keep = ingestor.bulk

        def forgetting(connection, table, columns, rows):
            keep(connection, table, columns, rows[:-1] if table is ingestor.BLOCKS and rows[0][2] else rows)

        ingestor.bulk = forgetting
    elif defect in {"descriptors", "threads", "memory"}:
        follow = Drainer._follow

        def leaking(self, route):
            for _ in range(8):
                if defect == "descriptors":
                    LEAKED.append(socket.socket())
                elif defect == "threads":
                    threading.Thread(target=threading.Event().wait, daemon=True).start()
                else:
                    LEAKED.append(os.urandom(32 << 20))
            return follow(self, route)

        Drainer._follow = leaking
    else:
        raise SystemExit(f"BMOE_FAULTS_PLANT={defect}: no such defect")


def main() -> int:
    """Run the command as installed."""
    faulthandler.register(signal.SIGUSR1)  # where it stands, into its log, for a play that found it stuck
    scale_timers(float(os.environ.get("BMOE_FAULTS_SCALE", "1")))
    if place := os.environ.get("BMOE_FAULTS_CLOCK"):
        set_clock(Path(place))
    if sys.argv[1] == "bmoe-agent":
        from bmoe_agent.cli import main as command
    else:
        if "collect" in sys.argv and (defect := os.environ.get("BMOE_FAULTS_PLANT")):
            plant(defect)
        from bmoe_collector.cli import main as command
    sys.argv[:] = sys.argv[1:]
    return command() or 0


if __name__ == "__main__":
    sys.exit(main())
