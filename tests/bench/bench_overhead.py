"""What a watched engine loses: its throughput with the agent at default rates against the engine alone.

The engine is the stand-in, computing for real on as many threads as there are cores, each kept on its own, its output in
files either way. Runs come in blocks of three, with the agent, alone, and alone once more, their order turned from block to
block. Throughput is tokens ÷ the engine's own wall times.

A shared machine gives its cores away (steal) and runs them slower while a neighbour computes beside them; both change a run
by ten times what an observer does. So they are held constant: log throughput = block + arm + a x log(engine's processor time a
token) + b x share of time stolen, by least squares over all runs. With the agent is compared with the mean of the two alone;
the A/A row compares these two. `ratio` is the upper end of the 95 % interval of what is lost; of A/A it is half the interval's
width, which says what this machine can resolve. What the plain ratios say is printed beside both, and as a row of its own
without a limit what the agent does to the processor time of a token, which the first row leaves out.

No collector and no adb run meanwhile. The pages of the model are looked at every 3 s instead of every 10, so that no run
escapes a look: it can only cost more. While the engine runs alone the agent is stopped by SIGSTOP.

Wants a machine with nothing else to do, and a quarter of a minute for each block:
`python tests/bench/bench_overhead.py [BLOCKS [SECONDS]]`.
"""

import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import permutations
from pathlib import Path
from typing import Any, Self

import numpy as np
from bmoe_proto.contract.events import Progress
from bmoe_proto.contract.stdout import parse
from scipy import stats
from support.agent_records import cell, client, plan, state_of
from support.agents import Agent, agent, make_engine, wait_for

BLOCKS = 100
SECONDS = 3.5
LIMIT = 0.01
STEAL_S = 0.1
TOKEN_S = 0.05
LOOK_S = 0.25
SETTINGS = "burn=1,pin=1,load_s=0.1,prefill_s=0.1,burn_mib={mib:.2f},copy={copies}"


class Stolen:
    """A context: how much time of its cores this machine did not get, second by second."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, float]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def share(self, began: float, ended: float) -> float:
        """Of the cores' time between two moments of `time.time()`."""
        times, stolen_s = np.array(self._seen).T
        lost = np.interp([began, ended], times, stolen_s)
        return float(lost[1] - lost[0]) / ((ended - began) * (os.cpu_count() or 1))

    def _watch(self) -> None:
        while True:
            fields = Path("/proc/stat").read_text(encoding="ascii").partition("\n")[0].split()
            self._seen.append((time.time(), int(fields[8]) / os.sysconf("SC_CLK_TCK")))
            if self._ended.wait(STEAL_S):
                return


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the engine, without its first token: tokens a second of its own wall time, its processor time for a token
    in ms, and when that was.
    """

    tokens_s: float
    cpu_ms: float
    began: float
    ended: float


def read_run(stdout: Path) -> Run:
    """What the engine's own copy of its stdout says; it ended when the copy was written last."""
    told = [event.values for event in parse(stdout.read_bytes()) if isinstance(event, Progress)][1:]
    took_s, ended = sum(token["wall_ms"] for token in told) / 1000, stdout.stat().st_mtime
    return Run(len(told) / took_s, statistics.fmean(token["cpu_ms"] for token in told), ended - took_s, ended)


Lost = tuple[float, float, float]


def interval(ratios: Sequence[float]) -> Lost:
    """What is lost, as a share, and the ends of its 95 % interval, from ratios of throughput."""
    logs = [math.log(ratio) for ratio in ratios]
    return _lost(statistics.fmean(logs), statistics.stdev(logs) / math.sqrt(len(logs)), len(logs) - 1)


def adjusted(
    blocks: Sequence[Mapping[str, Run]], of: Callable[[Run], float], *constant: Callable[[Run], float]
) -> tuple[Lost, Lost]:
    """What is lost of a quantity under the agent against both runs alone, and of one of these against the other, while other
    quantities are held constant.
    """
    design, logs = [], []
    for block in blocks:
        rows = np.array(
            [[kind == "agent", kind == "again", *(held(run) for held in constant)] for kind, run in block.items()]
        )
        found = np.log([of(run) for run in block.values()])
        design.append(rows - rows.mean(axis=0))
        logs.append(found - found.mean())
    x, y = np.concatenate(design).astype(float), np.concatenate(logs)
    degrees = len(y) - len(blocks) - x.shape[1]
    inverse = np.linalg.inv(x.T @ x)
    effects = inverse @ x.T @ y
    variance = float(np.sum((y - x @ effects) ** 2)) / degrees
    agent = np.array([1, -0.5, *(0 for _ in constant)])
    again = np.array([0, 1, *(0 for _ in constant)])
    with_agent, same = (
        _lost(float(contrast @ effects), math.sqrt(variance * float(contrast @ inverse @ contrast)), degrees)
        for contrast in (agent, again)
    )
    return with_agent, same


