"""Kernel text of one sample to values by name.

In: the entries of a `Sample.text` (bmoe_proto/sample_text.py) of either vantage point. Out: `Values`: a flat dict of
numbers and short texts, and why the other nodes could not be read. Pure; the same text always gives the same values,
so they can be made again from the raw record (law 1).

Which name comes from where, and its unit, is `NAMES`; names with a `*` stand for a family (`policy*_cur_khz`). Units are
the kernel's own and stand in the name; nothing is rescaled except temperatures, whose files disagree on the unit.
A line that does not parse is left out and never stops the rest; the raw text stays in the record.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import NamedTuple

from bmoe_proto import kernel_dump, kernel_proc, kernel_sys
from bmoe_proto.sample_text import Entry, SampleTextError, iterate

Value = int | float | str | bool | None


class Name(NamedTuple):
    """One value a sample can give."""

    name: str
    unit: str
    node: str
    doc: str


NAMES: tuple[Name, ...] = (
    Name("engine_state", "", "proc/engine/status", "scheduler state letter of the engine"),
    Name("rss_kib", "KiB", "proc/engine/status", "VmRSS"),
    Name("rss_anon_kib", "KiB", "proc/engine/status", "RssAnon: the expert cache and dense buffers live here"),
    Name("rss_file_kib", "KiB", "proc/engine/status", "RssFile: the mapped model"),
    Name("rss_shmem_kib", "KiB", "proc/engine/status", "RssShmem"),
    Name("rss_peak_kib", "KiB", "proc/engine/status", "VmHWM"),
    Name("vm_size_kib", "KiB", "proc/engine/status", "VmSize"),
    Name("vm_peak_kib", "KiB", "proc/engine/status", "VmPeak"),
    Name("vm_locked_kib", "KiB", "proc/engine/status", "VmLck"),
    Name("swap_kib", "KiB", "proc/engine/status", "VmSwap: what of the engine is in zram or swap"),
    Name("threads", "", "proc/engine/status", "threads of the engine"),
    Name("cpus_allowed", "", "proc/engine/status", "Cpus_allowed_list"),
    Name("voluntary_switches", "", "proc/engine/status", "since the process started"),
    Name("involuntary_switches", "", "proc/engine/status", "since the process started"),
    Name("minflt", "", "proc/engine/stat", "minor faults since the process started"),
    Name("majflt", "", "proc/engine/stat", "major faults since the process started"),
    Name("utime_ticks", "ticks", "proc/engine/stat", "CPU in user mode"),
    Name("stime_ticks", "ticks", "proc/engine/stat", "CPU in the kernel"),
    Name("start_ticks", "ticks", "proc/engine/stat", "start time since boot: with the pid it names a process"),
    Name("last_cpu", "", "proc/engine/stat", "CPU last run on"),
    Name("blkio_ticks", "ticks", "proc/engine/stat", "time waiting for block I/O, where the kernel counts it"),
    Name("nice", "", "proc/engine/stat", "nice value"),
    Name("io_read_bytes", "bytes", "proc/engine/io", "fetched from storage"),
    Name("io_write_bytes", "bytes", "proc/engine/io", "sent to storage"),
    Name("io_rchar", "bytes", "proc/engine/io", "returned by read calls, the page cache's share included"),
    Name("io_wchar", "bytes", "proc/engine/io", "passed to write calls"),
    Name("io_syscr", "", "proc/engine/io", "read calls"),
    Name("io_syscw", "", "proc/engine/io", "write calls"),
    Name("run_ns", "ns", "proc/engine/schedstat", "time on a CPU of the main thread"),
    Name("run_wait_ns", "ns", "proc/engine/schedstat", "time runnable but not run: preemption made visible"),
    Name("timeslices", "", "proc/engine/schedstat", "times run on a CPU"),
    Name("cgroup", "", "proc/engine/cgroup", "cgroups of the engine, lines joined by a space"),
    Name("cpuset", "", "proc/engine/cpuset", "cpuset of the engine"),
    Name("oom_score", "", "proc/engine/oom_score", "the out-of-memory killer's score"),
    Name("oom_score_adj", "", "proc/engine/oom_score_adj", "its adjustment"),
    Name("smaps_*_kib", "KiB", "proc/engine/smaps_rollup", "sums over all mappings, entry and exit only (law 7)"),
    Name("mem_*_kib", "KiB", "proc/meminfo", "every line by its name in snake case (mem_total_kib, mem_available_kib)"),
    Name("policy*_cur_khz", "kHz", "sys/devices/system/cpu/cpufreq", "clock of a frequency domain"),
    Name("policy*_cap_khz", "kHz", "sys/devices/system/cpu/cpufreq", "scaling_max_freq: the cap now"),
    Name("policy*_max_khz", "kHz", "sys/devices/system/cpu/cpufreq", "cpuinfo_max_freq: what the hardware can"),
    Name("policy*_min_khz", "kHz", "sys/devices/system/cpu/cpufreq", "cpuinfo_min_freq"),
    Name("policy*_cpus", "", "sys/devices/system/cpu/cpufreq", "CPUs of the domain"),
    Name("policy*_governor", "", "sys/devices/system/cpu/cpufreq", "governor of the domain"),
    Name("clock_cap_ratio", "", "sys/devices/system/cpu/cpufreq", "lowest cap ÷ maximum over all domains with both"),
    Name("cpu_online", "", "sys/devices/system/cpu/online", "CPUs online"),
    Name(
        "cpu_temp_c",
        "°C",
        "sys/class/thermal",
        "hottest real CPU zone (trip-point zones are not temperatures); where none can be read, the thermal service's",
    ),
    Name("zone_*_c", "°C", "sys/class/thermal", "a thermal zone by its type"),
    Name("cooling_*", "", "sys/class/thermal", "state of a cooling device by its type"),
    Name("battery_pct", "%", "sys/class/power_supply", "charge"),
    Name("battery_temp_c", "°C", "sys/class/power_supply", "trails the SoC by minutes"),
    Name("battery_status", "", "sys/class/power_supply", "Charging, Discharging, Full, Not charging"),
    Name("battery_current_ua", "µA", "sys/class/power_supply", "sign as the vendor has it"),
    Name("battery_voltage_uv", "µV", "sys/class/power_supply", ""),
    Name("charging", "", "sys/class/power_supply", "whether a charger feeds the phone"),
    Name("vm_*", "", "proc/vmstat", "counters since boot by the kernel's names (vm_pswpin, vm_pgmajfault)"),
    Name("sys_*_ticks", "ticks", "proc/stat", "CPU time of the whole system by kind"),
    Name("sys_switches", "", "proc/stat", "context switches since boot"),
    Name("sys_running", "", "proc/stat", "runnable tasks"),
    Name("sys_blocked", "", "proc/stat", "tasks waiting for I/O"),
    Name(
        "psi_*", "%, µs", "proc/pressure", "psi_<cpu|memory|io>_<some|full>_<avg10_pct|avg60_pct|avg300_pct|total_us>"
    ),
    Name("load_*", "", "proc/loadavg", "load averages over 1, 5 and 15 minutes"),
    Name("uptime_s", "s", "proc/uptime", "since boot"),
    Name("zram_*", "", "sys/block/zram*/mm_stat", "zram_<disk>_<orig_bytes|compressed_bytes|used_bytes>"),
    Name("thermal_status", "", "dumpsys thermalservice", "0 none to 6 shutdown, as the service says"),
    Name("hal_*_c", "°C", "dumpsys thermalservice", "a sensor of the thermal service; can repeat cached values"),
    Name("awake", "", "dumpsys power", "wakefulness is Awake"),
    Name("wakefulness", "", "dumpsys power", "Awake, Asleep, Dozing, Dreaming"),
    Name("screen_on", "", "dumpsys power", "display power state is ON, where the dump says it"),
    Name("battery_saver", "", "dumpsys power", "low power mode"),
    Name("doze", "", "dumpsys deviceidle", "deep doze state"),
    Name("doze_light", "", "dumpsys deviceidle", "light doze state"),
    Name(
        "foreign_cpu_share",
        "cores",
        "proc/*/stat",
        "CPU of the busiest process that is neither the engine nor ours, since the sample before",
    ),
    Name("foreign_process", "", "proc/*/stat", "the command of that process"),
    Name("cpuset_*", "", "dev/cpuset", "CPUs of a cpuset by its name, where adb's shell can read it"),
)


def name_of(value: str) -> Name | None:
    """The row of `NAMES` that describes a value's name, None when nothing does."""
    for row in NAMES:
        if row.name == value:
            return row
    return next((row for row in NAMES if "*" in row.name and fnmatchcase(value, row.name)), None)


