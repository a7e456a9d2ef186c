"""One sample of the host's: frames of the loop in, values on the phone's clock out. Pure.

Entries have the names of `bmoe_proto.kernel`, so that a host's sample has the values an agent's would have. Values of its own:

    foreign_cpu_share    of one core, the busiest process that is neither ours nor a kernel thread, since the sample before
    foreign_process      its name, foreign_pid its pid
    foreign_window_s     how long that was; foreign_total_share all such processes together, foreign_top the busiest few
    kernel_cpu_share     all kernel threads together
    probe_cpu_ms         CPU of the probe's shell and its children since the sample before (without adbd's and system services')

Text that is kept is cut where it is bulk: /proc/stat without its interrupt counts, of /proc/vmstat the counters in `VMSTAT` (all
of it now and then), of the process listing the lines of those that ran.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bmoe_proto import kernel
from bmoe_proto.kernel_sys import is_cpu_zone
from bmoe_proto.sample_text import Entry, encode

from bmoe_collector.probe import processes
from bmoe_collector.probe.frames import Frame, refusal, split_files, split_tries

FAST_FILES = ("proc/stat", "proc/vmstat", "proc/loadavg")
SLOW_FILES = (
    "sys/class/thermal/thermal_zone*/temp",
    "sys/devices/system/cpu/cpufreq/policy*/scaling_cur_freq",
    "sys/devices/system/cpu/cpufreq/policy*/scaling_max_freq",
    "sys/devices/system/cpu/cpufreq/policy*/cpuinfo_max_freq",
    "dev/cpuset/*/cpus",
    "proc/zoneinfo",
)
CONSTANT_FILES = ("sys/class/thermal/thermal_zone*/type",)
PROCESSES = "proc/*/stat"
SLOW_DUMPS = ("dumpsys battery", "dumpsys power")
THERMAL = "dumpsys thermalservice"
RARE_DUMPS = ("dumpsys deviceidle", THERMAL)
VMSTAT = frozenset(
    {"nr_free_pages", "pswpin", "pswpout", "pgfault", "pgmajfault", "pgscan_kswapd", "pgscan_direct", "pgsteal_kswapd",
     "pgsteal_direct", "allocstall_normal", "allocstall_movable", "workingset_refault", "workingset_refault_file",
     "workingset_refault_anon", "nr_dirty", "nr_writeback", "oom_kill"}
)  # fmt: skip
_DUMP_LIMIT = 4096
_KEPT_OF_DUMPS: Mapping[str, tuple[str, ...]] = {
    "dumpsys power": (
        "wakefulness", "display power", "displaypowerstate", "displaystate", "screenstate", "lowpowermode", "batterysaver",
        "powersavemode", "mispowered", "mstayon", "deviceidlemode", "wakelock",
    ),
    "dumpsys deviceidle": ("mstate=", "mlightstate=", "mscreenon", "mcharging", "mdeepenabled", "mlightenabled"),
}  # fmt: skip
_MOST_ZONES = 24
_ZONEINFO = ("node", "pages free", "min ", "low ", "high ")


@dataclass(frozen=True, slots=True)
class HostSample:
    """One sample, as it is stored."""

    boot_ns: int
    uncertainty_ns: int
    kind: str
    took_ms: float
    values: dict[str, Any]
    refused: dict[str, str]
    text: bytes


@dataclass(slots=True)
class State:
    """What the next sample is compared with, and what was learned about this phone."""

    ticks_per_s: int = 100
    processes: Mapping[int, processes.Process] = field(default_factory=dict)
    processes_at_s: float = 0.0
    own_ticks: int | None = None
    constant: list[Entry] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)


def place(frames: Sequence[Frame]) -> tuple[int, int] | None:
    """Boot time of the middle of a sample and how far it may be off, from the uptimes around its answers.

    /proc/uptime shows CLOCK_BOOTTIME cut to hundredths: the truth lies up to 10 ms later. None where it may not be read.
    """
    first = next((frame.uptime_before_s for frame in frames if frame.uptime_before_s is not None), None)
    last = next((frame.uptime_after_s for frame in reversed(frames) if frame.uptime_after_s is not None), None)
    if first is None or last is None or last < first:
        return None
    low, high = round(first * 1e9), round(last * 1e9) + 10_000_000
    return (low + high) // 2, (high - low) // 2


def fast_files(state: State) -> str:
    """What every sample reads, in one process: system counters, and of the temperatures only the CPUs'.

    Every zone costs a read of its sensor.
    """
    zones = [
        entry.name.removesuffix("type") + "temp"
        for entry in state.constant
        if is_cpu_zone((entry.data or b"").decode("utf-8", "replace").strip())
    ]
    return " ".join(f"/{node}" for node in (*FAST_FILES, *zones[:_MOST_ZONES]))


def slow_files() -> str:
    """What is read now and then."""
    return " ".join(f"/{node}" for node in SLOW_FILES)


def slow_dumps(state: State) -> tuple[str, ...]:
    """What is asked now and then; the thermal service too where this shell may read no CPU's zone, since gates ask for it."""
    zones = any(is_cpu_zone((entry.data or b"").decode("utf-8", "replace").strip()) for entry in state.constant)
    return SLOW_DUMPS if zones else (*SLOW_DUMPS, THERMAL)


