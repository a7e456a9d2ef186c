"""What a phone's answers say about a night: `Answers` in, checks out. Pure.

What `dumpsys`, `am`, `cmd` and `pm` print is known from published output of Android 9 to 15 and differs between vendors; the
parsers are tested with samples written for the purpose and have not been verified on a phone. What is not understood is `unknown`.

    dumpsys deviceidle whitelist   lines `user,com.termux,10312`; kinds system-excidle, system, user
    am get-standby-bucket PKG      5 exempted, 10 active, 20 working set, 30 frequent, 40 rare, 45 restricted, 50 never
    cmd appops get PKG OP          `RUN_ANY_IN_BACKGROUND: allow` (also ignore, deny, default), or `No operations.`
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator

from bmoe_proto import android, kernel_dump
from bmoe_proto.kernel_sys import cpu_list

from bmoe_collector.doctor.asking import Answers
from bmoe_collector.doctor.check import FAIL, OK, UNKNOWN, WARN, Check

_BUCKETS = {
    5: "exempted",
    10: "active",
    20: "working set",
    30: "frequent",
    40: "rare",
    45: "restricted",
    50: "never used",
}
_HEAD = re.compile(r"^==> (?P<name>.+) <==$", re.MULTILINE)
_BACKGROUND = ("background", "restricted", "system-background")
_LITTLE_KIB = 1 << 20
_CLOCK_OFF_S = 120


def examine(answers: Answers, now_s: float | None = None) -> list[Check]:
    """All checks of one phone."""
    sdk_text = answers.text.get("sdk", "")
    sdk = int(sdk_text) if sdk_text.isdigit() else None
    found: list[Check] = [version(answers, sdk)]
    if sdk is not None:
        found += [termux(answers), phantom(answers, sdk), freezer(answers, sdk)]
        found += [battery_exemption(answers), standby_bucket(answers), background(answers)]
    else:
        found += [_unasked(name) for name in ("phantom_processes", "freezer", "battery_exemption", "standby_bucket")]
    each: list[Callable[[Answers], Iterator[Check]]] = [
        cpusets,
        awake,
        wake_lock,
        thermal,
        clock_caps,
        storage,
        page_size,
    ]
    for look in each:
        found.extend(look(answers))
    found.append(wall_clock(answers, time.time() if now_s is None else now_s))
    return found


def version(answers: Answers, sdk: int | None) -> Check:
    """Which Android."""
    if sdk is None:
        seen = "no Android's shell: " + answers.refused.get("sdk", "getprop says nothing of a version")
        return Check("android", UNKNOWN, seen)
    return Check(
        "android", OK, f"Android {android.release_of(sdk)} (API {sdk}), {answers.text.get('model') or 'no model'}"
    )


def _unasked(name: str) -> Check:
    return Check(name, UNKNOWN, "not asked: this is no Android")


def termux(answers: Answers) -> Check:
    """Termux, and the apps beside it."""
    if "packages" not in answers.text:
        return Check("termux", UNKNOWN, answers.refused.get("packages", ""))
    have = set(re.findall(r"^package:(\S+)$", answers.text["packages"], re.MULTILINE))
    if android.PACKAGE not in have:
        return Check(
            "termux", FAIL, "Termux is not installed", ["install Termux from F-Droid or GitHub, not from Google Play"]
        )
    if "com.termux.boot" not in have:
        fix = ["install Termux:Boot from where Termux came from, and open it once"]
        return Check("termux", WARN, "Termux, but no Termux:Boot: the agent stays away after a restart", fix)
    return Check("termux", OK, ", ".join(sorted(have)))


def phantom(answers: Answers, sdk: int) -> Check:
    """Whether Android ends child processes."""
    names = (android.MONITOR, android.MONITOR_PROPERTY, "max_phantom_processes", "sync_disabled")
    state, seen = android.phantom_state(sdk, {name: answers.text[name] for name in names if name in answers.text})
    return Check("phantom_processes", state, seen, [] if state == OK else android.phantom_fix(sdk))


def freezer(answers: Answers, sdk: int) -> Check:
    """Whether Android freezes apps in the background."""
    names = (android.FREEZER, "use_freezer")
    state, seen = android.freezer_state(sdk, {name: answers.text[name] for name in names if name in answers.text})
    return Check("freezer", state, seen, [] if state == OK else android.freezer_fix(sdk))


def battery_exemption(answers: Answers) -> Check:
    """Whether Termux is on the list of apps that doze leaves alone."""
    if "whitelist" not in answers.text:
        return Check("battery_exemption", UNKNOWN, answers.refused.get("whitelist", ""), android.battery_fix())
    kinds = whitelist(answers.text["whitelist"])
    if not kinds:
        return Check("battery_exemption", UNKNOWN, "the list is not understood", android.battery_fix())
    kind = kinds.get(android.PACKAGE)
    if kind is None:
        return Check("battery_exemption", FAIL, f"Termux is not among {len(kinds)} exempt apps", android.battery_fix())
    return Check("battery_exemption", OK, f"Termux is exempt ({kind})")


def whitelist(text: str) -> dict[str, str]:
    """Package to kind, of `dumpsys deviceidle whitelist`; a user's own choice stands over the system's."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        words = line.strip().split(",")
        kind = words[0]
        if len(words) >= 2 and kind in {"system-excidle", "system", "user"} and found.get(words[1]) != "user":
            found[words[1]] = kind
    return found


