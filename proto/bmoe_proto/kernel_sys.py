"""Nodes under /sys (and the cpusets in /dev) to values by the names of `bmoe_proto.kernel.NAMES`.

In: node path to its stripped text. A temperature zone needs its `type` node beside it to have a name; without one it is
known by its number. Which zones are CPU temperatures, and in which unit a vendor wrote them, is decided here for agent and host.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from bmoe_proto.numbers import count, integer

Value = int | float | str | bool | None

POLICIES = "sys/devices/system/cpu/cpufreq"
THERMAL = "sys/class/thermal"
SUPPLY = "sys/class/power_supply"

_POLICY = re.compile(rf"^{POLICIES}/(policy\d+)/(\w+)$")
_ZONE = re.compile(rf"^{THERMAL}/thermal_zone(\d{{1,9}})/(type|temp)$")
_COOLING = re.compile(rf"^{THERMAL}/cooling_device(\d+)/(type|cur_state)$")
_SUPPLY = re.compile(rf"^{SUPPLY}/([^/]+)/(\w+)$")
_ZRAM = re.compile(r"^sys/block/(zram\d+)/mm_stat$")
_FREQUENCIES = {
    "scaling_cur_freq": "cur",
    "scaling_max_freq": "cap",
    "cpuinfo_max_freq": "max",
    "cpuinfo_min_freq": "min",
}
# Qualcomm "cpu-0-1-usr", "cpuss-0", "cpu-1-0"; MediaTek "soc_max", "cpu-big-core0-1", "mtktscpu", "cpu_big1"; Exynos and Tensor
# "BIG", "MID", "LITTLE"; plain Linux "x86_pkg_temp", "coretemp", "cpu-thermal".
_CPU_ZONE = re.compile(r"^(cpu|apc|apss|mtktscpu|tscpu|x86_pkg_temp|coretemp|big|mid|little|cluster\d)", re.IGNORECASE)
# Trip points and virtual values carry a CPU's name and are constants or composites, never the temperature of a core.
_NOT_A_TEMPERATURE = re.compile(r"trip|hw-?trip|bcl|lmh|-lvl|limit|virt|vdd|step|cdev|alert", re.IGNORECASE)


def is_cpu_zone(kind: str) -> bool:
    """Whether a thermal zone's type names a real CPU sensor (`cpu-hw-trip-*` zones are constants)."""
    return bool(_CPU_ZONE.match(kind)) and not _NOT_A_TEMPERATURE.search(kind)


def celsius(text: str) -> float | None:
    """A zone's text in degrees: vendors write thousandths, tenths or whole degrees. None for what cannot be one.

    A sensor that is off reads 0, -40000, 127000 or -273200 and more; only what is above -30 and below 125 °C and not exactly
    zero is taken for a temperature.
    """
    raw = integer(text)
    if raw is None:
        return None
    size = abs(raw)
    value = raw / 1000 if size >= 1000 else raw / 10 if size >= 150 else float(raw)
    return value if -30 < value < 125 and raw != 0 else None


def nodes(found: Mapping[str, str]) -> dict[str, Value]:
    """Values of all nodes of one sample."""
    values: dict[str, Value] = {}
    zones: dict[str, dict[str, str]] = {}
    cooling: dict[str, dict[str, str]] = {}
    supplies: dict[str, dict[str, str]] = {}
    for node, text in found.items():
        if match := _POLICY.match(node):
            values.update(_policy(match[1], match[2], text))
        elif match := _ZONE.match(node):
            zones.setdefault(match[1], {})[match[2]] = text
        elif match := _COOLING.match(node):
            cooling.setdefault(match[1], {})[match[2]] = text
        elif match := _SUPPLY.match(node):
            supplies.setdefault(match[1], {})[match[2]] = text
        elif match := _ZRAM.match(node):
            values.update(_zram(match[1], text))
    values.update(_zones(zones))
    for number, parts in cooling.items():
        if (state := count(parts.get("cur_state", ""))) is not None:
            values[f"cooling_{_word(parts.get('type', number))}_{number}"] = state
    values.update(supply(supplies))
    ratios = cap_ratios(values)
    if ratios:
        values["clock_cap_ratio"] = min(ratios.values())
    return values


