"""What a gate can look at, and how each is read on this phone.

In: the roots, the agent's home, and what a host has told. Out: `Reading`s: a value in the gate's unit (bmoe_proto/gates.py has the table of
gates), or None and why.

Battery and charging: from /sys where readable (not on most phones), else Termux:API when it is installed, else what a connected host has
told within the last minute. Whether the screen is on only a host can tell.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bmoe_proto.gates import GATES
from bmoe_proto.kernel_proc import meminfo, status
from bmoe_proto.kernel_sys import POLICIES, SUPPLY, cap_ratios, celsius, cpu_list, supply

from bmoe_agent.device import cpus, fastest_cpus
from bmoe_agent.gates import baseline, speed
from bmoe_agent.roots import Roots
from bmoe_agent.sampling import nodes
from bmoe_agent.sampling.observer import boot_ns

TOLD_AGE_S = 60.0
_TERMUX_API_S = 8.0
# It starts an Android process of its own: asked once for both values, and seldom.
_TERMUX_API_EVERY_S = 30.0
# Without the Android app the command hangs, and while the phone dozes it may: asking at every reading would stall every gate.
_TERMUX_API_AGAIN_S = 600.0


@dataclass(frozen=True, slots=True)
class Reading:
    """One look: the value, or None; `text` says what was read, or why nothing could be; `source` where."""

    value: float | None
    text: str
    source: str = ""


KEPT_TOLD = 1024  # names; a host says some dozens
MOST_TOLD = 1e18


@dataclass(slots=True)
class Told:
    """What a connected host last said of the phone (values by the kernel module's names), and when."""

    values: dict[str, tuple[float, int]] = field(default_factory=dict)

    def tell(self, facts: Mapping[str, object], at_ns: int) -> None:
        """Keep the numbers and truths among the facts."""
        for name, value in facts.items():
            if isinstance(value, bool | int | float) and abs(value) < MOST_TOLD:  # neither nan nor infinite
                self.values.pop(name, None)
                self.values[name] = (float(value), at_ns)
        while len(self.values) > KEPT_TOLD:
            del self.values[next(iter(self.values))]

    def heard_within(self, now_ns: int, seconds: float = TOLD_AGE_S) -> bool:
        """Whether any host said anything so lately: one is looking after this phone."""
        return any(0 <= now_ns - at_ns <= seconds * 1e9 for _, at_ns in list(self.values.values()))

    def get(self, name: str, now_ns: int) -> float | None:
        """The value, None when nobody said it within the last minute."""
        value, at_ns = self.values.get(name, (0.0, -1))
        return value if at_ns >= 0 and 0 <= now_ns - at_ns <= TOLD_AGE_S * 1e9 else None


class Sources:
    """Readers of all gates for one phone."""

    def __init__(
        self,
        roots: Roots,
        home: Path,
        told: Told | None = None,
        clock_ns: Callable[[], int] = boot_ns,
        probe: Callable[[baseline.Baseline], speed.Speed] | None = None,
    ) -> None:
        self._roots = roots
        self._home = home
        self.told = told if told is not None else Told()
        self._clock_ns = clock_ns
        self._probe = probe or _probe
        self.probing = False
        """Whether the speed probe runs at this moment: nothing else of the agent's should."""
        self.probe_ended: Callable[[], None] = lambda: None
        self._termux_api: str | None = None if roots.substituted else shutil.which("termux-battery-status")
        self._termux_said: tuple[dict[str, object], int] = ({}, 0)
        self._termux_failed: tuple[str, int] | None = None
        self._zones = nodes.cpu_zones(roots)
        self._readers: Mapping[str, Callable[[], Reading]] = {
            "cpu_temp_c": self._cpu_temp,
            "mem_available_mib": self._mem_available,
            "swap_used_mib": self._swap_used,
            "clock_cap_ratio": self._clock_cap,
            "battery_pct": lambda: self._battery("battery_pct"),
            "charging": lambda: self._battery("charging"),
            "screen": self._screen,
            "allowed_cpus": self._allowed_cpus,
            "fastest_cpus_ratio": self._fastest_cpus,
            "speed_probe_ratio": self._speed,
        }

    def read(self, gate: str) -> Reading:
        """Look now. An unknown gate is a reading without a value, never an exception."""
        reader = self._readers.get(gate)
        if reader is None:
            return Reading(None, f"no gate is called {gate!r}: there are {', '.join(GATES)}")
        return reader()

    def why_unreadable(self, gate: str) -> str:
        """Why a gate cannot be read here, empty when it can; costs no probe."""
        if gate == "speed_probe_ratio":
            try:
                baseline.load(self._home)
            except baseline.BaselineError as problem:
                return str(problem)
            return ""
        reading = self.read(gate)
        return "" if reading.value is not None else reading.text

    def _cpu_temp(self) -> Reading:
        hottest: tuple[float, str] | None = None
        for node, kind in self._zones:
            degrees = celsius(self._roots.text(f"{node}/temp") or "")
            if degrees is not None and (hottest is None or degrees > hottest[0]):
                hottest = (degrees, kind)
        if hottest is not None:
            return Reading(
                hottest[0], f"{hottest[0]:.1f} °C in {hottest[1]}, of {len(self._zones)} CPU zones", "sys/class/thermal"
            )
        value = self.told.get("cpu_temp_c", self._clock_ns())
        if value is not None:
            return Reading(value, f"{value:.1f} °C told by the host", "host")
        zones = len(nodes.zones(self._roots))
        if zones:
            return Reading(None, f"none of {zones} readable thermal zones is a CPU temperature that answers")
        return Reading(None, "/sys/class/thermal is not readable for this app and no host has told the temperature")

    def _meminfo(self) -> dict[str, int]:
        found = meminfo(self._roots.text("proc/meminfo") or "")
        return {name: value for name, value in found.items() if isinstance(value, int)}

    def _mem_available(self) -> Reading:
        kib = self._meminfo().get("mem_available_kib")
        if kib is None:
            return Reading(None, "/proc/meminfo has no MemAvailable")
        return Reading(kib / 1024, f"MemAvailable {kib} kB", "proc/meminfo")

    def _swap_used(self) -> Reading:
        found = self._meminfo()
        total, free = found.get("mem_swap_total_kib"), found.get("mem_swap_free_kib")
        if total is None or free is None:
            return Reading(None, "/proc/meminfo has no SwapTotal and SwapFree")
        return Reading((total - free) / 1024, f"SwapTotal {total} kB, SwapFree {free} kB", "proc/meminfo")

    def _clock_cap(self) -> Reading:
        values: dict[str, int | float | str | bool | None] = {}
        for policy in nodes.policies(self._roots):
            for name, node in (("cap", "scaling_max_freq"), ("max", "cpuinfo_max_freq")):
                text = self._roots.text(f"{POLICIES}/{policy}/{node}") or ""
                if text.isdigit():
                    values[f"{policy}_{name}_khz"] = int(text)
        ratios = cap_ratios(values)
        if not ratios:
            return Reading(None, "no frequency domain shows both scaling_max_freq and cpuinfo_max_freq")
        worst = min(ratios, key=lambda policy: ratios[policy])
        text = f"{worst}: {values[f'{worst}_cap_khz']} of {values[f'{worst}_max_khz']} kHz, of {len(ratios)} domains"
        return Reading(ratios[worst], text, POLICIES)

    def _battery(self, name: str) -> Reading:
        supplies: dict[str, dict[str, str]] = {}
        for one in nodes.supplies(self._roots):
            for node in ("type", "capacity", "status", "online"):
                text = self._roots.text(f"{SUPPLY}/{one}/{node}")
                if text is not None:
                    supplies.setdefault(one, {})[node] = text
        value = supply(supplies).get(name)
        if isinstance(value, bool | int | float):
            return Reading(float(value), f"{name} {value}", SUPPLY)
        told = self.told.get(name, self._clock_ns())
        if told is not None:
            return Reading(told, f"{name} {told:g} told by the host", "host")
        return self._termux_battery(name)

    def _termux_battery(self, name: str) -> Reading:
        if self._termux_api is None:
            return Reading(
                None, "the battery is not readable for this app: install Termux:API, or keep a host connected"
            )
        facts, at_ns = self._termux_said
        now_ns = self._clock_ns()
        if self._termux_failed is not None and now_ns - self._termux_failed[1] < _TERMUX_API_AGAIN_S * 1e9:
            return Reading(None, self._termux_failed[0])
        try:
            if not facts or now_ns - at_ns > _TERMUX_API_EVERY_S * 1e9:
                ran = subprocess.run(
                    [self._termux_api], capture_output=True, timeout=_TERMUX_API_S, check=True, stdin=subprocess.DEVNULL
                )
                facts = json.loads(ran.stdout)
                self._termux_said = (facts, self._clock_ns())
            plugged = str(facts.get("plugged", "UNPLUGGED")).upper() != "UNPLUGGED"
            value = float(str(facts["percentage"])) if name == "battery_pct" else float(plugged)
        except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError, AttributeError) as problem:
            why = f"termux-battery-status did not answer ({problem}): install the Termux:API app too"
            self._termux_said, self._termux_failed = ({}, 0), (why, now_ns)
            return Reading(None, why)
        self._termux_failed = None
        return Reading(value, f"{name} {value:g}", "termux-battery-status")

    def _screen(self) -> Reading:
        told = self.told.get("screen_on", self._clock_ns())
        if told is None:
            return Reading(
                None, "only a connected host can tell whether the screen is on, and none has in the last minute"
            )
        return Reading(told, f"screen {'on' if told else 'off'}, told by the host", "host")

    def _allowed(self) -> set[int] | None:
        listed = status(self._roots.text("proc/self/status") or "").get("cpus_allowed")
        return cpu_list(listed) if isinstance(listed, str) else None

    def _allowed_cpus(self) -> Reading:
        allowed = self._allowed()
        if allowed is None:
            return Reading(None, "/proc/self/status has no Cpus_allowed_list")
        present = cpu_list(self._roots.text("sys/devices/system/cpu/present") or "")
        # A mask can name CPUs this phone does not have.
        usable = allowed & present if present else allowed
        return Reading(float(len(usable)), f"CPUs {_listed(usable)} of {len(present) or '?'}", "proc/self/status")

    def _fastest_cpus(self) -> Reading:
        allowed, fastest = self._allowed(), fastest_cpus(cpus(self._roots))
        if allowed is None or not fastest:
            return Reading(None, "which CPUs are the fastest, or which are allowed, cannot be read")
        here = allowed & fastest
        return Reading(
            len(here) / len(fastest), f"fastest are {_listed(fastest)}, allowed {_listed(allowed)}", "proc/self/status"
        )

    def _speed(self) -> Reading:
        try:
            cold = baseline.load(self._home)
        except baseline.BaselineError as problem:
            return Reading(None, str(problem))
        self.probing = True
        try:
            found = self._probe(cold)
        finally:
            self.probing = False
            self.probe_ended()
        text = (
            f"one thread {found.single_ratio:.3f}, {cold.threads} threads {found.multi_ratio:.3f} of the cold speed, "
            f"{found.passes} passes"
        )
        return Reading(found.ratio, text, "probe")


def _probe(cold: baseline.Baseline) -> speed.Speed:
    return speed.measure(cold.units, cold.threads, cold.single_s, cold.multi_s)


def _listed(numbers: set[int]) -> str:
    """{0,1,2,5} to `0-2,5`."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][-1] == number - 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts) or "none"