@dataclass(slots=True)
class Values:
    """What a sample says: `values` by name, and by node why others are missing."""

    values: dict[str, Value] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    problem: str = ""


_EXACT: Mapping[str, Callable[[str], Mapping[str, Value]]] = {
    "proc/engine/status": kernel_proc.status,
    "proc/engine/stat": kernel_proc.stat,
    "proc/engine/io": kernel_proc.io,
    "proc/engine/schedstat": kernel_proc.schedstat,
    "proc/engine/smaps_rollup": kernel_proc.smaps_rollup,
    "proc/engine/cgroup": kernel_proc.cgroup,
    "proc/engine/cpuset": lambda text: {"cpuset": text.strip()},
    "proc/engine/oom_score": lambda text: kernel_proc.whole("oom_score", text),
    "proc/engine/oom_score_adj": lambda text: kernel_proc.whole("oom_score_adj", text),
    "proc/meminfo": kernel_proc.meminfo,
    "proc/vmstat": kernel_proc.vmstat,
    "proc/stat": kernel_proc.system_stat,
    "proc/loadavg": kernel_proc.loadavg,
    "proc/uptime": kernel_proc.uptime,
    "proc/pressure/cpu": lambda text: kernel_proc.pressure("cpu", text),
    "proc/pressure/memory": lambda text: kernel_proc.pressure("memory", text),
    "proc/pressure/io": lambda text: kernel_proc.pressure("io", text),
    "sys/devices/system/cpu/online": lambda text: {"cpu_online": text.strip()},
    "dumpsys battery": kernel_dump.battery,
    "dumpsys power": kernel_dump.power,
    "dumpsys deviceidle": kernel_dump.device_idle,
    "dumpsys thermalservice": kernel_dump.thermal_service,
}


