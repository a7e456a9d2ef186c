"""What the agent itself runs on: Python, grpcio, protobuf, page size, clocks, and which sensors this phone lets it read.

In: the roots, the home. Out: checks. Nothing of gRPC is imported before its own check asks for it, so that a phone without it hears
what to install instead of a traceback.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path

from bmoe_agent.doctor.check import FAIL, OK, UNKNOWN, WARN, Check, Looker
from bmoe_agent.roots import Roots

AGAIN = "bmoe-agent-setup --upgrade"
_PYTHON = (3, 11)


@dataclass(frozen=True, slots=True)
class Runtime:
    """Checks of what runs the agent."""

    roots: Roots
    home: Path
    android: bool

    def lookers(self) -> list[tuple[str, Looker]]:
        """All checks of this module."""
        return [
            ("python", self.python),
            ("grpcio", self.grpcio),
            ("protobuf", self.protobuf),
            ("page_size", self.page_size),
            ("clock", self.clock),
            ("sensors", self.sensors),
        ]

    def python(self) -> Iterator[Check]:
        """Whether this Python is new enough, and the one the virtual environment was made for."""
        version = platform.python_version()
        if sys.version_info[:2] < _PYTHON:
            yield Check("python", FAIL, f"Python {version}: 3.11 is the oldest", ["pkg upgrade python", AGAIN])
            return
        configured = Path(sys.prefix) / "pyvenv.cfg"
        made_for = ""
        if configured.exists():
            for line in configured.read_text(encoding="utf-8", errors="replace").splitlines():
                key, _, value = line.partition("=")
                if key.strip() in {"version", "version_info"}:
                    made_for = ".".join(value.strip().split(".")[:2])
        here = f"{sys.version_info[0]}.{sys.version_info[1]}"
        if made_for and made_for != here:
            seen = f"Python {version}, but {sys.prefix} was made for {made_for}: its packages are orphaned"
            yield Check("python", FAIL, seen, [AGAIN])
        else:
            yield Check("python", OK, f"Python {version} on {sys.platform}")

    def grpcio(self) -> Iterator[Check]:
        """Whether gRPC is there and not older than the stubs."""
        fix = ["pkg install python-grpcio", AGAIN] if self.android else ["pip install grpcio"]
        yield _package("grpcio", "grpc", "bmoe_proto.v1.telemetry_pb2_grpc", fix)

    def protobuf(self) -> Iterator[Check]:
        """Whether protobuf is there, not older than the stubs, and which implementation it is."""
        found = _package("protobuf", "google.protobuf", "bmoe_proto.v1.telemetry_pb2", [AGAIN])
        if found.state == OK:
            from bmoe_agent.device import protobuf_implementation

            found = Check("protobuf", OK, f"{found.seen}, {protobuf_implementation()} implementation")
        yield found

    def page_size(self) -> Iterator[Check]:
        """How large a page is: engines built for 4 KiB do not load where it is 16 KiB (checked with each engine)."""
        size = self.roots.page_size
        if size & (size - 1) or not 4096 <= size <= 65536:
            yield Check("page_size", WARN, f"{size} bytes: unheard of")
        else:
            yield Check("page_size", OK, f"{size} bytes")

    def clock(self) -> Iterator[Check]:
        """Whether the boot clock runs and the wall clock is plausible: runs are ordered by one and dated by the other."""
        if not hasattr(time, "CLOCK_BOOTTIME"):
            yield Check("clock", WARN, "no CLOCK_BOOTTIME: times stop while the phone sleeps")
            return
        before = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        try:
            installed = Path(__file__).stat().st_mtime
        except OSError:
            installed = 0.0
        wall = time.time()
        seen = f"{time.strftime('%Y-%m-%d %H:%M:%S %z', time.localtime(wall))}, up {before / 3.6e12:.1f} h"
        if wall < installed - 86400:
            fix = ["on the phone: Settings > System > Date & time > Set automatically"]
            yield Check("clock", FAIL, f"{seen}: older than this program's own files", fix)
        elif time.clock_gettime_ns(time.CLOCK_BOOTTIME) < before:
            yield Check("clock", FAIL, f"{seen}: the boot clock runs backwards")
        else:
            yield Check("clock", OK, seen)

    def sensors(self) -> Iterator[Check]:
        """Which gates can be read here, and which only with a host or not at all."""
        from bmoe_agent.gates import Gates

        readable, blind = Gates(self.roots, self.home).readable()
        readable = [name for name in readable if name != "speed_probe_ratio"]
        blind.pop("speed_probe_ratio", None)  # `baseline` says it
        yield Check("sensors", OK if readable else WARN, f"readable: {', '.join(readable) or 'none'}")
        for name, why in blind.items():
            fix = ["pkg install termux-api and the Termux:API app"] if name in {"battery_pct", "charging"} else []
            yield Check("sensors", WARN if name == "cpu_temp_c" else UNKNOWN, f"{name}: {why}", fix)


def _package(distribution: str, module: str, stubs: str, fix: list[str]) -> Check:
    try:
        import_module(module)
    except Exception as problem:
        return Check(distribution, FAIL, f"cannot be imported: {problem}", fix)
    try:
        version = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        version = "of unknown version"
    try:
        import_module(stubs)
    except Exception as problem:  # the stubs refuse a runtime older than their generator, each in its own way
        return Check(distribution, FAIL, f"{distribution} {version}: {problem}", fix)
    where = os.path.dirname(getattr(import_module(module), "__file__", None) or "")
    return Check(distribution, OK, f"{distribution} {version} ({where})" if where else f"{distribution} {version}")