def _lost(mean: float, error: float, degrees: int) -> Lost:
    half = float(stats.t.ppf(0.975, degrees)) * error
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
        return TOKEN_S * self.alone().tokens_s

    def alone(self) -> Run:
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

    def watched(self) -> Run:
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

    def agent_cpu_s(self) -> float:
        """Processor time of the agent's own process so far, in seconds."""
        if self.phone.process is None:
            return 0.0
        fields = Path(f"/proc/{self.phone.process.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _stopped(self, number: signal.Signals) -> None:
        if self.phone.process is not None:
            self.phone.signal(number)

    def _statuses(self) -> list[Path]:
        return list((self.phone.home / "spool").glob("*/files/status"))

    def _of_new(self, before: set[Path]) -> Run:
        (made,) = set(self.copies.glob("*.stdout")) - before
        return read_run(made)


def measure(count: int = BLOCKS, seconds: float = SECONDS) -> list[dict[str, Any]]:
    """All rows, from that many blocks of runs of about so many seconds."""
    blocks: list[dict[str, Run]] = []
    loads: list[float] = []
    spent_s = 0.0
    orders = list(permutations(("agent", "alone", "again")))
    with tempfile.TemporaryDirectory() as name, agent(Path(name)) as phone:
        arms = Arms(Path(name), phone)
        fastest = max(arms.alone().tokens_s for _ in range(3))
        arms.tokens = math.ceil(1.2 * seconds * fastest) + 1  # a busy machine may get faster still
        phone.start()
        arms.watched()  # engine, model and flags are looked up once, before what counts
        with Stolen() as stolen:
            for block in range(count):
                found = {}
                for kind in orders[block % len(orders)]:
                    before_s = arms.agent_cpu_s()
                    found[kind] = arms.watched() if kind == "agent" else arms.alone()
                    spent_s += arms.agent_cpu_s() - before_s if kind == "agent" else 0
                blocks.append(found)
                loads.append(os.getloadavg()[0])
                told = {kind: [*astuple(run), stolen.share(run.began, run.ended)] for kind, run in found.items()}
                print(f"block {block}: {json.dumps(told)}", file=sys.stderr, flush=True)
        phone.stop()
    held = (lambda run: math.log(run.cpu_ms), lambda run: stolen.share(run.began, run.ended))
    with_agent, same = adjusted(blocks, lambda run: run.tokens_s, *held)
    of_token, _ = adjusted(blocks, lambda run: 1 / run.cpu_ms, held[1])
    lengths = [run.ended - run.began for block in blocks for run in block.values()]
    whole_s = sum(block["agent"].ended - block["agent"].began for block in blocks)
    about = (
        f"{count} blocks of runs of {min(lengths):.1f} s and more on {os.cpu_count()} threads, "
        f"load {statistics.median(loads):.1f}"
    )
    plain = {
        kind: interval([block[kind].tokens_s / block["alone"].tokens_s for block in blocks])
        for kind in ("agent", "again")
    }
    return [
        _row(
            "overhead",
            "throughput an engine on all cores loses under the agent, upper end of the interval",
            with_agent[2],
            f"{_said(with_agent)}, plain {_said(plain['agent'])}; the agent's own processor time, submitting and closing "
            f"with it: {100 * spent_s / whole_s:.2f} % of one; {about}",
        ),
        _row(
            "overhead_aa",
            "the same engine against itself, half the interval's width",
            (same[2] - same[1]) / 2,
            f"{_said(same)}, plain {_said(plain['again'])}; {about}",
        ),
        _row(
            "overhead_token",
            "more processor time for a token under the agent",
            of_token[0],
            f"{_said(of_token)}; {about}",
            limit=None,
        ),
    ]


def _said(lost: Lost) -> str:
    return "{:+.2f} % [{:+.2f}, {:+.2f}]".format(*(100 * share for share in lost))


def _row(name: str, what: str, ratio: float, detail: str, limit: float | None = LIMIT) -> dict[str, Any]:
    ok = limit is None or ratio < limit
    return {"bench": name, "what": what, "ratio": ratio, "limit": limit, "ok": ok, "detail": detail}


def run() -> list[dict[str, Any]]:
    """All rows; takes about twenty-five minutes."""
    return measure()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    asked_blocks = int(sys.argv[1]) if len(sys.argv) > 1 else BLOCKS
    for row in measure(asked_blocks, float(sys.argv[2]) if len(sys.argv) > 2 else SECONDS):
        print(row)
