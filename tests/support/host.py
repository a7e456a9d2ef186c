"""The host's side in tests: `bmoe` as the process it is, and what a database holds against what engines wrote."""

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bmoe_proto import framing
from bmoe_proto.v1 import telemetry_pb2 as pb

from support.agents import Agent, wait_for
from support.phones import Shelf

BMOE = Path(sys.executable).parent / "bmoe"


class Host:
    """One host: config, data and database of its own, in the environment given."""

    def __init__(self, folder: Path, env: dict[str, str] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.db = folder / "runs.db"
        self.env = {
            **os.environ,
            **(env or {}),
            "BMOE_HOME": str(folder / "config"),
            "BMOE_DB": str(self.db),
            "XDG_DATA_HOME": str(folder / "data"),
            "BMOE_ARTIFACTS": "",
        }

    def bmoe(
        self, *arguments: str, stdin: str = "", code: int | None = 0, timeout_s: float = 100
    ) -> subprocess.CompletedProcess[str]:
        """Run one command; its exit code must be `code` unless that is None."""
        done = subprocess.run(
            [str(BMOE), *arguments],
            env=self.env,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert code is None or done.returncode == code, (
            f"bmoe {arguments}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
        return done

    def json(self, *arguments: str, stdin: str = "", code: int | None = 0, timeout_s: float = 100) -> Any:
        """The one JSON document a command prints."""
        at = arguments.index("--") if "--" in arguments else len(arguments)
        words = [*arguments[:at], "--json", *arguments[at:]]
        return json.loads(self.bmoe(*words, stdin=stdin, code=code, timeout_s=timeout_s).stdout)

    def pair(self, agent: Agent, where: str) -> None:
        self.bmoe("pair", where, "--take-over", stdin=agent.secret_hex + "\n")

    @contextlib.contextmanager
    def background(self, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
        """A command that goes on meanwhile; SIGKILLed at the end if it still runs."""
        with (self.folder / "background.log").open("ab") as log:
            process = subprocess.Popen([str(BMOE), *arguments], env=self.env, stdout=log, stderr=log)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()

    def log(self) -> str:
        path = self.folder / "background.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def rows(self, query: str, *values: Any) -> list[sqlite3.Row]:
        with contextlib.closing(sqlite3.connect(self.db, timeout=60)) as connection:
            connection.row_factory = sqlite3.Row
            return connection.execute(query, values).fetchall()


def wait_for_frames(host: Host, frames: int, runs: int = 1) -> None:
    """Return when so many frames are committed, of so many runs."""

    def enough() -> bool:
        with contextlib.suppress(sqlite3.OperationalError):  # not migrated yet
            row = host.rows("select coalesce(sum(frames), 0) n, count(distinct run_no) r from blocks")[0]
            return row["n"] >= frames and row["r"] >= runs
        return False

    wait_for(enough, f"{frames} frames of {runs} runs in the database")


def stored_stdout(host: Host) -> dict[str, bytes]:
    """Stdout of every run, joined from the raw blocks as they came, by run id; frames must come once each."""
    found: dict[str, bytes] = {}
    seen: set[tuple[str, bytes, int]] = set()
    pieces: dict[str, list[pb.Output]] = {}
    query = (
        "select r.run_id, b.data from blocks b join runs r using (run_no) "
        "join segments s on s.run_no = b.run_no and s.segment = b.segment order by b.run_no, s.place, b.offset"
    )
    for row in host.rows(query):
        for block in framing.scan(bytes(row["data"])):
            for data in block.frames():
                frame = pb.Frame.FromString(data)
                key = (row["run_id"], frame.segment, frame.seq)
                assert key not in seen, f"frame {frame.seq} twice"
                seen.add(key)
                if frame.WhichOneof("what") == "output" and frame.output.stream == pb.STREAM_STDOUT:
                    pieces.setdefault(row["run_id"], []).append(frame.output)
    for run_id, outputs in pieces.items():
        joined = b""
        for output in sorted(outputs, key=lambda item: item.offset):
            assert output.offset == len(joined), f"run {run_id}: stdout has a hole or an overlap at {len(joined)}"
            joined += output.data
        found[run_id] = joined
    return found


def check_against_copies(host: Host, copies: list[Path]) -> None:
    """The database holds exactly what the engines wrote: nothing missing, nothing twice, every run whole."""
    written = Counter(path.read_bytes() for folder in copies for path in folder.glob("*.stdout"))
    stored = stored_stdout(host)
    kept = Counter(stored.values())
    assert kept == written, (
        f"stdout differs: stored {sorted(map(len, kept))} bytes, written {sorted(map(len, written))} bytes"
    )
    for row in host.rows("select * from runs"):
        assert row["ended"], f"run {row['run_id']} has no end"
        assert row["complete"], f"run {row['run_id']}: {row['completeness']}"
        lines = stored.get(row["run_id"], b"").count(b"BMOE_PROGRESS ")
        counted = host.rows("select count(*) n from tokens_stdout where run_no = ?", row["run_no"])[0]["n"]
        assert counted == lines, f"run {row['run_id']}: {counted} token rows of {lines} lines"
    waiting = host.rows("select name, state from artifacts where state = 'awaited'")
    assert not waiting, [tuple(row) for row in waiting]


def check_no_forwards(shelf: Shelf) -> None:
    assert shelf.server.adb("forward", "--list").strip() == ""


def terminate(process: subprocess.Popen[bytes], within_s: float = 60) -> int:
    process.send_signal(signal.SIGTERM)
    return process.wait(within_s)