def standby_bucket(answers: Answers) -> Check:
    """How much Android holds Termux back."""
    text = answers.text.get("bucket", "")
    number = re.fullmatch(r"(?:\S+:\s*)?(\d+)", text)
    if not number:
        return Check("standby_bucket", UNKNOWN, answers.refused.get("bucket", f"not understood: {text[:60]!r}"))
    value = int(number[1])
    seen = f"{value} ({_BUCKETS.get(value, 'unheard of')})"
    return Check("standby_bucket", OK if value <= 20 else WARN, seen, [] if value <= 20 else android.bucket_fix())


def background(answers: Answers) -> Check:
    """Whether a person or the vendor forbade Termux to run in the background."""
    text = answers.text.get("background")
    if text is None:
        return Check("background_allowed", UNKNOWN, answers.refused.get("background", ""))
    said = re.search(r"RUN_ANY_IN_BACKGROUND:\s*(\w+)", text)
    word = said[1].lower() if said else "default"
    if word in {"ignore", "deny"}:
        fix = [f"adb shell cmd appops set {android.PACKAGE} RUN_ANY_IN_BACKGROUND allow"]
        return Check("background_allowed", FAIL, f"RUN_ANY_IN_BACKGROUND is {word}", fix)
    return Check("background_allowed", OK, f"RUN_ANY_IN_BACKGROUND is {word}")


def heads(text: str) -> dict[str, str]:
    """Output of `head` over several files, by file."""
    found: dict[str, str] = {}
    places = list(_HEAD.finditer(text))
    for place, after in zip(places, [*places[1:], None], strict=False):
        found[place["name"]] = text[place.end() : after.start() if after else len(text)].strip()
    return found


def cpusets(answers: Answers) -> Iterator[Check]:
    """Whether background apps, and the agent now, may run on the fastest CPUs."""
    clocks = heads(answers.text.get("clocks", ""))
    fastest = _fastest(clocks)
    groups = {name.split("/")[-2]: text for name, text in heads(answers.text.get("cpusets", "")).items() if "/" in name}
    if not fastest or not groups:
        why = answers.refused.get("cpusets") or answers.refused.get("clocks") or "not understood"
        yield Check("background_cpuset", UNKNOWN, why)
    for name in _BACKGROUND:
        if fastest and (cpus := groups.get(name)):
            short = sorted(fastest - cpu_list(cpus))
            seen = f"{name}: CPUs {cpus}; the fastest are {','.join(map(str, sorted(fastest)))}"
            if name == "background":
                fix = ["keep Termux in front with the screen on while measuring: adb shell svc power stayon true"]
                yield Check("background_cpuset", WARN if short else OK, seen, fix if short else [])
    if "agents" not in answers.text:
        return
    now = re.findall(r"pid (\d+)\s+Cpus_allowed_list:\s*(\S+)\s+cpuset ?(\S*)", answers.text["agents"])
    for pid, allowed, group in now:
        short = sorted(fastest - cpu_list(allowed))
        seen = f"the agent (pid {pid}) may run on CPUs {allowed} {group}".rstrip()
        fix = android.battery_fix()[:1] + android.bucket_fix()
        yield Check("agent_cpus", FAIL if short else OK if fastest else UNKNOWN, seen, fix if short else [])


def _fastest(clocks: dict[str, str]) -> set[int]:
    speeds = {
        name.split("/")[0]: int(text)
        for name, text in clocks.items()
        if name.endswith("cpuinfo_max_freq") and text.isdigit()
    }
    found: set[int] = set()
    for policy, khz in speeds.items():
        if khz == max(speeds.values()):
            found |= cpu_list(clocks.get(f"{policy}/related_cpus", "") or policy.removeprefix("policy"))
    return found


