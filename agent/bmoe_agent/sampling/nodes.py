"""Which kernel files a sample holds.

In: the roots. Out: lists of nodes for the engine, for every sample, and for the samples around a measured part. What is
listed is only what this device has; whether it may be read shows when it is opened.

Law 7 decides the split: what is read every second must be small and must not take the engine's locks, so
`smaps_rollup` (which walks the engine's page tables under its mmap lock), `vmstat`, `stat` and the thermal zones that are
not CPUs belong to entry and exit alone.
"""

from __future__ import annotations

from bmoe_proto.kernel_sys import POLICIES, SUPPLY, THERMAL, is_cpu_zone

from bmoe_agent.roots import Roots

ENGINE_FAST = ("status", "stat", "io", "schedstat", "cpuset")
ENGINE_AROUND = ("cgroup", "oom_score", "oom_score_adj")
ENGINE_SMAPS = "smaps_rollup"
SYSTEM_FAST = ("proc/meminfo", "proc/pressure/cpu", "proc/pressure/memory", "proc/pressure/io")
SYSTEM_AROUND = ("proc/vmstat", "proc/stat", "proc/loadavg", "proc/uptime", "sys/devices/system/cpu/online")
_SUPPLY_FAST = ("capacity", "temp", "status", "current_now")
_SUPPLY_AROUND = ("voltage_now", "online")

# A phone can have a hundred zones and some sensors take a millisecond to answer.
CPU_ZONES_AT_ONCE = 12
ZONES_AROUND = 120


def policies(roots: Roots) -> list[str]:
    """Names of the cpufreq domains, in the order of their CPUs."""
    found = [name for name in roots.names(POLICIES) if name.startswith("policy") and name[6:].isdigit()]
    return sorted(found, key=lambda name: int(name[6:]))


def zones(roots: Roots) -> list[tuple[str, str]]:
    """(zone node, its type) of the thermal zones whose type can be read, by number."""
    found: list[tuple[str, str]] = []
    names = [name for name in roots.names(THERMAL) if name.startswith("thermal_zone") and name[12:].isdigit()]
    for name in sorted(names, key=lambda name: int(name[12:])):
        kind = roots.text(f"{THERMAL}/{name}/type")
        if kind:
            found.append((f"{THERMAL}/{name}", kind))
    return found


def cpu_zones(roots: Roots) -> list[tuple[str, str]]:
    """The zones that are CPU temperatures."""
    return [(node, kind) for node, kind in zones(roots) if is_cpu_zone(kind)]


def supplies(roots: Roots) -> list[str]:
    """Names of the batteries and chargers."""
    return roots.names(SUPPLY)


def fast(roots: Roots) -> list[str]:
    """System nodes of every sample."""
    found = list(SYSTEM_FAST)
    for policy in policies(roots):
        found += [f"{POLICIES}/{policy}/scaling_cur_freq", f"{POLICIES}/{policy}/scaling_max_freq"]
    found += [f"{node}/temp" for node, _ in cpu_zones(roots)[:CPU_ZONES_AT_ONCE]]
    for name in supplies(roots):
        kind = roots.text(f"{SUPPLY}/{name}/type") or name
        if kind.lower() == "battery":
            found += [f"{SUPPLY}/{name}/{node}" for node in _SUPPLY_FAST]
    return found


def fast_constants(roots: Roots) -> list[str]:
    """Nodes that never change and without which those of `fast` cannot be read: hardware limits, names of zones.

    They are read once and go into every sample, so that each sample can be read alone.
    """
    found = [f"{POLICIES}/{policy}/cpuinfo_max_freq" for policy in policies(roots)]
    found += [f"{node}/type" for node, _ in cpu_zones(roots)[:CPU_ZONES_AT_ONCE]]
    return found + [
        f"{SUPPLY}/{name}/type" for name in supplies(roots) if roots.text(f"{SUPPLY}/{name}/type") == "Battery"
    ]


def around_constants(roots: Roots) -> list[str]:
    """The same for `around`: read once, in every full sample."""
    found: list[str] = []
    for policy in policies(roots):
        found += [f"{POLICIES}/{policy}/{node}" for node in ("cpuinfo_min_freq", "related_cpus")]
    found += [f"{node}/type" for node, _ in zones(roots)[:ZONES_AROUND]]
    found += [f"{SUPPLY}/{name}/type" for name in supplies(roots)]
    quick = set(fast_constants(roots))
    return [node for node in found if node not in quick]


def around(roots: Roots) -> list[str]:
    """System nodes of entry, exit, turn and idle samples beside those of `fast`."""
    found = list(SYSTEM_AROUND)
    quick = set(fast(roots))
    found += [f"{POLICIES}/{policy}/scaling_governor" for policy in policies(roots)]
    found += [f"{node}/temp" for node, _ in zones(roots)[:ZONES_AROUND]]
    for name in roots.names(THERMAL):
        if name.startswith("cooling_device"):
            found += [f"{THERMAL}/{name}/type", f"{THERMAL}/{name}/cur_state"]
    for name in supplies(roots):
        # A charger has no capacity and a battery is not "online": only what is there can be refused.
        has = set(roots.names(f"{SUPPLY}/{name}"))
        found += [f"{SUPPLY}/{name}/{node}" for node in (*_SUPPLY_FAST, *_SUPPLY_AROUND) if node in has]
    found += [f"sys/block/{name}/mm_stat" for name in roots.names("sys/block") if name.startswith("zram")]
    return [node for node in found if node not in quick]
