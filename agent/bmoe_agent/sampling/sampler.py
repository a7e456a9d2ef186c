"""One run's samples: kernel files opened once, read again with `pread`, handed on as they were read.

In: the roots and, once there is one, the engine's pid. Out: `Sample` messages, or their encoding made by hand, since
protobuf on Termux is the pure-Python runtime and this runs every second beside a measurement.

A file that refuses is told with its errno the first time, left out afterwards, and tried again for the samples around the
measured part. A descriptor of /proc/<pid> belongs to that process alone: when it is gone reads fail with ESRCH, whoever
gets its pid later; so nothing of the engine is opened again once a read has said so.

What never changes (hardware limits of frequency domains, types of zones) is read once and put into every sample, so that
each can be read alone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable

from bmoe_proto.sample_text import CUT, VERSION, head, refusal, short_varints, varint
from bmoe_proto.v1 import telemetry_pb2 as pb

from bmoe_agent.roots import Roots
from bmoe_agent.sampling import nodes

FULL_KINDS = frozenset({"entry", "launch", "exit", "turn", "idle"})
# smaps_rollup walks the engine's page tables under its own mmap lock (law 7). At launch there is nothing mapped to walk yet.
SMAPS_KINDS = frozenset({"entry", "launch", "exit"})
_READ_BYTES = 16383  # the longest length in two bytes; meminfo, status and stat are 1 to 2 KiB
_READ_BYTES_AROUND = 1 << 18  # /proc/stat has a number for every interrupt
_VERSION = bytes([VERSION])

_Node = tuple[int, bytes, str]


class Sampler:
    """Reads the same set of files again and again; not for several threads at once."""

    def __init__(
        self, roots: Roots, pid: int | None = None, clock_ns: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        self._roots = roots
        self._clock_ns = clock_ns
        self._fast: list[_Node] = []
        self._around: list[_Node] = []
        self._smaps: list[_Node] = []
        self._told: dict[str, int] = {}
        self._pending: list[bytes] = []
        self._constants = self._once(nodes.fast_constants(roots))
        self._full_constants: bytes | None = None
        self._prefix: dict[str, bytes] = {}
        self.samples = 0
        self.sampling_ns = 0
        self._around_listed = False
        self._quick = frozenset(nodes.fast(roots))
        self._open(nodes.fast(roots), self._fast)
        if pid is not None:
            self.attach(pid)

    def attach(self, pid: int) -> None:
        """Add the engine's own files; once per run, as soon as its pid is known."""
        directory = f"proc/{pid}"
        engine = [f"{directory}/{name}" for name in nodes.ENGINE_FAST]
        # The engine's files first: they are what the moment of the sample should be closest to.
        system, self._fast = self._fast, []
        self._open(engine, self._fast, directory)
        self._fast += system
        self._open([f"{directory}/{name}" for name in nodes.ENGINE_AROUND], self._around, directory)
        self._open([f"{directory}/{nodes.ENGINE_SMAPS}"], self._smaps, directory)

    def sample(self, kind: str = "fast") -> pb.Sample:
        """Read everything of this kind now."""
        text, took_ns = self._read(kind)
        return pb.Sample(kind=kind, text=text, took_ns=took_ns, source="agent")

    def encoded(self, kind: str = "fast") -> bytes:
        """As `sample`, as the bytes of the message: for `append_encoded` of the spool."""
        text, took_ns = self._read(kind)
        prefix = self._prefix.get(kind)
        if prefix is None:
            name = kind.encode()
            # telemetry.proto Sample: source = 4 first, then kind = 1 and text = 2; order is free on the wire.
            prefix = self._prefix[kind] = b"\x22\x05agent\x0a" + varint(len(name)) + name + b"\x12"
        return b"".join((prefix, varint(len(text)), text, b"\x18", varint(took_ns)))

    def close(self) -> None:
        """Close every file."""
        for group in (self._fast, self._around, self._smaps):
            for descriptor, _, _ in group:
                os.close(descriptor)
            group.clear()

    def __enter__(self) -> Sampler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def refused(self) -> dict[str, int]:
        """Nodes that cannot be read, and the errno of each."""
        return dict(self._told)

    def _read(self, kind: str) -> tuple[bytes, int]:
        began = self._clock_ns()
        full = kind in FULL_KINDS
        if full:
            self._retry()
        parts = [_VERSION, self._constants]
        if self._pending:
            parts += self._pending
            self._pending.clear()
        self._pread(self._fast, parts)
        if full:
            self._pread(self._around, parts, _READ_BYTES_AROUND)
            if self._full_constants is None:
                self._full_constants = self._once(nodes.around_constants(self._roots))
            parts.append(self._full_constants)
        if kind in SMAPS_KINDS:
            self._pread(self._smaps, parts)
        # What broke during this reading is told in the same sample.
        if self._pending:
            parts += self._pending
            self._pending.clear()
        took_ns = self._clock_ns() - began
        self.samples += 1
        self.sampling_ns += took_ns
        return b"".join(parts), took_ns

    def _pread(self, group: list[_Node], parts: list[bytes], limit: int = _READ_BYTES) -> None:
        lengths = short_varints()
        broken: list[_Node] = []
        pread, add = os.pread, parts.append
        for node in group:
            descriptor, prefix, _ = node
            try:
                data = pread(descriptor, limit, 0)
            except OSError as problem:
                self._tell(node[2], problem.errno or 0)
                broken.append(node)
                continue
            size = len(data)
            if size < _READ_BYTES:
                add(prefix)
                add(lengths[size])
            else:
                add(head(_shown(node[2]), CUT) if size == limit else prefix)
                add(varint(size))
            add(data)
        for node in broken:
            group.remove(node)
            os.close(node[0])

    def _open(self, wanted: Iterable[str], group: list[_Node], directory: str = "") -> None:
        for node in wanted:
            try:
                descriptor = self._roots.open(node)
            except OSError as problem:
                self._tell(node, problem.errno or 0)
                continue
            group.append((descriptor, head(_shown(node, directory)), node))

    def _tell(self, node: str, code: int) -> None:
        self._told[node] = code
        self._pending.append(refusal(_shown(node), code))

    def _retry(self) -> None:
        """Open what refused before, and at the first full sample what only full samples read."""
        if not self._around_listed:
            self._around_listed = True
            self._open(nodes.around(self._roots), self._around)
        retried, self._told = self._told, {}
        self._pending.clear()
        engine_lives = self._engine_lives()
        for node in retried:
            if _is_engine(node) and not engine_lives:
                self._tell(node, retried[node])
                continue
            if node.endswith("/smaps_rollup"):
                group = self._smaps
            elif node in self._quick or (_is_engine(node) and node.rpartition("/")[2] in nodes.ENGINE_FAST):
                group = self._fast
            else:
                group = self._around
            self._open([node], group, _directory(node))

    def _engine_lives(self) -> bool:
        """Whether the engine's pid still is the engine: asked of the descriptor that was opened when it was."""
        for descriptor, _, node in self._fast:
            if _is_engine(node):
                try:
                    os.pread(descriptor, 1, 0)
                except OSError:
                    return False
                return True
        return False

    def _once(self, wanted: Iterable[str]) -> bytes:
        """Entries of files that are read once."""
        parts: list[bytes] = []
        for node in wanted:
            try:
                data = self._roots.read(node)
            except OSError as problem:
                parts.append(refusal(node, problem.errno or 0))
                continue
            parts += [head(node), varint(len(data)), data]
        return b"".join(parts)


def _is_engine(node: str) -> bool:
    top, _, rest = node.partition("/")
    return top == "proc" and rest.partition("/")[0].isdigit()


def _directory(node: str) -> str:
    return node.rpartition("/")[0] if _is_engine(node) else ""


def _shown(node: str, directory: str = "") -> str:
    """The node's name in the record: the engine's directory is `proc/engine` whatever its pid."""
    if directory or _is_engine(node):
        return f"proc/engine/{node.rpartition('/')[2]}"
    return node