def cap_ratios(values: Mapping[str, Value]) -> dict[str, float]:
    """Policy to cap ÷ hardware maximum, for each policy with both (a vendor's controller may cap without saying so elsewhere)."""
    ratios: dict[str, float] = {}
    for name, cap in values.items():
        if name.endswith("_cap_khz"):
            policy = name.removesuffix("_cap_khz")
            most = values.get(f"{policy}_max_khz")
            if isinstance(cap, int) and isinstance(most, int) and most > 0:
                ratios[policy] = cap / most
    return ratios


def supply(supplies: Mapping[str, Mapping[str, str]]) -> dict[str, Value]:
    """Battery and charger of /sys/class/power_supply: the supply whose type is Battery, or is named so."""
    values: dict[str, Value] = {}
    for name, parts in supplies.items():
        if parts.get("type", "Battery" if name.lower() in {"battery", "bms"} else "") == "Battery":
            for node, value, unit in (
                ("capacity", "battery_pct", 1),
                ("current_now", "battery_current_ua", 1),
                ("voltage_now", "battery_voltage_uv", 1),
            ):
                amount = integer(parts.get(node, ""))
                if amount is not None:
                    values.setdefault(value, amount * unit)
            tenths = integer(parts.get("temp", ""))
            if tenths is not None:
                values.setdefault("battery_temp_c", tenths / 10)
            if state := parts.get("status"):
                values.setdefault("battery_status", state)
                # "Not charging" at full charge is still fed by the charger; only "Discharging" is surely not.
                values.setdefault("charging", state in {"Charging", "Full"})
    for name, parts in supplies.items():
        if name.lower() not in {"battery", "bms"} and parts.get("online") == "1":
            values["charging"] = True
    return values


def cpuset(node: str, text: str) -> dict[str, Value]:
    """dev/cpuset/<name>/cpus (or effective_cpus)."""
    parts = node.split("/")
    if len(parts) < 3 or parts[-1] not in {"cpus", "effective_cpus"}:
        return {}
    return {f"cpuset_{_word('_'.join(parts[2:-1]) or 'root')}": text.strip()}


def cpu_list(text: str) -> set[int]:
    """`0-3,6` to the numbers. Parts that are no numbers are left out."""
    found: set[int] = set()
    for part in text.replace(" ", ",").split(","):
        begin, dash, end = part.strip().partition("-")
        first, last = count(begin), count(end if dash else begin)
        if first is not None and last is not None:
            # A kernel has at most 8192 CPUs; a longer range is damage, not a list to build.
            found.update(range(first, min(last, first + 8192) + 1))
    return found


def _policy(policy: str, node: str, text: str) -> dict[str, Value]:
    if node in _FREQUENCIES:
        amount = integer(text)
        return {} if amount is None else {f"{policy}_{_FREQUENCIES[node]}_khz": amount}
    if node in {"affected_cpus", "related_cpus"}:
        return {f"{policy}_cpus": text}
    return {f"{policy}_governor": text} if node == "scaling_governor" else {}


def _zones(zones: Mapping[str, Mapping[str, str]]) -> dict[str, Value]:
    values: dict[str, Value] = {}
    hottest: float | None = None
    for number in sorted(zones, key=int):
        parts = zones[number]
        kind = parts.get("type", number)
        degrees = celsius(parts.get("temp", ""))
        if degrees is None:
            continue
        name = f"zone_{_word(kind)}_c"
        values[name if name not in values else f"zone_{_word(kind)}_{number}_c"] = degrees
        if is_cpu_zone(kind) and (hottest is None or degrees > hottest):
            hottest = degrees
    if hottest is not None:
        values["cpu_temp_c"] = hottest
    return values


def _zram(disk: str, text: str) -> dict[str, Value]:
    fields = text.split()
    names = ("orig_bytes", "compressed_bytes", "used_bytes")
    amounts = zip(names, map(count, fields), strict=False)
    return {f"zram_{disk}_{name}": amount for name, amount in amounts if amount is not None}


def _word(text: str) -> str:
    return re.sub(r"\W+", "_", text.strip().lower()).strip("_")
