"""What Android does to background work, and the switch for it in each version: the one table both doctors print from.

In: an API level (`ro.build.version.sdk`) and settings as text. Out: commands to type, and what a set of settings means. Pure.

    API 29 and before   nothing counts child processes
    API 30 (11)         the cached-app freezer exists, off on most phones
    API 31 (12)         32 child processes for all apps together; only `device_config` changes it, and Google's sync puts it
                        back unless the sync is disabled
    API 32, 33 (12L, 13) `settings_enable_monitor_phantom_procs` switches counting and the check for excess CPU off
    API 34 (14) on      the same, and a developer option "Disable child process restrictions" that sets it

From public documents of Android and Termux; not seen on a phone by this project.
"""

from __future__ import annotations

from collections.abc import Mapping

PACKAGE = "com.termux"
PHANTOM_LIMIT = 32
MONITOR = "settings_enable_monitor_phantom_procs"
MONITOR_PROPERTY = f"persist.sys.fflag.override.{MONITOR}"
FREEZER = "cached_apps_freezer"
FREEZER_PROPERTY = "persist.device_config.activity_manager_native_boot.use_freezer"
_RELEASES = {28: "9", 29: "10", 30: "11", 31: "12", 32: "12L", 33: "13", 34: "14", 35: "15", 36: "16"}


def release_of(sdk: int) -> str:
    """The version people know an API level by."""
    return _RELEASES.get(sdk, f"API {sdk}")


def phantom_fix(sdk: int) -> list[str]:
    """What stops child processes from being killed on this version; empty where nothing kills them."""
    if sdk < 31:
        return []
    if sdk == 31:
        return [
            'adb shell "/system/bin/device_config set_sync_disabled_for_tests persistent"',
            'adb shell "/system/bin/device_config put activity_manager max_phantom_processes 2147483647"',
        ]
    commands = [f"adb shell settings put global {MONITOR} false"]
    if sdk >= 34:
        commands.append("or on the phone: Settings > Developer options > Disable child process restrictions")
    return commands


def freezer_fix(sdk: int) -> list[str]:
    """What keeps background apps from being frozen; empty where there is no freezer."""
    if sdk < 30:
        return []
    return [
        f"adb shell settings put global {FREEZER} disabled && adb reboot",
        'or on the phone: Settings > Developer options > "Suspend execution for cached apps" > Disabled',
    ]


def battery_fix(package: str = PACKAGE) -> list[str]:
    """What exempts Termux from battery optimisation, so that doze leaves it its network and wake locks."""
    return [
        f"adb shell dumpsys deviceidle whitelist +{package}",
        "or on the phone: Settings > Apps > Termux > Battery > Unrestricted",
    ]


def bucket_fix(package: str = PACKAGE) -> list[str]:
    """What takes Termux out of a standby bucket that is held back."""
    return [f"adb shell am set-standby-bucket {package} active"]


def phantom_state(sdk: int, settings: Mapping[str, str]) -> tuple[str, str]:
    """(`ok`, `fail` or `unknown`, what was seen) of the killer of child processes.

    `settings` holds what could be read, by name: `MONITOR` (global setting), `MONITOR_PROPERTY`, `max_phantom_processes` and
    `sync_disabled` (`device_config`). A name that is missing could not be asked; "null" or "" means: never set.
    """
    if sdk < 31:
        return "ok", f"Android {release_of(sdk)} does not count child processes"
    limit = _number(settings.get("max_phantom_processes"))
    raised = limit is not None and limit > 4096
    if sdk == 31:
        if raised and settings.get("sync_disabled") in {"none", "", "null"}:
            return "fail", f"max_phantom_processes={limit}, but Google's sync is on and will put it back"
        if raised:
            return "ok", f"max_phantom_processes={limit}"
        if "max_phantom_processes" not in settings:
            return "unknown", "device_config cannot be asked from here"
        return "fail", f"at most {limit or PHANTOM_LIMIT} child processes for all apps together"
    for name in (MONITOR, MONITOR_PROPERTY):  # a global setting stands over the property
        if settings.get(name, "").lower() in {"false", "0"}:
            return "ok", f"{name}=false"
        if settings.get(name, "").lower() in {"true", "1"}:
            return "fail", f"{name}=true"
    if raised:
        return "fail", f"max_phantom_processes={limit}, but excess CPU is still watched ({MONITOR} is not false)"
    if MONITOR not in settings:
        return "unknown", "the setting cannot be read from here, and no property says it is off"
    return "fail", f"{MONITOR} is not set: {limit or PHANTOM_LIMIT} child processes for all apps, excess CPU is watched"


def freezer_state(sdk: int, settings: Mapping[str, str]) -> tuple[str, str]:
    """(`ok`, `warn` or `unknown`, what was seen) of the cached-app freezer, from `FREEZER` and `FREEZER_PROPERTY` or `use_freezer`."""
    if sdk < 30:
        return "ok", f"Android {release_of(sdk)} has no freezer"
    chosen = settings.get(FREEZER, "").lower()
    flag = (settings.get("use_freezer") or settings.get(FREEZER_PROPERTY) or "").lower()
    if chosen == "disabled":
        return "ok", f"{FREEZER}=disabled"
    if chosen == "enabled":
        return "warn", f"{FREEZER}=enabled: the agent may stop within 10 s of the screen going off"
    if flag == "false":
        return "ok", "use_freezer=false"
    if flag == "true":
        return "warn", "use_freezer=true: the agent may stop within 10 s of the screen going off"
    if FREEZER not in settings:
        return "unknown", "the setting cannot be read from here"
    if sdk >= 31:
        return "warn", "left to the phone: on most since Android 12 it is on"
    return "unknown", "left to the phone"


def _number(text: str | None) -> int | None:
    try:
        return int(text or "")
    except ValueError:
        return None
