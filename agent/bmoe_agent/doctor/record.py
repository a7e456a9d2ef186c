"""A record of this phone's readable nodes that can stand in for it: `bmoe-agent doctor --record FILE`.

In: the roots, the agent's home. Out: one tree file (`bmoe_agent/roots.py` says its form), which `roots.lay` unfolds into a substituted
tree. Besides what a tree needs it holds, for people and tests:

    [versions]      Python, grpcio, protobuf and how it is implemented, the agent
    [settings]      what this uid could see of the phantom-process and freezer switches; "refused" where it could not
    [permissions]   "proc/stat" = "0444 root root": mode and owner of nodes, readable or not

A child process of ours is recorded as process 4242, as engines are in the trees of the tests. Personal details are replaced: what this
phone, its network, its user and its owner are called, serial numbers, addresses of hardware and networks, mail addresses and
paths of files. Only properties that say what hardware and system this is are taken.
"""

from __future__ import annotations

import errno
import os
import platform
import pwd
import re
import socket
import stat
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from bmoe_proto import android

from bmoe_agent import device
from bmoe_agent.doctor.phone import Phone
from bmoe_agent.roots import Roots, dump
from bmoe_agent.sampling import nodes

CHILD = 4242
_OF_PROCESS = ("status", "stat", "io", "schedstat", "cpuset", "cgroup", "oom_score", "oom_score_adj", "smaps_rollup")
_ALONE = (
    "proc/version", "proc/cpuinfo", "proc/meminfo", "proc/stat", "proc/vmstat", "proc/loadavg", "proc/uptime",
    "proc/zoneinfo", "proc/diskstats", "proc/swaps", "proc/locks", "proc/pressure/cpu", "proc/pressure/memory",
    "proc/pressure/io", "proc/self/status", "proc/self/cgroup", "proc/self/cpuset", "proc/self/limits", "proc/self/mountinfo",
    "proc/sys/vm/swappiness", "proc/sys/vm/page-cluster", "proc/sys/vm/overcommit_memory",
    "sys/devices/system/cpu/present", "sys/devices/system/cpu/online", "sys/devices/system/cpu/possible",
    "sys/kernel/mm/transparent_hugepage/enabled", "sys/kernel/mm/lru_gen/enabled",
)  # fmt: skip
_GLOBS = (
    ("sys/devices/system/cpu", re.compile(r"cpu\d+"), ("topology/physical_package_id", "cpu_capacity")),
    ("sys/devices/system/cpu/cpufreq", re.compile(r"policy\d+"),
     ("related_cpus", "cpuinfo_min_freq", "cpuinfo_max_freq", "scaling_min_freq", "scaling_max_freq", "scaling_cur_freq",
      "scaling_governor")),
    ("sys/class/thermal", re.compile(r"thermal_zone\d+"), ("type", "temp")),
    ("sys/class/thermal", re.compile(r"cooling_device\d+"), ("type", "cur_state", "max_state")),
    ("sys/class/power_supply", re.compile(r".+"),
     ("type", "capacity", "temp", "status", "current_now", "voltage_now", "online")),
    ("sys/block", re.compile(r"zram\d+|sd[a-z]|mmcblk\d+"),
     ("mm_stat", "queue/scheduler", "queue/read_ahead_kb", "queue/rotational", "queue/nr_requests")),
)  # fmt: skip
_TEXT_LIMIT = 256 << 10
_PERSONAL_PROPERTY = re.compile(
    r"serial|imei|meid|iccid|mac|addr|hostname|account|phone|operator|gsm\.|persist\.(?!sys\.fflag)"
)
_PATTERNS = (
    (re.compile(r"\b(?:[0-9A-Fa-f]{2}[:-]){5}[0-9A-Fa-f]{2}\b"), "00:00:00:00:00:00"),
    (re.compile(r"\b(?!0\.0\.0\.0)\d{1,3}(?:\.\d{1,3}){3}\b"), "0.0.0.0"),  # noqa: S104 - a replacement, not a bind
    (re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)*"), "someone@somewhere"),
    (re.compile(r"(?im)^(serial\s*:\s*).*$"), r"\g<1>0"),
    (re.compile(r"\b[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}\b"), "00000000-0000-0000-0000-000000000000"),
    (re.compile(r"\b[0-9A-F]{4}-[0-9A-F]{4}\b"), "0000-0000"),  # what a memory card is called
    (re.compile(r"/(?:storage|mnt/media_rw|mnt/runtime/\w+|mnt/user/\d+)/(?!emulated|self)[^\s/]+"), "/storage/volume"),
    (re.compile(r"(?<!\w)/(?:home|Users)/[^\s/]+"), "/home/user"),
    (re.compile(r"/data/(?:app|data|user/\d+|user_de/\d+|media/\d+)/(?!com\.termux)[^\s/]+"), "/data/data/app"),
    (re.compile(r"\bu\d+_a\d+\b"), "u0_a100"),
)


