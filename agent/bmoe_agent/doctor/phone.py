"""What Android may do to the agent at night, as far as an app can see it.

In: the roots, Android's properties, the agent's home. Out: checks. An app may not read most of these settings: then the answer is
`unknown` with the command all the same, and `bmoe doctor` on the host, which asks through adb, can tell.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from bmoe_proto import android
from bmoe_proto.kernel_proc import status
from bmoe_proto.kernel_sys import POLICIES, cpu_list

from bmoe_agent.doctor.check import FAIL, OK, UNKNOWN, WARN, Check, Looker
from bmoe_agent.roots import Roots

_ASK_S = 8.0
HOST = "ask from the host: bmoe doctor"


def ask(argv: list[str]) -> str | None:
    """What a command of Android's printed; None where it is not there, refuses or does not answer."""
    program = shutil.which(argv[0]) or f"/system/bin/{argv[0]}"
    try:
        ran = subprocess.run(
            [program, *argv[1:]], capture_output=True, stdin=subprocess.DEVNULL, timeout=_ASK_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    text = ran.stdout.decode("utf-8", "replace").strip()
    if ran.returncode or not text or "\n" in text or " " in text:
        return None  # a setting is one word; anything else is a refusal in words
    return text


@dataclass(frozen=True, slots=True)
class Phone:
    """Where to look."""

    roots: Roots
    properties: Mapping[str, str]
    home: Path
    ask: Callable[[list[str]], str | None] = ask

    @property
    def sdk(self) -> int | None:
        """The API level, asked and not taken from a build constant; None when this is no Android."""
        text = self.properties.get("ro.build.version.sdk", "")
        return int(text) if text.isdigit() else None

    def lookers(self) -> list[tuple[str, Looker]]:
        """All checks of this module."""
        return [
            ("android", self.version),
            ("phantom_processes", self.phantom),
            ("battery_exemption", self.battery),
            ("wake_lock", self.wake_lock),
            ("freezer", self.freezer),
            ("fast_cores", self.fast_cores),
            ("service", self.service),
            ("boot", self.boot),
        ]

    def version(self) -> Iterator[Check]:
        """Which Android this is."""
        if self.sdk is None:
            yield Check("android", UNKNOWN, "no Android: checks of its switches do not apply")
        else:
            model = self.properties.get("ro.product.model", "unknown model")
            yield Check("android", OK, f"Android {android.release_of(self.sdk)} (API {self.sdk}), {model}")

    def settings(self) -> dict[str, str]:
        """What of Android's settings this app may read, by the names of `bmoe_proto.android`."""
        found = {
            name: self.properties[name]
            for name in (android.MONITOR_PROPERTY, android.FREEZER_PROPERTY)
            if name in self.properties
        }
        if self.roots.substituted:
            return found
        for name in (android.MONITOR, android.FREEZER):
            if (value := self.ask(["settings", "get", "global", name])) is not None:
                found[name] = value
        asked = {
            "max_phantom_processes": ["device_config", "get", "activity_manager", "max_phantom_processes"],
            "use_freezer": ["device_config", "get", "activity_manager_native_boot", "use_freezer"],
            "sync_disabled": ["device_config", "get_sync_disabled_for_tests"],
        }
        for name, argv in asked.items():
            if (value := self.ask(argv)) is not None:
                found[name] = value
        return found

    def phantom(self) -> Iterator[Check]:
        """Whether Android ends child processes: the engine is one."""
        if self.sdk is None:
            return
        state, seen = android.phantom_state(self.sdk, self.settings())
        fix = [] if state == OK else android.phantom_fix(self.sdk)
        yield Check("phantom_processes", state, seen, [*fix, HOST] if state == UNKNOWN else fix)

    def battery(self) -> Iterator[Check]:
        """Whether Termux is exempt from battery optimisation: no app may ask that of another process' service."""
        if self.sdk is None:
            return
        seen = "an app may not ask `dumpsys deviceidle`"
        yield Check("battery_exemption", UNKNOWN, seen, [*android.battery_fix(), HOST])

    def wake_lock(self) -> Iterator[Check]:
        """Whether the lock that keeps the CPU from sleeping can be taken."""
        if shutil.which("termux-wake-lock") is not None:
            seen = "termux-wake-lock is there; the agent holds it while a plan runs (it prevents neither freezing nor killing)"
            yield Check("wake_lock", OK, seen)
        elif self.sdk is not None:
            yield Check("wake_lock", FAIL, "termux-wake-lock is not there", ["pkg install termux-tools"])
        else:
            yield Check("wake_lock", UNKNOWN, "no Termux here")

    def freezer(self) -> Iterator[Check]:
        """Whether Android freezes apps in the background."""
        if self.sdk is None:
            return
        state, seen = android.freezer_state(self.sdk, self.settings())
        own = self.roots.text("proc/self/cgroup") or ""
        group = next((line.partition("::")[2] for line in own.splitlines() if line.startswith("0::")), "")
        frozen = self.roots.text(f"sys/fs/cgroup{group}/cgroup.freeze") if group else None
        if frozen is not None:
            seen += f"; this process' group can be frozen (cgroup.freeze={frozen})"
        fix = [] if state == OK else android.freezer_fix(self.sdk)
        yield Check("freezer", state, seen, [*fix, HOST] if state == UNKNOWN else fix)

    def fast_cores(self) -> Iterator[Check]:
        """Whether this process, and the agent that serves, may run on the fastest cluster."""
        fastest = _fastest(self.roots)
        if not fastest:
            yield Check("fast_cores", UNKNOWN, "no cpufreq domain says how fast its CPUs can be")
            return
        who = {"this process": "self"}
        if (serving := _serving(self.home)) is not None and not self.roots.substituted:
            who["the agent"] = str(serving)
        for name, pid in who.items():
            allowed_text = status(self.roots.text(f"proc/{pid}/status") or "").get("cpus_allowed")
            group = self.roots.text(f"proc/{pid}/cpuset") or "cpuset not readable"
            if not isinstance(allowed_text, str):
                yield Check("fast_cores", UNKNOWN, f"{name}: allowed CPUs cannot be read")
                continue
            missing = sorted(fastest - cpu_list(allowed_text))
            seen = f"{name} may run on CPUs {allowed_text} ({group}); the fastest are {_said(fastest)}"
            if missing:
                yield Check(
                    "fast_cores",
                    FAIL,
                    f"{seen}: runs measured so are contaminated",
                    [
                        "keep Termux in front with the screen on, or exempt it: " + android.battery_fix()[0],
                        *android.bucket_fix(),
                    ],
                )
            else:
                yield Check("fast_cores", OK, seen)

    def service(self) -> Iterator[Check]:
        """Whether something starts the agent again after it was killed."""
        prefix = os.environ.get("PREFIX", "")
        run = Path(prefix) / "var/service/bmoe-agent/run"
        if not prefix and self.sdk is None:
            yield Check("service", UNKNOWN, "no Termux here")
        elif not run.exists():
            yield Check("service", WARN, "no runit service: an agent that is killed stays away", ["bmoe-agent-setup"])
        elif (run.parent / "down").exists():
            yield Check("service", WARN, f"{run.parent} is switched off", ["sv-enable bmoe-agent"])
        elif _serving(self.home) is None:
            yield Check("service", WARN, "installed, but no agent serves this home now", ["sv up bmoe-agent"])
        else:
            yield Check("service", OK, f"{run.parent}; the agent serves")

    def boot(self) -> Iterator[Check]:
        """Whether the agent comes back after the phone restarts."""
        if self.sdk is None:
            return
        script = Path.home() / ".termux/boot/bmoe-agent"
        app = "the Termux:Boot app must be installed and opened once; an app may not see whether it is"
        if script.exists():
            yield Check("boot", OK, f"{script}; {app}")
        else:
            yield Check("boot", WARN, f"no {script}; {app}", ["bmoe-agent-setup"])


def _fastest(roots: Roots) -> set[int]:
    """CPUs of the domains with the highest clock, by the text of cpufreq alone."""
    by_khz: dict[int, set[int]] = {}
    for policy in roots.names(POLICIES):
        khz = roots.text(f"{POLICIES}/{policy}/cpuinfo_max_freq") or ""
        related = roots.text(f"{POLICIES}/{policy}/related_cpus") or policy.removeprefix("policy")
        if khz.isdigit():
            by_khz.setdefault(int(khz), set()).update(cpu_list(related))
    return by_khz[max(by_khz)] if by_khz else set()


def _serving(home: Path) -> int | None:
    """The process that holds this home's lock, from /proc/locks or by its working name; None when none does."""
    lock = home / "lock"
    try:
        inode = os.stat(lock).st_ino
        locks = Path("/proc/locks").read_text(encoding="ascii", errors="replace")
    except OSError:
        return _by_socket(home)
    for line in locks.splitlines():
        words = line.split()
        if len(words) >= 6 and words[1] == "FLOCK" and words[5].endswith(f":{inode}") and words[4].isdigit():
            return int(words[4])
    return None


def _by_socket(home: Path) -> int | None:
    """A process of ours whose argv is this agent's `serve`: where /proc/locks is hidden, as from apps."""
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            argv = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
            environment = Path(f"/proc/{name}/environ").read_bytes()
        except OSError:
            continue
        if b"serve" not in argv or not any(part.endswith(b"bmoe-agent") for part in argv):
            continue
        named = [part for part in environment.split(b"\0") if part.startswith(b"BMOE_AGENT_HOME=")]
        default = str(home) == str(Path("~/.bmoe-agent").expanduser())
        if os.fsencode(f"BMOE_AGENT_HOME={home}") in named or (not named and default) or os.fsencode(home) in argv:
            return int(name)
    return None


def _said(cpus: set[int]) -> str:
    return ",".join(map(str, sorted(cpus)))
