"""A phone that is left alone for a night, restarted by its kernel, and drained in the morning."""

import contextlib
import json
import os
import secrets
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bmoe_proto.v1 import telemetry_pb2 as pb

from support.agent_records import client, state_of
from support.agents import Agent, wait_for
from support.host import Host

LISTS = ("evidence", "completeness", "labels", "asked", "run_ended", "argv")


def submit(phone: Agent, asked: pb.Plan) -> pb.SubmitReply:
    """Hand a plan to a serving agent, which must take it."""
    with client(phone) as connected:
        reply = connected.submit(asked)
    assert not reply.refused, list(reply.refused)
    return reply


def wait_done(phone: Agent, asked: pb.Plan, within_s: float = 90) -> str:
    """Wait for the plan's end; how it ended."""
    wait_for(lambda: state_of(phone, asked.plan_id) in {"done", "stopped", "cancelled"}, "the plan's end", within_s)
    return state_of(phone, asked.plan_id)


@contextlib.contextmanager
def restarted(phone: Agent, folder: Path) -> Iterator[None]:
    """The phone dies with everything on it and starts anew: another boot id, and clocks that begin again.

    In a time and mount namespace of its own; where those cannot be had, with a substituted boot id alone.
    """
    phone.kill()
    for pid in phone.engines():  # the launchers too: a phone that dies leaves no exit status
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    boot = folder / "boot_id"
    boot.write_text(f"00000000-0000-4000-8000-{secrets.token_hex(6)}\n")
    older_s = int(float(Path("/proc/uptime").read_text().split()[0])) - 30
    before = list(phone.prefix)
    inside = f"mount --bind {boot} /proc/sys/kernel/random/boot_id && echo up && exec sleep 100000"
    command = ["unshare", "-m", "-T", f"--boottime=-{older_s}", f"--monotonic=-{older_s}", "--fork", "--kill-child"]
    holder = subprocess.Popen([*command, "sh", "-c", inside], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert holder.stdout is not None
    try:
        if holder.stdout.readline() == b"up\n":
            child = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()[0]
            phone.prefix = [*before, "nsenter", "-t", child, "-m", "-T"]
        else:
            tree = folder / "tree"
            (tree / "proc/sys/kernel/random").mkdir(parents=True)
            (tree / "sys").mkdir()
            (tree / "tree.toml").write_text('about = "the same machine after a restart"\n')
            (tree / "proc/sys/kernel/random/boot_id").symlink_to(boot)
            (tree / "proc/meminfo").symlink_to("/proc/meminfo")
            phone.env["BMOE_AGENT_TREE"] = str(tree)
        yield
    finally:
        phone.destroy()
        phone.prefix = before
        holder.kill()
        holder.wait()
        holder.stdout.close()


class Morning:
    """What a database holds after an agent was drained into it."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.runs = [self._run(dict(row)) for row in host.rows("select * from runs order by run_no")]

    @staticmethod
    def _run(row: dict[str, Any]) -> dict[str, Any]:
        return {key: json.loads(value) if key in LISTS and value else value for key, value in row.items()}

    def of(self, cell: str, attempt: int = 1) -> dict[str, Any]:
        """The one run of a cell's attempt."""
        (found,) = [run for run in self.runs if (run["cell"], run["attempt"]) == (cell, attempt)]
        return found

    def table(self, name: str, run: dict[str, Any]) -> list[dict[str, Any]]:
        """A run's rows of a table, JSON read."""
        rows = self.host.rows(f"select * from {name} where run_no = ? order by 1, 2", run["run_no"])
        readable = {"readings", "facts", "values", "refused", "request", "decide", "error", "extra", "keys"}
        return [
            {key: json.loads(value) if key in readable and value else value for key, value in dict(row).items()}
            for row in rows
        ]

    def notes(self, run: dict[str, Any]) -> list[str]:
        """Codes of a run's notes, in order."""
        return [note["code"] for note in self.table("notes", run)]


def morning(phone: Agent, folder: Path) -> Morning:
    """Pair with the serving agent, drain it into a new database, and look."""
    host = Host(folder / "host")
    where = f"local:{phone.socket}"
    host.pair(phone, where)
    host.json("collect", "--until-drained", "--device", where)
    return Morning(host)


def told(run: dict[str, Any]) -> str:
    """All evidence of a run's outcome as one text."""
    return "\n".join(run["evidence"] or [])
