"""What phone this is: CPUs, memory, page size, Android's properties, versions of the runtime.

In: the roots (a substituted tree brings its own properties and page size). Out: `DeviceFacts`. Works on Android
(`getprop`; `sys.platform` is "android" from CPython 3.13) and on plain Linux. What this uid may not read is absent.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from importlib import metadata

from bmoe_proto.kernel_proc import meminfo
from bmoe_proto.kernel_sys import POLICIES, cpu_list
from bmoe_proto.v1 import telemetry_pb2 as pb

from bmoe_agent.roots import Roots
from bmoe_agent.sampling.nodes import policies

# Properties that say what hardware and build this is. Serial numbers, accounts and network names stay on the phone.
_WANTED = (
    "ro.product.manufacturer",
    "ro.product.brand",
    "ro.product.model",
    "ro.product.device",
    "ro.product.board",
    "ro.board.platform",
    "ro.hardware",
    "ro.soc.manufacturer",
    "ro.soc.model",
    "ro.build.version.release",
    "ro.build.version.sdk",
    "ro.build.version.security_patch",
    "ro.build.type",
    "ro.build.display.id",
    "ro.product.cpu.abi",
    "ro.product.cpu.pagesize.max",
    "sys.settings_enable_monitor_phantom_procs",
    "persist.sys.fflag.override.settings_enable_monitor_phantom_procs",
)
_PROPERTY = re.compile(r"^\[([^\]]+)\]: \[(.*)\]$", re.MULTILINE)
_GETPROP_TIMEOUT_S = 10


def describe(roots: Roots, uuid: bytes = b"", name: str = "", version: str = "") -> pb.DeviceFacts:
    """Facts of the device the roots stand for."""
    facts = pb.DeviceFacts(
        agent_uuid=uuid,
        name=name,
        page_bytes=roots.page_size,
        clock_ticks_per_s=roots.ticks_per_s,
        simulated=roots.substituted,
        python_version=platform.python_version(),
        protobuf_version=_version("protobuf"),
        protobuf_implementation=protobuf_implementation(),
        grpc_version=_version("grpcio"),
        agent_version=version or _version("bmoe-fleet"),
    )
    total = meminfo(roots.text("proc/meminfo") or "").get("mem_total_kib")
    if isinstance(total, int):
        facts.memory_total_kib = total
    for key, value in properties(roots).items():
        facts.properties[key] = value
    facts.cpus.extend(cpus(roots))
    return facts


def properties(roots: Roots) -> dict[str, str]:
    """What identifies the hardware and the system, by source: `getprop` names as they are, others with `uname.` or `cpuinfo.`."""
    found = dict(roots.properties) if roots.substituted else {k: v for k, v in getprop().items() if k in _WANTED and v}
    if not roots.substituted:
        uname = os.uname()
        found.update({"uname.sysname": uname.sysname, "uname.release": uname.release, "uname.machine": uname.machine})
        found["uname.version"] = uname.version
    elif version := roots.text("proc/version"):
        found["proc.version"] = version
    for line in (roots.text("proc/cpuinfo") or "").splitlines():
        key, colon, value = line.partition(":")
        if colon and key.strip() in {"Hardware", "model name"}:
            found.setdefault(f"cpuinfo.{key.strip().replace(' ', '_').lower()}", value.strip())
    found["system"] = "android" if is_android(roots) else "linux"
    return found


def is_android(roots: Roots) -> bool:
    """Whether this is Android, by its properties rather than by a build constant of this Python."""
    if roots.substituted:
        return "ro.build.version.sdk" in roots.properties
    return os.path.exists("/system/bin/getprop") or "ANDROID_ROOT" in os.environ


def getprop() -> dict[str, str]:
    """All of Android's properties; empty where there is no getprop or it does not answer."""
    command = shutil.which("getprop") or "/system/bin/getprop"
    try:
        ran = subprocess.run(
            [command], capture_output=True, timeout=_GETPROP_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return dict(_PROPERTY.findall(ran.stdout.decode("utf-8", "replace").replace("\r\n", "\n")))


def cpus(roots: Roots) -> list[pb.CpuFacts]:
    """Every present CPU with its limits, by number."""
    by_cpu: dict[int, str] = {}
    for policy in policies(roots):
        related = (
            roots.text(f"{POLICIES}/{policy}/related_cpus") or roots.text(f"{POLICIES}/{policy}/affected_cpus") or ""
        )
        by_cpu.update(dict.fromkeys(cpu_list(related) or {int(policy[6:])}, policy))
    base = "sys/devices/system/cpu"
    numbers = cpu_list(roots.text(f"{base}/present") or "") | set(by_cpu)
    if not numbers:
        numbers = {int(name[3:]) for name in roots.names(base) if name.startswith("cpu") and name[3:].isdigit()}
    found: list[pb.CpuFacts] = []
    for number in sorted(numbers):
        policy = by_cpu.get(number, "")
        facts = pb.CpuFacts(cpu=number, policy=policy)
        frequencies = f"{POLICIES}/{policy}" if policy else f"{base}/cpu{number}/cpufreq"
        for name, node in (("max_khz", "cpuinfo_max_freq"), ("min_khz", "cpuinfo_min_freq")):
            text = roots.text(f"{frequencies}/{node}") or ""
            if text.isdigit():
                setattr(facts, name, int(text))
        package = roots.text(f"{base}/cpu{number}/topology/physical_package_id") or ""
        if package.isdigit():  # phones answer -1 where the firmware does not say
            facts.package = int(package)
        found.append(facts)
    return found


def fastest_cpus(found: list[pb.CpuFacts]) -> set[int]:
    """CPUs of the fastest cluster; empty when no CPU says how fast it is."""
    most = max((cpu.max_khz for cpu in found), default=0)
    return {cpu.cpu for cpu in found if most and cpu.max_khz == most}


def protobuf_implementation() -> str:
    """What this process's protobuf runs on: `upb` or `python`."""
    from google.protobuf.internal import api_implementation

    return str(api_implementation.Type())


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