def values(entries: Iterable[Entry]) -> Values:
    """Values of one sample's entries."""
    found = Values()
    system: dict[str, str] = {}
    for name, data, code, reason, _ in entries:
        if data is None:
            found.refused[name] = reason or describe_errno(code)
            continue
        text = data.decode("utf-8", "replace")
        if (read := _EXACT.get(name)) is not None:
            found.values.update(read(text))
        elif name.startswith("sys/"):
            system[name] = text.strip()
        elif name.startswith("dev/cpuset"):
            found.values.update(kernel_sys.cpuset(name, text))
    # What the thermal service or `dumpsys` said stands; a node of /sys of the same name is nearer to the hardware.
    if system:
        found.values.update(kernel_sys.nodes(system))
    return found


def sample_values(text: bytes) -> Values:
    """Values of a whole `Sample.text`; a damaged end keeps what came before it and says so in `problem`."""
    entries: list[Entry] = []
    problem = ""
    try:
        entries.extend(iterate(text))
    except SampleTextError as damage:
        problem = str(damage)
        entries = _whole_part(text)
    found = values(entries)
    found.problem = problem
    return found


def _whole_part(text: bytes) -> list[Entry]:
    kept: list[Entry] = []
    try:
        for entry in iterate(text):
            kept.append(entry)  # noqa: PERF402 - what was appended must survive the error that ends the loop
    except SampleTextError:
        pass
    return kept


@lru_cache(maxsize=256)
def describe_errno(code: int) -> str:
    """An errno of a phone in words that do not depend on this machine's language: `EACCES (permission denied)`."""
    name = errno.errorcode.get(code)
    return f"{name} ({os.strerror(code).lower()})" if name else f"errno {code}"
