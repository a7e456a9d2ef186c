"""Output of Android's `dumpsys` and process listings, as adb's shell gives them, to values.

What these look like on a phone is known from published dumps of Android 9 to 15 and differs between vendors; a line that is
not there gives no value. Nothing here has been checked against more phones than those dumps come from.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from bmoe_proto.kernel_proc import number, pairs, stat
from bmoe_proto.numbers import count

Value = int | float | str | bool | None

_BATTERY_STATUS = {1: "Unknown", 2: "Charging", 3: "Discharging", 4: "Not charging", 5: "Full"}
_WAKEFULNESS = re.compile(r"^\s*(?:mWakefulness|getWakefulnessLocked\(\))=\s*(\w+)", re.MULTILINE)
_DISPLAY = re.compile(
    r"^\s*(?:Display Power|mDisplayPowerState|mScreenState|mActualDisplayState)\s*[:=]\s*(?:state=)?(\w+)", re.MULTILINE
)
_SAVER = re.compile(
    r"^\s*(?:mLowPowerModeEnabled|mSettingBatterySaverEnabled|mIsPowerSaveMode)=(true|false)", re.MULTILINE
)
_DOZE = re.compile(r"\bmState=(\w+)")
_DOZE_LIGHT = re.compile(r"\bmLightState=(\w+)")
_THERMAL_STATUS = re.compile(r"^\s*Thermal Status:\s*(\d{1,18})\b", re.MULTILINE)
# Temperature{mValue=38.2, mType=0, mName=CPU0, mStatus=0}
_TEMPERATURE = re.compile(r"Temperature\{mValue=(-?[\d.]+), mType=(-?\d+), mName=([^,}]*), mStatus=(\d+)\}")
_HAL = "Current temperatures from HAL"
_CPU = "0"  # mType


def battery(text: str) -> dict[str, Value]:
    """`dumpsys battery`: level of scale, temperature in tenths, status by number, what powers it."""
    found = dict(pairs(text))
    values: dict[str, Value] = {}
    level, scale = number(found.get("level", "")), number(found.get("scale", "100"))
    if level is not None:
        values["battery_pct"] = level if not scale or scale == 100 else round(100 * level / scale, 1)
    tenths = number(found.get("temperature", ""))
    if tenths is not None:
        values["battery_temp_c"] = tenths / 10
    state = number(found.get("status", ""))
    if state is not None:
        values["battery_status"] = _BATTERY_STATUS.get(state, str(state))
    powered = [found[key] for key in ("AC powered", "USB powered", "Wireless powered", "Dock powered") if key in found]
    if powered:
        values["charging"] = "true" in powered
    millivolts = number(found.get("voltage", ""))
    if millivolts is not None:
        values["battery_voltage_uv"] = millivolts * 1000 if abs(millivolts) < 100_000 else millivolts
    return values


def power(text: str) -> dict[str, Value]:
    """`dumpsys power`: whether the phone is awake, its screen, and battery saver."""
    values: dict[str, Value] = {}
    if match := _WAKEFULNESS.search(text):
        values["wakefulness"] = match[1]
        values["awake"] = match[1] == "Awake"
    if match := _DISPLAY.search(text):
        values["screen_on"] = match[1].upper() in {"ON", "2", "BRIGHT", "VR"}
    elif "awake" in values and values["wakefulness"] in {"Awake", "Asleep"}:
        values["screen_on"] = values["awake"]
    if match := _SAVER.search(text):
        values["battery_saver"] = match[1] == "true"
    return values


def device_idle(text: str) -> dict[str, Value]:
    """`dumpsys deviceidle`: deep and light doze (`mState=ACTIVE mLightState=ACTIVE`)."""
    values: dict[str, Value] = {}
    if match := _DOZE.search(text):
        values["doze"] = match[1]
    if match := _DOZE_LIGHT.search(text):
        values["doze_light"] = match[1]
    return values


def thermal_service(text: str) -> dict[str, Value]:
    """`dumpsys thermalservice`: status, and the sensors. The cached list is used only when the HAL's is not there.

    `cpu_temp_c` is the hottest CPU sensor that the HAL reads now: for phones that do not let adb's shell read thermal zones. The
    cached list can repeat old values, so it gives none; nor do trip points, which are constants.
    """
    values: dict[str, Value] = {}
    if match := _THERMAL_STATUS.search(text):
        values["thermal_status"] = int(match[1])
    at = text.find(_HAL)
    for match in _TEMPERATURE.finditer(text, max(at, 0)):
        try:
            degrees = float(match[1])
        except ValueError:
            continue
        name = re.sub(r"\W+", "_", match[3].strip().lower()).strip("_")
        if name and -30 < degrees < 150 and degrees != 0:
            values[f"hal_{name}_c"] = degrees
            if at >= 0 and match[2] == _CPU and "trip" not in name:
                values["cpu_temp_c"] = max(degrees, float(values.get("cpu_temp_c") or degrees))
    return values


class Process(NamedTuple):
    """One line of a process listing: CPU ticks since it started, and what names it."""

    pid: int
    command: str
    ticks: int
    start_ticks: int


def processes(text: str) -> Iterator[Process]:
    """Lines of many `/proc/<pid>/stat` files, one after the other."""
    for line in text.splitlines():
        begin, _, rest = line.partition(" (")
        command = rest[: rest.rfind(")")] if ")" in rest else ""
        fields = stat(line)
        user, system, start = (fields.get(name) for name in ("utime_ticks", "stime_ticks", "start_ticks"))
        pid = count(begin)
        if pid is not None and isinstance(user, int) and isinstance(system, int) and isinstance(start, int):
            yield Process(pid, command, user + system, start)