class Anonymous:
    """Replaces personal details in text; what this phone and its user are called is asked once."""

    def __init__(self, secrets: Iterable[str]) -> None:
        words = {word for word in secrets if len(word) >= 3}
        self._words = sorted(words, key=len, reverse=True)

    @classmethod
    def of_here(cls, home: Path, properties: Mapping[str, str]) -> Anonymous:
        """Names, serials and paths of this machine."""
        words = [socket.gethostname(), str(home), str(Path.home()), os.environ.get("USER", "")]
        try:
            words.append(pwd.getpwuid(os.getuid()).pw_name)
        except KeyError:
            pass
        words += [value for key, value in properties.items() if _PERSONAL_PROPERTY.search(key.lower())]
        common = {
            "localhost",
            "root",
            "true",
            "false",
            "none",
            "unknown",
            "default",
            "system",
            "android",
            "/root",
            "termux",
        }
        return cls(word for word in words if word.lower() not in common and not re.fullmatch(r"[\d.,]{1,6}", word))

    def clean(self, text: str) -> str:
        """The text with every personal detail replaced by one that says nothing."""
        for word in self._words:
            if word in text:
                text = re.sub(rf"(?<!\w){re.escape(word)}(?!\w)", "/path" if word.startswith("/") else "xxx", text)
        for pattern, instead in _PATTERNS:
            text = pattern.sub(instead, text)
        return text


def record(file: Path, roots: Roots, home: Path) -> dict[str, int]:
    """Write the tree file, mode 0600; how many nodes it holds and how many refusals. Raises OSError."""
    described = describe(roots, home)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="surrogateescape") as written:
        written.write(dump(described))
    return {"text": len(described["text"]), "refused": len(described["refused"])}  # type: ignore[arg-type]


def describe(roots: Roots, home: Path) -> dict[str, object]:
    """Everything the tree file will say."""
    every = dict(roots.properties) if roots.substituted else device.getprop()
    anonymous = Anonymous.of_here(home, every)
    text: dict[str, str] = {}
    refused: dict[str, str] = {}
    permissions: dict[str, str] = {}

    def take(node: str, as_node: str = "") -> None:
        name = as_node or node
        try:
            text[name] = anonymous.clean(roots.read(node)[:_TEXT_LIMIT].decode("utf-8", "surrogateescape"))
        except OSError as problem:
            refused[name] = errno.errorcode.get(problem.errno or 0, "EIO")
        if mode := _mode(roots, node):
            permissions[name] = mode

    for node in dict.fromkeys([*_ALONE, *_listed(roots), *nodes.fast(roots), *nodes.around(roots)]):
        take(node)
    _child(roots, take, text)
    found = device.properties(roots)
    return {
        "about": f"Recorded by bmoe-agent doctor on {found.get('ro.product.model', 'a machine')}, personal details replaced.",
        "written_for_purpose": False,
        "page_bytes": roots.page_size,
        "clock_ticks_per_s": roots.ticks_per_s,
        "properties": {key: anonymous.clean(value) for key, value in found.items()},
        "versions": {
            "python": platform.python_version(),
            "platform": sys.platform,
            "grpcio": device._version("grpcio"),  # noqa: SLF001 - one home for the fact
            "protobuf": device._version("protobuf"),  # noqa: SLF001
            "protobuf_implementation": device.protobuf_implementation(),
            "agent": device._version("bmoe-fleet"),  # noqa: SLF001
        },
        "settings": _settings(roots, every, home),
        "permissions": permissions,
        "text": text,
        "refused": refused,
    }


def _listed(roots: Roots) -> Iterable[str]:
    for directory, pattern, leaves in _GLOBS:
        for name in roots.names(directory):
            if pattern.fullmatch(name):
                has = set(roots.names(f"{directory}/{name}"))
                # what is not there is no refusal; a folder that cannot be listed is asked anyway
                yield from (f"{directory}/{name}/{leaf}" for leaf in leaves if not has or leaf.split("/")[0] in has)


def _child(roots: Roots, take: object, text: dict[str, str]) -> None:
    """Record a child of ours: what this uid may read of the processes it starts, as of an engine."""
    assert callable(take)
    if roots.substituted:
        for name in _OF_PROCESS:
            take(f"proc/{CHILD}/{name}")
        return
    with subprocess.Popen(
        [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    ) as child:
        for name in _OF_PROCESS:
            take(f"proc/{child.pid}/{name}", f"proc/{CHILD}/{name}")
        child.communicate()
    for name in _OF_PROCESS:
        node = f"proc/{CHILD}/{name}"
        if node in text:
            text[node] = re.sub(rf"\b{child.pid}\b", str(CHILD), text[node])


def _settings(roots: Roots, properties: Mapping[str, str], home: Path) -> dict[str, str]:
    seen = Phone(roots, properties, home).settings()
    names = (
        android.MONITOR, android.MONITOR_PROPERTY, "max_phantom_processes", "sync_disabled", android.FREEZER,
        android.FREEZER_PROPERTY, "use_freezer",
    )  # fmt: skip
    return {name: seen.get(name, "refused") for name in names}


def _mode(roots: Roots, node: str) -> str:
    try:
        found = os.stat(roots.path(node))
    except OSError:
        return ""

    def named(uid: int) -> str:
        return "own" if uid == os.getuid() else {0: "root", 1000: "system", 2000: "shell"}.get(uid, "other")

    return f"{stat.S_IMODE(found.st_mode):04o} {named(found.st_uid)} {named(found.st_gid)}"
