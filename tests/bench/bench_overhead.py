"""What a watched engine loses: its throughput with the agent at default rates against the engine alone.

`run()` gives two rows. The engine is the stand-in, computing for real on as many threads as there are cores, its output
in files either way. Runs come in blocks of three, with the agent, alone, and alone once more, their order turned from block
to block; each block gives one pair with the agent and one A/A pair. Throughput is tokens ÷ the engine's own wall times.

`ratio` is the upper end of the 95 % interval (t, over log ratios) of what is lost; of the A/A pairs it is half the
interval's width, which says what this machine can resolve. No collector and no adb run meanwhile. The pages of the model are
looked at every 3 s instead of every 10, so that no run escapes a look: it can only cost more. While the engine runs alone the
agent is stopped by SIGSTOP.

Wants a quiet machine and about ten minutes: `python tests/bench/bench_overhead.py [PAIRS [SECONDS]]`.
"""

import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

from scipy import stats
from support.agent_records import cell, client, plan, state_of
from support.agents import Agent, agent, make_engine, wait_for

PAIRS = 30
SECONDS = 3.5
LIMIT = 0.01
TOKEN_S = 0.025
LOOK_S = 0.25
SETTINGS = "burn=1,load_s=0.1,prefill_s=0.1,burn_mib={mib:.2f},copy={copies}"


def throughput(stdout: bytes) -> float:
    """Tokens a second of engine time, without the first token."""
    walls = [float(found) for found in re.findall(rb'^BMOE_PROGRESS .*?"wall_ms":([\d.]+)', stdout, re.MULTILINE)]
    return 1000 * (len(walls) - 1) / sum(walls[1:])


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """What is lost, as a share, and the ends of its 95 % interval, from ratios of throughput."""
    logs = [math.log(ratio) for ratio in ratios]
    mean = statistics.fmean(logs)
    half = float(stats.t.ppf(0.975, len(logs) - 1)) * statistics.stdev(logs) / math.sqrt(len(logs))
    return 1 - math.exp(mean), 1 - math.exp(mean + half), 1 - math.exp(mean - half)


class Arms:
    """The same engine, alone and watched; the engine's own copy of its stdout is what is measured in both."""

    def __init__(self, folder: Path, phone: Agent) -> None:
        self.phone = phone
        self.folder = folder
        self.copies = folder / "copies"
        self.copies.mkdir()
        self.flags = ["-t", str(os.cpu_count() or 1)]
        self.engine = folder / "engine"
        self.tokens = 60
        mib = 4.0
        for _ in range(3):
            mib *= self.calibrate(mib)

    def calibrate(self, mib: float) -> float:
        """Write the engine with that much work a token; by what it should be multiplied."""
        make_engine(self.folder, SETTINGS.format(mib=mib, copies=self.copies))
        return TOKEN_S * self.alone()

    def alone(self) -> float:
        """One run without the agent."""
        self._stopped(signal.SIGSTOP)
        folder = self.folder / "alone"
        folder.mkdir(exist_ok=True)
        argv = [self.engine, "-m", self.folder / "models" / "tiny.gguf", "-p", "Hello", "--csv", "metrics.csv"]
        before = set(self.copies.glob("*.stdout"))
        with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
            process = subprocess.Popen(
                [*argv, "--progress", "-n", str(self.tokens), *self.flags],
                stdout=out,
                stderr=err,
                stdin=subprocess.DEVNULL,
                cwd=folder,
            )
            while process.poll() is None:
                time.sleep(LOOK_S)
        self._stopped(signal.SIGCONT)
        if process.returncode:
            raise RuntimeError(f"the engine ended with {process.returncode}: {(folder / 'stderr').read_text()[-500:]}")
        return self._of_new(before)

    def watched(self) -> float:
        """One run as a cell of a plan."""
        asked = plan([cell("watched", n_predict=self.tokens, flags=self.flags)])
        asked.cells[0].sampling.residency_period_ms = 3000
        before, known = set(self.copies.glob("*.stdout")), set(self._statuses())
        with client(self.phone) as connected:
            reply = connected.submit(asked)
        if reply.refused:
            raise RuntimeError("; ".join(reply.refused))
        # No call disturbs the run: its end is seen by a look at a file, as often as at a process that runs alone.
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and not any(
            path.read_bytes().startswith(b"exit") for path in set(self._statuses()) - known
        ):
            time.sleep(LOOK_S)
        wait_for(lambda: state_of(self.phone, asked.plan_id) == "done", "the plan's end")
        return self._of_new(before)

    def _stopped(self, number: signal.Signals) -> None:
        if self.phone.process is not None:
            self.phone.signal(number)

    def _statuses(self) -> list[Path]:
        return list((self.phone.home / "spool").glob("*/files/status"))

    def _of_new(self, before: set[Path]) -> float:
        (made,) = set(self.copies.glob("*.stdout")) - before
        return throughput(made.read_bytes())


def measure(pairs: int = PAIRS, seconds: float = SECONDS) -> list[dict[str, Any]]:
    """Both rows, from that many blocks of runs of about so many seconds."""
    with_agent: list[float] = []
    same: list[float] = []
    loads: list[float] = []
    shortest = math.inf
    orders = list(permutations(("agent", "alone", "again")))
    with tempfile.TemporaryDirectory() as name, agent(Path(name)) as phone:
        arms = Arms(Path(name), phone)
        arms.tokens = math.ceil(1.4 * seconds * arms.alone()) + 1  # a busy machine may get faster
        phone.start()
        arms.watched()  # engine, model and flags are looked up once, before what counts
        for block in range(pairs):
            found = {kind: arms.watched() if kind == "agent" else arms.alone() for kind in orders[block % len(orders)]}
            with_agent.append(found["agent"] / found["alone"])
            same.append(found["again"] / found["alone"])
            loads.append(os.getloadavg()[0])
            shortest = min(shortest, *((arms.tokens - 1) / rate for rate in found.values()))
            print(f"block {block}: with/alone {with_agent[-1]:.4f}, A/A {same[-1]:.4f}", file=sys.stderr, flush=True)
        phone.stop()
    lost, low, high = interval(with_agent)
    nothing, nothing_low, nothing_high = interval(same)
    half = (nothing_high - nothing_low) / 2
    about = (
        f"{pairs} pairs of {shortest:.1f} s and more on {os.cpu_count()} threads, load {statistics.median(loads):.1f}"
    )
    return [
        {
            "bench": "overhead",
            "what": "throughput an engine on all cores loses under the agent, upper end of the interval",
            "ratio": high,
            "limit": LIMIT,
            "ok": high < LIMIT,
            "detail": f"{100 * lost:+.2f} % [{100 * low:+.2f}, {100 * high:+.2f}]; {about}",
        },
        {
            "bench": "overhead_aa",
            "what": "the same engine against itself, half the interval's width",
            "ratio": half,
            "limit": LIMIT,
            "ok": half < LIMIT,
            "detail": f"{100 * nothing:+.2f} % [{100 * nothing_low:+.2f}, {100 * nothing_high:+.2f}]; {about}",
        },
    ]


def run() -> list[dict[str, Any]]:
    """All rows; takes about ten minutes."""
    return measure()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    asked_pairs = int(sys.argv[1]) if len(sys.argv) > 1 else PAIRS
    for row in measure(asked_pairs, float(sys.argv[2]) if len(sys.argv) > 2 else SECONDS):
        print(row)