def awake(answers: Answers) -> Iterator[Check]:
    """Whether the phone is awake, dozing, or saving."""
    values = kernel_dump.power(answers.text.get("power", ""))
    state = values.get("wakefulness")
    doze = answers.text.get("doze", "")
    if state is None:
        yield Check("awake", UNKNOWN, answers.refused.get("power", "dumpsys power is not understood"))
    else:
        seen = f"wakefulness {state}" + (f", doze {doze}" if doze else "")
        good = values.get("awake") is True and not doze.startswith("IDLE")
        fix = ["adb shell svc power stayon true && adb shell input keyevent KEYCODE_WAKEUP"]
        yield Check("awake", OK if good else WARN, seen, [] if good else fix)
    if values.get("battery_saver") is True:
        fix = ["adb shell settings put global low_power 0"]
        yield Check("battery_saver", FAIL, "battery saver is on: clocks are held down", fix)


def wake_lock(answers: Answers) -> Iterator[Check]:
    """Whether Termux holds its wake lock now. It need not: the agent takes it while a plan runs."""
    text = answers.text.get("power")
    if text is None:
        yield Check("wake_lock", UNKNOWN, answers.refused.get("power", ""))
        return
    held = re.search(r"PARTIAL_WAKE_LOCK.*termux", text)
    seen = "held" if held else "not held now; the agent takes it while a plan runs"
    yield Check("wake_lock", OK, f"{seen} (it prevents neither freezing nor killing)")


def thermal(answers: Answers) -> Iterator[Check]:
    """What the thermal service says."""
    values = kernel_dump.thermal_service(answers.text.get("thermal", ""))
    if not values:
        yield Check(
            "thermal_service", UNKNOWN, answers.refused.get("thermal", "dumpsys thermalservice is not understood")
        )
        return
    status = values.get("thermal_status")
    sensors = sorted(name.removeprefix("hal_").removesuffix("_c") for name in values if name.startswith("hal_"))
    seen = f"status {status}, sensors: {', '.join(sensors) or 'none'}"
    hot = isinstance(status, int) and status > 0
    yield Check("thermal_service", WARN if hot else OK, seen, ["let it cool, off the charger"] if hot else [])


def clock_caps(answers: Answers) -> Iterator[Check]:
    """Whether any frequency domain is held below what its hardware can do: a cap may stand while the thermal status reads 0."""
    clocks = heads(answers.text.get("clocks", ""))
    pairs = [
        (name.split("/")[0], int(text), int(clocks.get(name.replace("cpuinfo", "scaling"), "") or 0))
        for name, text in clocks.items()
        if name.endswith("cpuinfo_max_freq")
        and text.isdigit()
        and clocks.get(name.replace("cpuinfo", "scaling"), "").isdigit()
    ]
    if not pairs:
        yield Check("clock_caps", UNKNOWN, answers.refused.get("clocks", "not understood"))
        return
    held = [f"{policy} {cap} of {most} kHz" for policy, most, cap in pairs if cap < most]
    yield Check(
        "clock_caps",
        WARN if held else OK,
        ", ".join(held) if held else f"{len(pairs)} frequency domains are not held down",
        ["let it cool; switch battery saver and game modes off"] if held else [],
    )


def storage(answers: Answers) -> Iterator[Check]:
    """Room on the phone."""
    rows = [line.split() for line in answers.text.get("storage", "").splitlines()[1:]]
    row = next((row for row in rows if len(row) >= 4 and row[-3].isdigit()), None)
    if row is None:
        yield Check("free_space", UNKNOWN, answers.refused.get("storage", "df is not understood"))
        return
    free = int(row[-3])
    seen = f"{free >> 10} MiB free on /data"
    yield Check("free_space", FAIL if free < _LITTLE_KIB // 4 else WARN if free < _LITTLE_KIB else OK, seen)


def page_size(answers: Answers) -> Iterator[Check]:
    """How large a page is: an engine aligned to less does not load (the phone's own doctor looks into the file)."""
    text = answers.text.get("page", "")
    if text.isdigit():
        large = int(text) > 4096
        seen = f"{text} bytes" + ("; engines must be aligned to as much" if large else "")
        yield Check("page_size", OK, seen, ["on the phone: bmoe-agent doctor"] if large else [])
    else:
        yield Check("page_size", UNKNOWN, answers.refused.get("page", "not understood"))


def wall_clock(answers: Answers, now_s: float) -> Check:
    """Whether the phone's date is this host's."""
    text = answers.text.get("time", "")
    if not text.isdigit():
        return Check("clock", UNKNOWN, answers.refused.get("time", "date is not understood"))
    off = int(text) - now_s
    if abs(off) > _CLOCK_OFF_S:
        fix = ["adb shell settings put global auto_time 1"]
        return Check("clock", WARN, f"the phone's clock is {off:+.0f} s off this host's", fix)
    return Check("clock", OK, f"within {_CLOCK_OFF_S} s of this host's")
