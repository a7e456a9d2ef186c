"""Rules about the state of the phone: gates, throttling, excluded cores, other load, sleep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bmoe_proto.kernel_sys import cpu_list

from bmoe_collector.meaning.numbers import known, number
from bmoe_collector.record import GateRecord, SampleRecord
from bmoe_collector.verdicts.rule import Case, Rule, Verdict, warn

HOTTER_IS_WORSE = {"cpu_temp_c": True, "clock_cap_ratio": False, "speed_probe_ratio": False}
"""Gates that speak of throttling, and whether a higher value is the worse one."""
TOLERANCE = {"cpu_temp_c": 2.0, "clock_cap_ratio": 0.02, "speed_probe_ratio": 0.02}
"""What lies between a gate's last reading and the entry sample a moment later."""
COLD_TOLERANCE = {"cpu_temp_c": 10.0, "clock_cap_ratio": 0.05, "speed_probe_ratio": 0.10}
"""How much worse than the phone's own cold record counts as throttled."""
COLD = {"clock_cap_ratio": 1.0, "speed_probe_ratio": 1.0}
"""What a cold phone has when no record of its own says otherwise; the speed probe is a ratio to that record already."""
BASELINE_NOTES = frozenset({"baseline", "cold_baseline"})

FOREIGN_SHARE = 0.10
SLIP_S = 2.0
_ASLEEP = frozenset({"Asleep", "Dozing", "Dreaming"})
_DOZING = frozenset({"IDLE", "IDLE_MAINTENANCE", "OVERRIDE"})


def gate_gave_up(case: Case) -> Iterator[Verdict]:
    """A gate's bound was not met and the cell ran all the same."""
    if case.record.run.get("outcome") == "skipped":
        return
    for gate in case.record.gates:
        if gate.state not in {"gave_up", "unreadable"}:
            continue
        unread = gate.state == "unreadable" or gate.last is None
        seen = "nothing could be read" if unread else f"{gate.last:g} {gate.unit}".strip()
        yield warn(
            "gate_gave_up",
            f"{gate.asked}: {seen} after {gate.waited_s:.0f} s of waiting, and the cell ran ({gate.policy})",
        )


def throttled_entry(case: Case) -> Iterator[Verdict]:
    """Clock cap, speed probe or CPU temperature worse at entry than the gate or, without one, the cold record."""
    entry = case.derived.entry
    at_entry = {"cpu_temp_c": entry.cpu_temp_c, "clock_cap_ratio": entry.clock_cap_ratio}
    cold = _cold_record(case)
    said: list[str] = []
    for name, higher in HOTTER_IS_WORSE.items():
        # A gate that was looked at again stands there twice: the later look is the nearer one.
        gate = next((gate for gate in reversed(case.record.gates) if gate.gate == name), None)
        if gate is not None and gate.bound is not None and gate.state != "not_asked":
            seen, slack = _worst(gate, at_entry.get(name), higher)
            if seen is not None and _worse(seen, gate.bound, slack, higher):
                said.append(f"{name} {seen:g} against the gate's {gate.bound:g}")
            continue
        seen = at_entry.get(name)
        if seen is None and gate is not None:
            seen = gate.last
        bound = cold.get(name, COLD.get(name))
        if seen is not None and bound is not None and _worse(seen, bound, COLD_TOLERANCE[name], higher):
            whose = "the phone's cold record" if name in cold or name == "speed_probe_ratio" else "an uncapped clock's"
            said.append(f"{name} {seen:g} against {whose} {bound:g}")
    if said:
        asked = case.record.run.get("asked")
        preheat_s = number(asked.get("preheat_s")) if isinstance(asked, Mapping) else None
        why = f" (the plan asked for a pre-heat of {preheat_s:g} s)" if preheat_s else ""
        yield warn("throttled_entry", "at entry " + "; ".join(said) + why)


def _worst(gate: GateRecord, at_entry: float | None, higher: bool) -> tuple[float | None, float]:
    """The worse of the gate's last reading (exact) and the entry sample, with the slack it is allowed."""
    if gate.last is not None and gate.bound is not None and _worse(gate.last, gate.bound, 0.0, higher):
        return gate.last, 0.0
    return (at_entry, TOLERANCE[gate.gate]) if at_entry is not None else (gate.last, 0.0)


def _worse(seen: float, bound: float, slack: float, higher: bool) -> bool:
    return seen > bound + slack if higher else seen < bound - slack


def _cold_record(case: Case) -> dict[str, float]:
    for note in case.record.notes:
        if note.code in BASELINE_NOTES:
            return {
                name: float(note.facts[name]) for name in HOTTER_IS_WORSE if number(note.facts.get(name)) is not None
            }
    return {}


def big_cores_excluded(case: Case) -> Iterator[Verdict]:
    """The engine was not allowed on the fastest cluster: some vendors keep background apps off it."""
    clusters = _clusters(case)
    if len({speed for speed, _ in clusters}) < 2:
        return
    fastest = max(speed for speed, _ in clusters)
    big = set().union(*(cpus for speed, cpus in clusters if speed == fastest))
    for sample in case.record.samples:
        allowed_text = sample.values.get("cpus_allowed")
        if sample.kind == "idle" or not allowed_text:
            continue
        allowed = cpu_list(str(allowed_text))
        if allowed and not allowed & big:
            where = f" (cpuset {sample.values['cpuset']})" if sample.values.get("cpuset") else ""
            yield warn(
                "big_cores_excluded",
                f"allowed CPUs {allowed_text}{where} lack the fastest cluster {_ranges(big)} ({fastest / 1e6:g} GHz)",
            )
            return