def learn(state: State, tries: Frame, constant: Frame) -> None:
    """From the first answers: which nodes this shell may not read and why, and what never changes."""
    for path, body in split_tries(tries.data).items():
        if isinstance(body, str):
            state.refused[path.lstrip("/")] = body
    state.constant = [Entry(path.lstrip("/"), body) for path, body in split_files(constant.data).items()]


def read(
    state: State,
    kind: str,
    answers: Mapping[str, Frame],
    at: tuple[int, int],
    *,
    our_pids: Collection[int] = (),
    probe_pid: int = 0,
    whole: bool = False,
) -> HostSample:
    """Make a sample of the answers (by "files", "slow", "procs", "cost" or a dump's name), and remember what the next one needs."""
    entries: list[Entry] = []
    refused: dict[str, str] = {}
    parse: list[Entry] = []
    own: dict[str, Any] = {}
    for name, frame in answers.items():
        if name in ("files", "slow"):
            for path, body in split_files(frame.data).items():
                node = path.lstrip("/")
                parse.append(Entry(node, body))
                entries.append(_kept(node, body, whole=whole))
        elif name == "procs":
            own |= _foreign(state, frame, our_pids, probe_pid, entries)
        elif name == "cost":
            ticks = processes.own_ticks(frame.data)
            if ticks is not None and state.own_ticks is not None and ticks >= state.own_ticks:
                own["probe_cpu_ms"] = 1000 * (ticks - state.own_ticks) / state.ticks_per_s
            state.own_ticks = ticks
        elif frame.status or _failed(frame.data):
            refused[name] = refusal(frame.data.decode("utf-8", "replace"))
        else:
            parse.append(Entry(name, frame.data))
            entries.append(_kept(name, frame.data, whole=whole))
    parse += state.constant  # a temperature has its name in another file, read once
    entries += state.constant if whole else []
    # A refusal is told once a loop and again with the slow samples, not every five seconds.
    if whole:
        refused = state.refused | refused
    found = kernel.values(parse)
    values = {
        name: value
        for name, value in found.values.items()
        if not name.startswith("vm_") or name.removeprefix("vm_") in VMSTAT
    }
    refused_entries = [Entry(node, None, reason=reason) for node, reason in refused.items()]
    spans = [frame for frame in answers.values() if frame.uptime_before_s is not None]
    took_s = 0.0
    if spans:
        ends = [frame.uptime_after_s for frame in spans if frame.uptime_after_s is not None]
        took_s = max(0.0, max(ends, default=0.0) - min(frame.uptime_before_s or 0.0 for frame in spans))
    return HostSample(
        at[0], at[1], kind, took_s * 1e3, {**values, **own}, refused, encode([*entries, *refused_entries])
    )


def _foreign(
    state: State,
    frame: Frame,
    our_pids: Collection[int],
    probe_pid: int,
    entries: list[Entry],
) -> dict[str, Any]:
    after = processes.listing(frame.data)
    at_s = frame.uptime_after_s or 0.0
    window_s = at_s - state.processes_at_s if state.processes_at_s else 0.0
    excluded = processes.ours(after, [*our_pids, probe_pid])
    found = processes.load(state.processes, after, window_s, excluded, state.ticks_per_s)
    state.processes, state.processes_at_s = after, at_s
    if found is None:
        return {}
    lines = [after[pid].line for _, pid, _ in found.top]
    entries.append(Entry(PROCESSES, b"\n".join([*lines, b""]), cut=True))
    values: dict[str, Any] = {
        "foreign_cpu_share": round(found.busiest, 4),
        "foreign_window_s": round(found.window_s, 3),
        "foreign_total_share": round(found.others, 4),
        "kernel_cpu_share": round(found.kernel, 4),
        "foreign_top": ", ".join(f"{command} ({pid}) {share:.1%}" for command, pid, share in found.top),
    }
    if found.busiest_command:
        values |= {"foreign_process": found.busiest_command, "foreign_pid": found.busiest_pid}
    return values


def _failed(data: bytes) -> bool:
    """Android's commands say that they could not and still end with 0."""
    head = data[:200].decode("utf-8", "replace").lstrip()
    return not head or head.startswith(
        ("Can't find service", "Error", "Permission Denial", "Failure", "Security exception")
    )


def _kept(name: str, data: bytes, *, whole: bool) -> Entry:
    """What of an answer is worth keeping as text."""
    if name == "proc/stat":
        return _lines(name, data, lambda line: not line.startswith((b"intr", b"softirq")))
    if name == "proc/vmstat" and not whole:
        return _lines(name, data, lambda line: line.split(b" ", 1)[0].decode("ascii", "replace") in VMSTAT)
    if name == "proc/zoneinfo":
        return _lines(name, data, lambda line: line.strip().lower().startswith(tuple(w.encode() for w in _ZONEINFO)))
    if wanted := _KEPT_OF_DUMPS.get(name):
        return _lines(name, data, lambda line: any(word.encode() in line.lower() for word in wanted))
    return Entry(name, data[:_DUMP_LIMIT], cut=len(data) > _DUMP_LIMIT)


def _lines(name: str, data: bytes, wanted: Any) -> Entry:
    lines = [line for line in data.splitlines(keepends=True) if wanted(line)]
    kept = b"".join(lines)[: 4 * _DUMP_LIMIT]
    return Entry(name, kept, cut=len(kept) < len(data))
