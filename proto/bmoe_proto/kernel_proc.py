"""Text of files under /proc to values. Each function takes the text of one file and returns values by the names of
`bmoe_proto.kernel.NAMES`; what it cannot read it leaves out. Formats: proc(5), and the kernel's Documentation/filesystems/proc.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

from bmoe_proto.numbers import count, integer

Value = int | float | str | bool | None

_STATUS = {
    "VmRSS": "rss_kib",
    "RssAnon": "rss_anon_kib",
    "RssFile": "rss_file_kib",
    "RssShmem": "rss_shmem_kib",
    "VmHWM": "rss_peak_kib",
    "VmSize": "vm_size_kib",
    "VmPeak": "vm_peak_kib",
    "VmLck": "vm_locked_kib",
    "VmSwap": "swap_kib",
    "Threads": "threads",
    "voluntary_ctxt_switches": "voluntary_switches",
    "nonvoluntary_ctxt_switches": "involuntary_switches",
}
# Fields of /proc/<pid>/stat counted from the state letter (field 3 of proc(5)) as 0.
_STAT = {
    7: "minflt",
    9: "majflt",
    11: "utime_ticks",
    12: "stime_ticks",
    16: "nice",
    19: "start_ticks",
    36: "last_cpu",
    39: "blkio_ticks",
}
_SYSTEM_KINDS = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal", "guest", "guest_nice")
_STATUS_LINE = re.compile(rf"^(State|Cpus_allowed_list|{'|'.join(_STATUS)}):[ \t]*(\S.*)$", re.MULTILINE)
_MEMINFO = re.compile(r"^([\w()]{1,60}):[ \t]+(\d{1,18}) kB[ \t]*$", re.MULTILINE)
_PRESSURE = re.compile(r"\b(avg\d{1,4}|total)=(\d{1,18}(?:\.\d{1,6})?)")
_SMAPS = re.compile(r"^(\w+):\s+(\d{1,18}) kB$", re.MULTILINE)


def pairs(text: str) -> Iterator[tuple[str, str]]:
    """`Key: value` lines."""
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            yield key.strip(), value.strip()


def number(text: str) -> int | None:
    """The whole number a text starts with (`12 kB` is 12), None when there is none."""
    words = text.split(maxsplit=1)
    return integer(words[0]) if words else None


def whole(name: str, text: str) -> dict[str, Value]:
    """A file that holds one number."""
    value = number(text)
    return {} if value is None else {name: value}


def snake(name: str) -> str:
    """`MemAvailable` to `mem_available`, `Active(anon)` to `active_anon`."""
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.replace("(", "_").replace(")", ""))
    return name.lower()


def status(text: str) -> dict[str, Value]:
    """/proc/<pid>/status: memory in KiB, threads, switches, allowed CPUs."""
    found: dict[str, Value] = {}
    for key, value in _STATUS_LINE.findall(text):
        if key == "State":
            found["engine_state"] = value[0]
        elif key == "Cpus_allowed_list":
            found["cpus_allowed"] = value.rstrip()
        elif (amount := number(value)) is not None:
            found[_STATUS[key]] = amount
    return found


def stat(text: str) -> dict[str, Value]:
    """/proc/<pid>/stat. The command's name may hold spaces and brackets: fields are counted after its last bracket."""
    fields = text[text.rfind(")") + 1 :].split()
    found: dict[str, Value] = {}
    for at, name in _STAT.items():
        if at < len(fields) and (value := integer(fields[at])) is not None:
            found[name] = value
    return found


def io(text: str) -> dict[str, Value]:
    """/proc/<pid>/io: bytes and calls since the process started."""
    names = {"rchar", "wchar", "syscr", "syscw", "read_bytes", "write_bytes"}
    return {f"io_{key}": amount for key, value in pairs(text) if key in names and (amount := number(value)) is not None}


def schedstat(text: str) -> dict[str, Value]:
    """/proc/<pid>/schedstat: nanoseconds run, nanoseconds waiting to run, timeslices; of the main thread."""
    names = ("run_ns", "run_wait_ns", "timeslices")
    found = dict(zip(names, map(count, text.split()), strict=False))
    return {} if len(found) < len(names) or None in found.values() else {**found}


def smaps_rollup(text: str) -> dict[str, Value]:
    """/proc/<pid>/smaps_rollup: sums over all mappings, in KiB."""
    return {f"smaps_{snake(key)}_kib": int(amount) for key, amount in _SMAPS.findall(text)}


def cgroup(text: str) -> dict[str, Value]:
    """/proc/<pid>/cgroup, and the cpuset it names where cgroup v1 has one (`4:cpuset:/background`)."""
    lines = text.split("\n")
    found: dict[str, Value] = {"cgroup": " ".join(line for line in lines if line)}
    for line in lines:
        parts = line.split(":", 2)
        if len(parts) == 3 and "cpuset" in parts[1].split(","):
            found["cpuset"] = parts[2]
    return found


def meminfo(text: str) -> dict[str, Value]:
    """/proc/meminfo, every line: `MemTotal` is mem_total_kib, `Active(file)` mem_active_file_kib."""
    return {_meminfo_name(key): int(amount) for key, amount in _MEMINFO.findall(text)}


@lru_cache(maxsize=512)
def _meminfo_name(key: str) -> str:
    name = snake(key)
    return f"{name if name.startswith('mem_') else 'mem_' + name}_kib"


def vmstat(text: str) -> dict[str, Value]:
    """/proc/vmstat: every counter as vm_<its name>."""
    found: dict[str, Value] = {}
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if (amount := count(value)) is not None:
            found[f"vm_{key}"] = amount
    return found


def system_stat(text: str) -> dict[str, Value]:
    """/proc/stat: CPU ticks of the whole system by kind, switches, running and blocked tasks."""
    found: dict[str, Value] = {}
    names = {
        "ctxt": "sys_switches",
        "procs_running": "sys_running",
        "procs_blocked": "sys_blocked",
        "btime": "sys_btime_s",
    }
    for line in text.splitlines():
        key, _, rest = line.partition(" ")
        if key == "cpu":
            for kind, part in zip(_SYSTEM_KINDS, rest.split(), strict=False):
                if (ticks := count(part)) is not None:
                    found[f"sys_{kind}_ticks"] = ticks
        elif (name := names.get(key)) and (amount := number(rest)) is not None:
            found[name] = amount
    return found


def loadavg(text: str) -> dict[str, Value]:
    """/proc/loadavg."""
    found: dict[str, Value] = {}
    for name, part in zip(("load_1m", "load_5m", "load_15m"), text.split(), strict=False):
        try:
            found[name] = float(part)
        except ValueError:
            continue
    return found


def uptime(text: str) -> dict[str, Value]:
    """/proc/uptime: seconds since boot."""
    try:
        return {"uptime_s": float(text.split(maxsplit=1)[0])}
    except (IndexError, ValueError):
        return {}


def pressure(what: str, text: str) -> dict[str, Value]:
    """/proc/pressure/<what>: `some avg10=0.00 avg60=0.00 avg300=0.00 total=0`."""
    found: dict[str, Value] = {}
    for line in text.splitlines():
        kind, _, rest = line.partition(" ")
        for key, value in _PRESSURE.findall(rest):
            if key == "total":
                found[f"psi_{what}_{kind}_total_us"] = int(value.partition(".")[0])
            else:
                found[f"psi_{what}_{kind}_{key}_pct"] = float(value)
    return found