def _clusters(case: Case) -> list[tuple[float, set[int]]]:
    """Top clock and CPUs of each cluster, from the samples' cpufreq domains or the device's facts."""
    merged: dict[str, Any] = {}
    for sample in case.record.samples:
        merged.update({key: value for key, value in sample.values.items() if key.startswith("policy")})
    found = []
    for name, value in merged.items():
        if name.endswith("_max_khz") and (speed := number(value)):
            cpus = cpu_list(str(merged.get(name.removesuffix("_max_khz") + "_cpus") or ""))
            if cpus:
                found.append((speed, cpus))
    if found:
        return found
    device = case.record.run.get("device")
    cpus_of = device.get("cpus", ()) if isinstance(device, Mapping) else ()
    for cpu in cpus_of:
        speed = _as_number(cpu.get("max_khz", cpu.get("maxKhz")))
        if speed:
            # proto3's JSON leaves a zero out: CPU 0 has no "cpu" key.
            found.append((speed, {int(cpu.get("cpu", 0))}))
    return found


def _as_number(value: Any) -> float | None:
    try:
        return number(float(value))
    except (TypeError, ValueError):
        return None


def _ranges(cpus: set[int]) -> str:
    """{4, 5, 6, 7} as 4-7."""
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and parts[-1][-1] == cpu - 1:
            parts[-1].append(cpu)
        else:
            parts.append([cpu])
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def foreign_load(case: Case) -> Iterator[Verdict]:
    """Another process took a tenth of a core or more during the cell.

    The host probe's samples say so as `foreign_cpu_share` (of one core, the busiest other process since the sample
    before) with `foreign_process`; or a note `foreign_load` with the facts `share` and `process`. An engine that somebody else
    started (the agent's note `foreign_engine`) is other load too, whatever it took: one engine is measured alone.
    """
    engines = [note.facts.get("pid") for note in case.record.notes if note.code == "foreign_engine"]
    if engines:
        yield warn("foreign_load", f"an engine ran that the agent had not started (pid {', '.join(map(str, engines))})")
    seen: list[tuple[float, str]] = []
    for sample in case.record.samples:
        share = number(sample.values.get("foreign_cpu_share"))
        if share is not None and _during(case, sample):
            seen.append((share, str(sample.values.get("foreign_process") or "another process")))
    for note in case.record.notes:
        share = number(note.facts.get("share")) if note.code == "foreign_load" else None
        if share is not None:
            seen.append((share, str(note.facts.get("process") or "another process")))
    over = [one for one in seen if one[0] >= FOREIGN_SHARE]
    if over:
        share, process = max(over)
        often = f", and {len(over) - 1} more readings above {FOREIGN_SHARE:.0%}" if len(over) > 1 else ""
        yield warn("foreign_load", f"{process} took {share:.0%} of a core{often}")


def _during(case: Case, sample: SampleRecord) -> bool:
    """Whether most of what a share covers (the time since the sample before) lies between launch and end."""
    begin, end = case.record.run.get("launched_boot_ns"), case.record.run.get("ended_boot_ns")
    middle = sample.boot_ns - (number(sample.values.get("foreign_window_s")) or 0.0) * 0.5e9
    return (begin is None or middle >= begin) and (end is None or middle <= end)


def not_awake(case: Case) -> Iterator[Verdict]:
    """The phone dozed at the start or the end, or the agent's own timers slipped by seconds."""
    said: list[str] = []
    awake = [sample for sample in case.record.samples if _sleep_of(sample) is not None]
    for when, sample in (("start", awake[0]), ("end", awake[-1])) if awake else ():
        if state := _sleep_of(sample):
            said.append(f"{state} at the {when}")
    slip = _slip_s(case.record.observer)
    if slip is not None and slip >= SLIP_S:
        said.append(f"the agent's timers slipped by {slip:.1f} s")
    for note in case.record.notes:
        if note.code in {"timer_slip", "frozen", "suspended"}:
            seconds = max(
                known([note.facts.get("slip_s"), note.facts.get("seconds"), note.facts.get("frozen_s")]), default=0
            )
            if seconds >= SLIP_S:
                said.append(f"the agent stood still for {seconds:.1f} s")
    if said:
        yield warn("not_awake", "; ".join(dict.fromkeys(said)))


def _sleep_of(sample: SampleRecord) -> str | None:
    """How the phone slept; "" when awake; None when this sample does not tell."""
    wakefulness, doze, awake = (sample.values.get(name) for name in ("wakefulness", "doze", "awake"))
    if wakefulness is None and awake is None and doze is None:
        return None
    if wakefulness in _ASLEEP:
        return str(wakefulness).lower()
    if awake is False:
        return "not awake"
    return "dozing (device idle)" if doze in _DOZING else ""


def _slip_s(observer: Mapping[str, Any]) -> float | None:
    """The worst timer slip in seconds, by whichever unit the record names."""
    for name, scale in (("max_timer_slip_ms", 1e3), ("max_timer_slip_ns", 1e9), ("max_timer_slip_s", 1.0)):
        value = number(observer.get(name))
        if value is not None:
            return value / scale
    return None


RULES: tuple[Rule, ...] = (gate_gave_up, throttled_entry, big_cores_excluded, foreign_load, not_awake)
