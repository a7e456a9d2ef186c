"""The memory picture of a run: token rows, kernel samples and residency looks in; curves and states out.

Curves come from the metrics rows where the engine wrote them, else from the agent's samples of the engine: resident
anonymous memory (the expert cache lives here), resident file memory (the mapped model), swap, and what the device claims
is available, which counts the mapped weights as reclaimable and so over-states headroom (contract, "Per-token rows").
Names of sample values are those of `bmoe_proto.kernel`. What a pressure sidecar measured around an imported run stands
where no sample does (generations.md, Metrics CSV headers).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bmoe_collector.meaning.numbers import known, number
from bmoe_collector.record import ResidencyRecord, Rows, RunRecord, SampleRecord

CURVES: tuple[tuple[str, str], ...] = (
    ("rss_anon_mib", "rss_anon_kib"),
    ("rss_file_mib", "rss_file_kib"),
    ("rss_mib", "rss_kib"),
    ("swap_mib", "swap_kib"),
    ("mem_available_mib", "mem_available_kib"),
    ("mem_free_mib", "mem_free_kib"),
    ("swap_free_mib", "mem_swap_free_kib"),
)
"""Column of the metrics CSV, and the name of the same thing in a sample."""

DURING = frozenset({"fast", "turn"})
"""Kinds of samples that were taken while the engine ran."""

ENTRY = ("entry", "launch")
EXIT = ("exit",)

_BESIDE: Mapping[bool, Mapping[str, tuple[str, float]]] = {
    False: {
        "cpu_temp_c": ("cpu_temp_before_mC", 1e3),
        "battery_temp_c": ("batt_temp_before_dC", 10.0),
        "mem_available_mib": ("mem_avail_before_kb", 1024.0),
    },
    True: {"battery_temp_c": ("batt_temp_after_dC", 10.0), "mem_available_mib": ("mem_avail_after_kb", 1024.0)},
}
"""What of a state a sidecar tells, at the start (False) and the end (True): its key, and how many of its unit make one."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One quantity over a run, in MiB, in order of time; `source` is "metrics" or "samples"."""

    name: str
    source: str
    values: tuple[float, ...]

    @property
    def first(self) -> float:
        """The value at the start."""
        return self.values[0]

    @property
    def last(self) -> float:
        """The value at the end."""
        return self.values[-1]


def sample_mib(sample: SampleRecord, name: str) -> float | None:
    """A memory value of a sample in MiB, by its KiB name (or by its MiB name, where a source speaks MiB)."""
    value = number(sample.values.get(name))
    if value is not None:
        return value / 1024
    return number(sample.values.get(name.removesuffix("_kib") + "_mib"))


def curves(rows: Rows, samples: Sequence[SampleRecord]) -> dict[str, Curve]:
    """Every curve that was measured."""
    found: dict[str, Curve] = {}
    during = [sample for sample in samples if sample.source == "agent" and sample.kind in DURING]
    for column, name in CURVES:
        values = known(rows.columns.get(column, ()))
        source = "metrics"
        if not values:
            values = known(sample_mib(sample, name) for sample in during)
            source = "samples"
        if values:
            found[column] = Curve(column, source, tuple(values))
    return found


@dataclass(frozen=True, slots=True)
class State:
    """What the phone was like at one end of a run; None where nobody could read it."""

    boot_ns: int | None = None
    cpu_temp_c: float | None = None
    clock_cap_ratio: float | None = None
    mem_available_mib: float | None = None
    swap_used_mib: float | None = None
    battery_pct: float | None = None
    battery_temp_c: float | None = None
    charging: bool | None = None
    screen_on: bool | None = None
    awake: bool | None = None
    wakefulness: str | None = None
    doze: str | None = None
    thermal_status: float | None = None
    cpus_allowed: str | None = None
    pswpin: float | None = None
    pswpout: float | None = None
    refused: Mapping[str, str] = field(default_factory=dict)


def state_at(record: RunRecord, kinds: Sequence[str], *, last: bool = False) -> State:
    """The phone's state from the samples of `kinds`, then the host sample nearest to that end of the run, then a sidecar."""
    chosen = [sample for sample in record.samples if sample.source == "agent" and sample.kind in kinds]
    host = [sample for sample in record.samples if sample.source == "host"]
    if not chosen:
        chosen = [sample for sample in record.samples if sample.source == "agent" and sample.kind in DURING]
        chosen = chosen[-1:] if last else chosen[:1]
    order = list(reversed(chosen)) if last else chosen
    near = list(reversed(host)) if last else host
    views = [*order, *near]

    def get(name: str) -> Any:
        return next((sample.values[name] for sample in views if sample.values.get(name) is not None), None)

    def mib(name: str) -> float | None:
        return next((value for sample in views if (value := sample_mib(sample, name)) is not None), None)

    def temperature(name: str) -> float | None:
        seen = number(get(name))
        return seen if seen is not None else beside(record, *_BESIDE[last].get(name, ("", 1.0)))

    total, free = mib("mem_swap_total_kib"), mib("mem_swap_free_kib")
    available = mib("mem_available_kib")
    if available is None:
        available = beside(record, *_BESIDE[last]["mem_available_mib"])
    cap = number(get("clock_cap_ratio"))
    refused: dict[str, str] = {}
    for sample in chosen:
        refused.update(sample.refused)
    return State(
        boot_ns=order[0].boot_ns if order else None,
        cpu_temp_c=temperature("cpu_temp_c"),
        clock_cap_ratio=cap,
        mem_available_mib=available,
        swap_used_mib=None if total is None or free is None else total - free,
        battery_pct=number(get("battery_pct")),
        battery_temp_c=temperature("battery_temp_c"),
        charging=_flag(get("charging")),
        screen_on=_flag(get("screen_on")),
        awake=_flag(get("awake")),
        wakefulness=_text(get("wakefulness")),
        doze=_text(get("doze")),
        thermal_status=number(get("thermal_status")),
        cpus_allowed=_text(get("cpus_allowed")),
        pswpin=number(get("vm_pswpin")),
        pswpout=number(get("vm_pswpout")),
        refused=refused,
    )


def beside(record: RunRecord, key: str, scale: float) -> float | None:
    """A number of the run's pressure sidecar, divided by `scale`; None without one."""
    value = number(record.sidecar.get(key))
    return None if value is None else value / scale


def hottest(record: RunRecord) -> float | None:
    """Highest CPU temperature of the run in °C: its samples', whoever took them, or the sidecar's."""
    seen = known(sample.values.get("cpu_temp_c") for sample in record.samples if sample.kind != "idle")
    return max(seen) if seen else beside(record, "cpu_temp_max_mC", 1e3)


def _flag(value: Any) -> bool | None:
    return None if value is None else bool(value)


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def last_look(looks: Sequence[ResidencyRecord], part: str) -> ResidencyRecord | None:
    """The last look at a part that gave a fraction; without one, the last that said why not."""
    own = [look for look in looks if look.part == part]
    measured = [look for look in own if look.fraction is not None]
    chosen = measured or own
    return chosen[-1] if chosen else None


def difference(after: State, before: State, get: Callable[[State], float | None]) -> float | None:
    """How much a counter grew between two states."""
    end, start = get(after), get(before)
    return None if end is None or start is None else end - start
