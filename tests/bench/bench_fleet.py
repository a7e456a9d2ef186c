"""64 phones at once into SQLite and into Postgres: lag and the collector's CPU while all record, then a night from all of them.

One process (fleet_load.py) is 64 agents: the agent's own service, each on an abstract socket of its own, and the agent's
own spool and writer, into which a run is replayed that the real agent recorded once here with the stand-in engine: about 20
tokens a second, default samples, cells one after the other with a second between, a metrics file each. The collector is
`bmoe collect` as a process, reaching them as `local:` phones; adb is not part of this, nor is what a host samples through it.
Phones' disks are in memory, the database is on the disk and durable.

- lag: from a block being on the phone's disk to its acknowledgement coming back, which the collector sends after the commit;
  so it is a little more than the time until committed. `frames` in the detail counts from each frame's being made on the
  phone: up to 1.9 s more, in which the writer waits for the block to fill.
- CPU: of the collector's process with all its threads and children, over the same seconds. Postgres's own is in the detail.
- drain: rows of everything that a night left (blocks, tokens of both sources, samples …) over the seconds from the first
  block read on a phone until the last thing is acknowledged and the last run judged, files included; beside the same from one phone alone, before
  and after, the faster of the two. A night is NIGHT_RUNS cells of a phone, so a few minutes of it: rows a second do not depend
  on its length.

FLEET_SECONDS (600) is how long all record; FLEET_RECORDING names an agent's home with one recorded run instead of a new one.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

from bmoe_collector.host import HostHome, PairedPhone  # noqa: E402 - found through the line above
from bmoe_collector.store import schema as tables  # noqa: E402
from bmoe_collector.store.engine import open_store  # noqa: E402
from fleet_record import record  # noqa: E402
from sqlalchemy import func, select  # noqa: E402
from support.agents import wait_for  # noqa: E402
from support.postgres import Server, binaries, running  # noqa: E402

PHONES = 64
SECONDS = float(os.environ.get("FLEET_SECONDS", "600"))
NIGHT_RUNS = 6
SINGLE_RUNS = 48
SETTLE_S = 10.0
LAG_LIMIT_S, CPU_LIMIT, DRAIN_LIMIT = 2.0, 1.0, 0.5
TICKS = os.sysconf("SC_CLK_TCK")
BMOE = Path(sys.executable).with_name("bmoe")
LOAD = Path(__file__).with_name("fleet_load.py")
COUNTED = (tables.BLOCKS, *tables.DERIVED)


class Phones:
    """The load process."""

    def __init__(self, home: Path, folder: Path, store_id: str) -> None:
        argv = [sys.executable, str(LOAD), str(home), str(folder), store_id, str(PHONES)]
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.facts = self._line()

    def ask(self, what: str, **more: Any) -> Any:
        """One command, one answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": what, **more}) + "\n")
        self.process.stdin.flush()
        return self._line()

    def _line(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.communicate()


def cpu_s(*pids: int) -> float:
    """CPU seconds of processes so far, with those of children they have waited for."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += sum(int(word) for word in words[11:15])
    return total / TICKS


def family(pid: int) -> list[int]:
    """A process and its children now."""
    with contextlib.suppress(OSError):
        return [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
    return []


class Bench:
    """One database."""

    def __init__(self, folder: Path, home: Path, spools: Path, url: str, server: Server | None) -> None:
        self.url, self.folder, self.server = url, folder, server
        self.store = open_store(url)
        self.phones = Phones(home, spools, self.store.store_id)
        self.env = {
            **os.environ,
            "BMOE_HOME": str(folder / "config"),
            "XDG_DATA_HOME": str(folder / "data"),
            "BMOE_ARTIFACTS": str(folder / "artifacts"),
        }
        host = HostHome(folder / "config")
        for phone in self.phones.facts["phones"]:
            host.remember(PairedPhone(bytes.fromhex(phone["uuid"]), bytes.fromhex(phone["secret"]), phone["socket"]))
        self.rows_of_run = 0.0
        self.runs = 0
        self.detail: dict[str, Any] = {"recorded_tok_s": round(self.phones.facts["tok_s"], 2)}

    @contextlib.contextmanager
    def collector(self, phones: int) -> Iterator[subprocess.Popen[bytes]]:
        """`bmoe collect` of the first phones, ended by SIGTERM."""
        words = [f"--device=local:{phone['socket']}" for phone in self.phones.facts["phones"][:phones]]
        with (self.folder / "collect.log").open("ab") as log:
            process = subprocess.Popen(
                [str(BMOE), "collect", *words, "--db", self.url], env=self.env, stdout=log, stderr=log
            )
        try:
            yield process
            process.send_signal(signal.SIGTERM)
            if process.wait(120):
                raise RuntimeError(f"the collector ended with {process.returncode}: see {log.name}")
        finally:
            process.kill()
            process.wait()

    def drained(self, within: float) -> tuple[float, float]:
        """Wait until everything on the phones is acknowledged and all runs are judged: when that began and ended."""
        took = self.phones.ask("drained", within=within)
        if "ended" not in took:
            raise RuntimeError(f"not drained in {within:g} s: {took}; see {self.folder / 'collect.log'}")
        waited = False
        while self.unjudged():
            waited = True
            time.sleep(0.05)
        return took["began"], time.monotonic() if waited else took["ended"]

    def unjudged(self) -> bool:
        """Whether a run has no facts yet."""
        runs, facts = tables.RUNS, tables.RUN_FACTS
        query = select(runs.c.run_no).outerjoin(facts, facts.c.run_no == runs.c.run_no).where(facts.c.run_no.is_(None))
        with self.store.read() as connection:
            return connection.execute(query.limit(1)).first() is not None

    def rows(self) -> int:
        """Rows that runs have made so far."""
        with self.store.read() as connection:
            return sum(connection.execute(select(func.count()).select_from(table)).scalar() or 0 for table in COUNTED)

    def drain(self, phones: int, runs: int) -> dict[str, Any]:
        """A backlog of so many runs from each of so many phones: rows a second, and what it took."""
        made = self.phones.ask("backlog", phones=phones, runs=runs)
        self.runs += made["runs"]
        with self.collector(phones) as process:
            before = cpu_s(process.pid)
            began, ended = self.drained(900.0)
            used = cpu_s(process.pid) - before
        if not self.rows_of_run:
            self.rows_of_run = self.rows() / self.runs
        rows = round(made["runs"] * self.rows_of_run)
        seconds = ended - began
        return {
            "rows_s": round(rows / seconds),
            "rows": rows,
            "seconds": round(seconds, 1),
            "mb": round(made["bytes"] / 1e6, 1),
            "cpu_s": round(used, 1),
        }

    def steady(self) -> tuple[float, float, dict[str, Any]]:
        """Every phone records: the lag's 99th percentile in seconds, the collector's cores, and more of both."""
        self.phones.ask("live")
        with self.collector(PHONES) as process:
            wait_for(lambda: self.phones.ask("connected") == PHONES, "64 phones connected")
            time.sleep(SETTLE_S)
            others = family(self.server.process.pid) if self.server is not None else []
            pids = ([process.pid], [self.phones.process.pid], others)
            began, before = time.monotonic(), [cpu_s(*each) for each in pids]
            lags = self.phones.ask("measure", seconds=SECONDS)
            took = time.monotonic() - began
            cores = [round((cpu_s(*each) - spent) / took, 3) for each, spent in zip(pids, before, strict=True)]
            status = dict(
                line.split(":", 1)
                for line in Path(f"/proc/{process.pid}/status").read_text().splitlines()
                if ":" in line
            )
            self.phones.ask("rest")
            self.drained(120.0)
        return (
            lags["blocks"]["p99"],
            cores[0],
            {
                "seconds": round(took, 1),
                "load_cores": cores[1],
                "postgres_cores": cores[2] if others else None,
                "rss_mib": int(status["VmRSS"].split()[0]) // 1024,
                "threads": int(status["Threads"]),
                "waiting_kb": round(lags["waiting_bytes"] / 1e3),
                **{name: lags[name] for name in ("blocks", "frames", "slips")},
            },
        )

    def whole(self) -> dict[str, int]:
        """What is stored that is not as it should be; nothing when all is well."""
        runs = tables.RUNS
        with self.store.read() as connection:
            stored, whole, tokens = connection.execute(
                select(func.count(), func.sum(runs.c.complete.cast(tables.Integer)), func.sum(runs.c.n_tokens))
            ).one()
        tokens_due = stored * self.phones.facts["tokens"]
        found = {"runs": stored, "not_whole": stored - int(whole or 0), "tokens_missing": tokens_due - int(tokens or 0)}
        return found if found["not_whole"] or found["tokens_missing"] else {}

    def close(self) -> None:
        """End what was started."""
        self.phones.close()
        self.store.close()


def measure(bench: Bench, name: str) -> list[dict[str, Any]]:
    """The rows of one database."""
    alone = [bench.drain(1, SINGLE_RUNS)]
    lag_s, cores, more = bench.steady()
    night = bench.drain(PHONES, NIGHT_RUNS)
    alone.append(bench.drain(1, SINGLE_RUNS))
    wrong = bench.whole()
    share = night["rows_s"] / max(each["rows_s"] for each in alone)

    def row(what: str, ratio: float, limit: float, ok: bool, detail: dict[str, Any]) -> dict[str, Any]:
        found = {**detail, **({"wrong": wrong} if wrong else {})}
        return {
            "bench": "fleet",
            "what": f"{what}, {name}",
            "ratio": round(ratio, 3),
            "limit": limit,
            "ok": ok and not wrong,
            "detail": found,
        }

    return [
        row(
            f"{PHONES} phones recording: seconds of lag, 99th percentile", lag_s, LAG_LIMIT_S, lag_s < LAG_LIMIT_S, more
        ),
        row("cores the collector takes meanwhile", cores, CPU_LIMIT, cores < CPU_LIMIT, bench.detail),
        row(
            f"a night from {PHONES} phones: rows a second, share of one phone's",
            share,
            DRAIN_LIMIT,
            share >= DRAIN_LIMIT,
            {"night": night, "alone": alone},
        ),
    ]


def run() -> list[dict[str, Any]]:
    """All rows."""
    results: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR"))))
        named = os.environ.get("FLEET_RECORDING")
        home = Path(named) if named else record(folder / "recorded")
        results += _one(folder / "sqlite", home, f"sqlite:///{folder}/sqlite/runs.db", None, "SQLite")
        if binaries() is None:
            print("no PostgreSQL server here: apt-get install postgresql", file=sys.stderr)
            return results
        server = stack.enter_context(running(durable=True))
        results += _one(folder / "postgres", home, server.url(server.new_database()), server, "Postgres")
    return results


def _one(folder: Path, home: Path, url: str, server: Server | None, name: str) -> list[dict[str, Any]]:
    folder.mkdir()
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as spools:
        bench = Bench(folder, home, Path(spools), url, server)
        try:
            return measure(bench, name)
        finally:
            bench.close()


def main() -> None:
    """Print a line of JSON for each result."""
    for result in run():
        print(json.dumps(result))


if __name__ == "__main__":
    main()
