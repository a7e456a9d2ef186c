"""Where the kernel's files are: `/proc` and `/sys`, or a substituted tree of some other device.

In: two directories, or a tree file. Out: `Roots`, through which everything that senses opens, reads and lists.
A substituted tree makes whatever was measured through it simulated.

Nodes are named by path from the root of the tree without a leading slash: `proc/meminfo`, `sys/class/thermal`.

A tree is one TOML file, as `bmoe-agent doctor --record` writes it and `lay` unfolds it into a directory:

    about = "what device this stands for, and whether it was seen or written for the purpose"
    written_for_purpose = true
    page_bytes = 16384            # optional: what sysconf answered there
    clock_ticks_per_s = 100       # optional
    [properties]                  # getprop, as far as recorded
    "ro.build.version.sdk" = "35"
    [text]                        # node to its bytes as text
    "proc/meminfo" = '''MemTotal: ...'''
    [refused]                     # node to the name of the error that opening it gave
    "proc/stat" = "EACCES"

Other tables (a recorded phone's versions, settings and permissions) are for people and tests; nothing is read from them here.

In a laid tree the same file without `[text]` lies at the top as `tree.toml`, since permissions of files mean nothing
to a root user: a refused node is refused because the tree says so.
"""

from __future__ import annotations

import errno
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

_NOTHING: Mapping[str, Any] = MappingProxyType({})
_READ_LIMIT = 1 << 20


class TreeError(ValueError):
    """A tree file that does not say what a tree file must; the message names the file and what is wrong."""


@dataclass(frozen=True, slots=True)
class Roots:
    """The two roots, and what a substituted tree says of the device it stands for."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    refused: Mapping[str, int] = field(default_factory=lambda: _NOTHING)
    properties: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    page_bytes: int | None = None
    clock_ticks_per_s: int | None = None

    @property
    def substituted(self) -> bool:
        """Whether these are anything but this machine's own."""
        return self.proc != Path("/proc") or self.sys != Path("/sys")

    def path(self, node: str) -> str:
        """The node's place in the file system."""
        top, _, rest = node.partition("/")
        base = self.proc if top == "proc" else self.sys
        return os.path.join(base, rest) if rest else str(base)

    def open(self, node: str) -> int:
        """A descriptor for reading. Raises OSError as the kernel (or the tree) refuses."""
        code = self.refused.get(node)
        if code is not None:
            raise OSError(code, os.strerror(code), node)
        return os.open(self.path(node), os.O_RDONLY | os.O_CLOEXEC)

    def read(self, node: str) -> bytes:
        """The whole node, up to 1 MiB. Raises OSError."""
        descriptor = self.open(node)
        try:
            parts: list[bytes] = []
            size = 0
            while size < _READ_LIMIT and (part := os.read(descriptor, 65536)):
                parts.append(part)
                size += len(part)
            return b"".join(parts)
        finally:
            os.close(descriptor)

    def text(self, node: str) -> str | None:
        """The node as stripped text, None when it cannot be read for whatever reason."""
        try:
            return self.read(node).decode("utf-8", "replace").strip()
        except OSError:
            return None

    def names(self, node: str) -> list[str]:
        """Names in a directory, sorted; empty when it cannot be listed."""
        if node in self.refused:
            return []
        try:
            return sorted(os.listdir(self.path(node)))
        except OSError:
            return []

    @property
    def page_size(self) -> int:
        """Bytes in a page of the device these roots stand for (16 KiB on many phones: never assumed)."""
        return self.page_bytes or os.sysconf("SC_PAGE_SIZE")

    @property
    def ticks_per_s(self) -> int:
        """Clock ticks a second, the unit of CPU times in `stat`."""
        return self.clock_ticks_per_s or os.sysconf("SC_CLK_TCK")

    @classmethod
    def from_tree(cls, folder: Path) -> Roots:
        """The roots of a laid tree. Raises TreeError."""
        about = _load(folder / "tree.toml")
        return cls(folder / "proc", folder / "sys", **about)


def lay(file: Path, into: Path) -> Roots:
    """Unfold a tree file into a directory and return its roots. Raises TreeError."""
    described = _parse(file)
    nodes = described.get("text", {})
    (into / "proc").mkdir(parents=True, exist_ok=True)
    (into / "sys").mkdir(parents=True, exist_ok=True)
    for node, text in nodes.items():
        place = Path(os.path.normpath(into / node))
        if node.partition("/")[0] not in {"proc", "sys"} or not place.is_relative_to(into):
            raise TreeError(f"{file}: node {node!r} is outside proc/ and sys/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(str(text).encode("utf-8", "surrogateescape"))
    (into / "tree.toml").write_text(dump({**described, "text": {}}), encoding="utf-8")
    return Roots.from_tree(into)


def dump(described: Mapping[str, Any]) -> str:
    """A tree description as the TOML of a tree file."""
    lines = [f"{key} = {_toml(value)}" for key, value in described.items() if not isinstance(value, Mapping)]
    others = [key for key, value in described.items() if isinstance(value, Mapping)]
    for table in dict.fromkeys(("properties", *others, "text", "refused")):
        rows = described.get(table) or {}
        lines += ["", f"[{table}]", *(f"{_toml(str(key))} = {_toml(value)}" for key, value in rows.items())]
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)
    escaped = "".join(
        {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t"}.get(char)
        or (f"\\u{ord(char):04x}" if ord(char) < 32 or ord(char) == 127 else char)
        for char in str(value)
    )
    return f'"{escaped}"'


def _parse(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as problem:
        raise TreeError(f"{file}: not a readable tree file: {problem}") from problem


def _load(file: Path) -> dict[str, Any]:
    described = _parse(file)
    refused: dict[str, int] = {}
    for node, name in described.get("refused", {}).items():
        code = getattr(errno, str(name), None)
        if not isinstance(code, int):
            raise TreeError(f"{file}: {node} is refused with {name!r}, which is no error name (EACCES, ENOENT, ...)")
        refused[node] = code
    return {
        "refused": refused,
        "properties": {str(key): str(value) for key, value in described.get("properties", {}).items()},
        "page_bytes": described.get("page_bytes"),
        "clock_ticks_per_s": described.get("clock_ticks_per_s"),
    }
