"""The one table of gates: what a phone can be asked to be like before a cell. The phone reads them, the host checks plans by it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bmoe_proto.v1 import telemetry_pb2 as pb

LIMIT, ABORT = STOPS = ("limit", "abort")
"""Names that stand in a report for what ended the whole plan: a limit of its own, or the `abort` of another cell's gate."""


@dataclass(frozen=True, slots=True)
class GateKind:
    """One gate: its unit, which way it is usually asked, what it is, and how often it is read at most, in seconds."""

    name: str
    unit: str
    comparison: str
    doc: str
    every_s: float = 1.0


GATES: Mapping[str, GateKind] = {
    kind.name: kind
    for kind in (
        GateKind("cpu_temp_c", "°C", "<=", "the hottest real CPU zone"),
        GateKind("mem_available_mib", "MiB", ">=", "MemAvailable"),
        GateKind("swap_used_mib", "MiB", "<=", "SwapTotal - SwapFree"),
        GateKind("clock_cap_ratio", "", ">=", "lowest scaling_max_freq ÷ cpuinfo_max_freq of all frequency domains"),
        GateKind("battery_pct", "%", ">=", "charge", 10.0),
        GateKind("charging", "", "==", "1 while a charger feeds the phone, else 0", 10.0),
        GateKind("screen", "", "==", "1 while the screen is on, else 0; told by a host", 5.0),
        GateKind("allowed_cpus", "", ">=", "CPUs this app may run on"),
        GateKind("fastest_cpus_ratio", "", ">=", "share of the fastest cluster's CPUs this app may run on"),
        GateKind("speed_probe_ratio", "", ">=", "speed of a fixed computation ÷ this phone's cold baseline", 10.0),
    )
}


def detail(report: pb.GateReport | None) -> str:
    """What a gate that kept a cell from running says, as evidence; empty without one."""
    if report is None:
        return ""
    if report.gate in STOPS:
        return report.asked
    last = f"{report.last:g} {report.unit}".strip() if report.HasField("last") else "nothing readable"
    return f"{report.asked or report.gate}: {report.state} after {report.waited_ns / 1e9:.0f} s, last {last}"
