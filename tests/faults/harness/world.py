"""The parts of a play as the processes they are, each of which can be taken away and brought back.

In: a schedule and a folder. Out: phones (adbd, agent, a link), an adb server, a paired host with a collector, a database.
What ends by itself is started again after a moment, as a service manager does, and noted: `unasked` says which and why.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from faults.harness.database import Database, PostgresDatabase, SqliteDatabase, mount_memory
from faults.harness.schedule import TOK_S, Schedule
from faults.harness.typed import Typed
from faults.harness.wifi import Wifi
from support.adb import AdbServer, free_even_port
from support.agents import wait_for
from support.host import Host
from support.phones import Phone, Shelf

ENTRY = Path(__file__).with_name("entry.py")
SMALL_MIB = 40
FREEZER = Path("/sys/fs/cgroup/freezer")
RESTART_S = 0.5


class FaultPhone(Phone):
    """A phone of the play."""

    def __init__(self, folder: Path, number: int, server: AdbServer, scale: float, wifi: bool, small: bool) -> None:
        super().__init__(folder, number, f"tok_s={TOK_S},load_s=0.1,prefill_s=0.1", server)
        self.number = number
        self.small = small and mount_memory(self.agent.home, SMALL_MIB)
        self.clock = folder / "clock"
        self.agent.env |= {"BMOE_FAULTS_SCALE": str(scale), "BMOE_FAULTS_CLOCK": str(self.clock)}
        self.agent.program = [sys.executable, str(ENTRY), "bmoe-agent"]
        address = (self.namespace.there if self.namespace else "127.0.0.1", self.port)
        self.wifi: Wifi | None = None
        if wifi:
            self.wifi = Wifi(address, free_even_port())
            self.serial = f"127.0.0.1:{self.wifi.port}"
        self.own_prefix = list(self.agent.prefix)
        self.boots: list[subprocess.Popen[bytes]] = []
        self.harmed: dict[str, set[str]] = {}  # runs that may have lost a part of their record, and to which faults
        self.full_until = -math.inf  # monotonic; an agent may find no room to start in
        self.agent_wanted = True
        self.group: Path | None = None
        self.thawed: list[Path] = []

    def connected(self) -> bool:
        """Whether anybody has a connection to its agent."""
        if self.agent.process is None:
            return False
        table = Path(f"/proc/{self.agent.process.pid}/net/unix").read_text().splitlines()
        return any(line.split()[5] == "03" for line in table if line.endswith(f" @{self.agent.socket}"))

    def kill_all(self) -> None:
        """Everything on the phone is gone at once, launchers first so that no exit status is left."""
        self.agent.kill()
        for pid in self.agent.engines():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.kill_adbd()

    def boot(self) -> None:
        """A new boot id and a boot clock that begins again, for what is started from now on."""
        boot_id = self.folder / f"boot-{len(self.boots)}"
        boot_id.write_text(f"00000000-0000-4000-8000-{secrets.token_hex(6)}\n")
        older_s = int(float(Path("/proc/uptime").read_text().split()[0])) - 30
        inside = f"mount --bind {boot_id} /proc/sys/kernel/random/boot_id && echo up && exec sleep 100000"
        command = ["unshare", "-m", "-T", f"--boottime=-{older_s}", f"--monotonic=-{older_s}", "--fork", "--kill-child"]
        holder = subprocess.Popen([*command, "sh", "-c", inside], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self.boots.append(holder)
        assert holder.stdout is not None
        if holder.stdout.readline() == b"up\n":
            child = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()[0]
            self.agent.prefix = [*self.own_prefix, "nsenter", "-t", child, "-m", "-T"]

    def freeze(self, on: bool) -> None:
        """Everything on the phone stands still: the freezer where there is one, else SIGSTOP."""
        pids = [*self.agent.engines(), *(each.pid for each in (self.agent.process, self.adbd) if each is not None)]
        if on and os.access(FREEZER, os.W_OK) and (FREEZER / "freezer.state").parent.is_dir() and os.geteuid() == 0:
            self.group = FREEZER / f"bmoe-{secrets.token_hex(4)}"
            self.group.mkdir()
            for pid in pids:
                with contextlib.suppress(OSError):
                    (self.group / "cgroup.procs").write_text(str(pid))
            (self.group / "freezer.state").write_text("FROZEN")
        elif self.group is not None:
            group, self.group = self.group, None
            (group / "freezer.state").write_text("THAWED")
            self.thawed.append(group)
            self._leave_groups()
        else:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP if on else signal.SIGCONT)

    def _leave_groups(self) -> None:
        """Give back the groups that nothing is in any more: a process that ends is in its own until it has ended."""
        for group in list(self.thawed):
            for line in (group / "cgroup.procs").read_text().split():
                with contextlib.suppress(OSError):
                    (FREEZER / "cgroup.procs").write_text(line)
            with contextlib.suppress(OSError):
                group.rmdir()
                self.thawed.remove(group)

    def newest_segment(self) -> Path | None:
        """The segment file that was written last."""
        found = list((self.agent.home / "spool").glob("*/*.seg"))
        return max(found, key=lambda path: path.stat().st_mtime_ns) if found else None

    def harm(self, run_id: str, fault: str) -> None:
        """Note that a run may have lost something."""
        self.harmed.setdefault(run_id, set()).add(fault)

    def harm_all(self, fault: str) -> None:
        """The same of every run that the phone keeps now."""
        for path in (self.agent.home / "spool").glob("?" * 32):
            self.harm(path.name, fault)

    def destroy(self) -> None:
        if self.group is not None:
            self.freeze(False)
        for pid in self.agent.engines():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        super().destroy()
        with contextlib.suppress(AssertionError):
            wait_for(lambda: self._leave_groups() or not self.thawed, "", 5)
        for holder in self.boots:
            holder.kill()
            holder.wait()
            if holder.stdout is not None:
                holder.stdout.close()
        if self.wifi is not None:
            self.wifi.close()
        if self.small:
            subprocess.run(["umount", "-l", str(self.agent.home)], check=False, capture_output=True, timeout=30)


class World:
    """All of it; `close` leaves nothing."""

    def __init__(self, folder: Path, schedule: Schedule, plant: str = "") -> None:
        self.folder = folder
        self.schedule = schedule
        self.unasked: list[str] = []
        self.collector: subprocess.Popen[bytes] | None = None
        self.collector_wanted = False
        self.second: subprocess.Popen[bytes] | None = None
        self.typed: Typed | None = None
        self.database_harmed_from = self.database_harmed_until = -math.inf
        self._collector_from = 0.0
        self.clock = folder / "host-clock"
        self._down_since: dict[str, float] = {}
        self._plant = plant
        self.shelf = Shelf(folder)
        self.server = self.shelf.server
        self.shelf.runtime.mkdir(mode=0o700)
        self.phones: list[FaultPhone] = []
        self.database: Database = PostgresDatabase() if schedule.database == "postgresql" else SqliteDatabase(folder)
        try:
            self.server.start()
            self.host = Host(folder / "host", self.shelf.env)
            self.artifacts = folder / "artifacts"
            self.host.env |= {"BMOE_DB": self.database.url, "BMOE_ARTIFACTS": str(self.artifacts)}
            self.host.env |= {"BMOE_FAULTS_SCALE": str(schedule.scale)}
            self.typed = Typed(self.host.env, folder / "typed.log")
            for number in range(schedule.phones):
                wifi, small = number in schedule.wifi, number in schedule.small
                phone = FaultPhone(folder / f"phone{number}", number, self.server, schedule.scale, wifi, small)
                self.phones.append(phone)
                self.shelf.phones.append(phone)
                phone.start_adbd()
                phone.agent.start()
                phone.connect()
            for phone in self.phones:
                self.typed("pair", phone.serial, stdin=phone.agent.secret_hex + "\n")
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        """Start the collector, to be kept running."""
        self.collector = self.start_collector()
        self._collector_from = time.monotonic()
        self.collector_wanted = True

    def _could_not_start(self) -> bool:
        """Whether the collector that ended had found no database; one that had begun its work goes on without."""
        began = self._collector_from
        return self.database_harmed_from - 10 < began < self.database_harmed_until + 5

    def start_collector(self) -> subprocess.Popen[bytes]:
        """`bmoe collect`, its timers scaled."""
        scale = self.schedule.scale
        silence, lease = max(12 * scale, 1.5), max(20 * scale, 3)
        command = [sys.executable, str(ENTRY), "bmoe", "collect", "--silence", f"{silence}", "--lease", f"{lease}"]
        env = {**self.host.env, "BMOE_FAULTS_PLANT": self._plant, "BMOE_FAULTS_CLOCK": str(self.clock)}
        with (self.folder / "collector.log").open("ab") as log:
            return subprocess.Popen([*command, "--log", "json"], env=env, stdout=log, stderr=log)

    def server_pids(self) -> list[int]:
        """The adb server on our port: our child, or one that a client started since."""
        mark = f"tcp:localhost:{self.server.port}".encode()
        other = f"tcp:{self.server.port}".encode()
        found = []
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                with contextlib.suppress(OSError):
                    words = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
                    if b"server" in b" ".join(words) and (mark in words or other in words):
                        found.append(int(entry))
        return found

    def tend(self) -> None:
        """Start again what ended by itself."""
        if self.collector_wanted and self.collector is not None and self.collector.poll() is not None:
            code = self.collector.returncode
            if not self._could_not_start() and "collector" not in self._down_since:
                self.unasked.append(f"the collector ended by itself with {code}: {self.log_tail()}")
            if self._again("collector"):
                self.start()
        for phone in self.phones:
            process, name = phone.agent.process, f"agent {phone.number}"
            if phone.agent_wanted and process is not None and process.poll() is not None:
                if name not in self._down_since and time.monotonic() > phone.full_until:
                    text = phone.agent.log_text()[-600:]
                    self.unasked.append(f"the agent of phone {phone.number} ended with {process.returncode}: {text}")
                if self._again(name):
                    phone.agent.launch()

    def _again(self, name: str) -> bool:
        since = self._down_since.setdefault(name, time.monotonic())
        if time.monotonic() - since < RESTART_S:
            return False
        del self._down_since[name]
        return True

    def stacks(self) -> None:
        """Have the collector and the agents write where they stand into their logs."""
        for process in (self.collector, *(phone.agent.process for phone in self.phones)):
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGUSR1)
        time.sleep(0.5)

    def log_tail(self) -> str:
        """What the collectors said last."""
        with contextlib.suppress(OSError):
            return (self.folder / "collector.log").read_text(errors="replace")[-800:]
        return ""

    def processes(self) -> list[str]:
        """Command lines of everything that runs for this play; servers of the play's own and boots are not counted."""
        mark = os.fsencode(str(self.folder) + "/")
        found = []
        for entry in os.listdir("/proc"):
            if entry.isdigit() and int(entry) != os.getpid():
                with contextlib.suppress(OSError):
                    words = Path(f"/proc/{entry}/cmdline").read_bytes()
                    inside = os.readlink(f"/proc/{entry}/cwd").startswith(os.fsdecode(mark))
                    if words.startswith(b"unshare") or b"exec sleep 100000" in words:
                        continue
                    if (inside and b"adbd" not in words and b"libadb" not in words) or mark in words:
                        found.append(f"{entry}: {words.replace(bytes(1), b' ').decode(errors='replace')[:160]}")
        return found

    def close(self) -> None:
        """End everything and give back what was mounted."""
        self.collector_wanted = False
        if self.typed is not None:
            self.typed.close()
        for process in (self.collector, self.second):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()
        for pid in self.server_pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        for phone in self.phones:
            if phone.adbd is not None:
                with contextlib.suppress(ProcessLookupError):
                    phone.adbd.send_signal(signal.SIGCONT)
        self.shelf.destroy()
        for pid in self.server_pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.database.close()


def drop_folder(folder: Path) -> None:
    """Remove what a play left on disk."""
    shutil.rmtree(folder, ignore_errors=True)
