"""A slow tail of one growing file: complete lines, each look stamped with the boot clock.

In: a path and, after a restart, the offset already recorded. Out: `Chunk`s whose bytes joined in order are the file.
The engine writes to the file and never waits for us (design, "On the phone"); the price is that a byte's time is known
only as "between the look before and this one", which is what `uncertainty_ns` says.

A line that is still being written waits for its end. It is given out unfinished when it is longer than `LINE_LIMIT`,
so an engine that never ends a line cannot fill memory, and at the very end (`rest`), so nothing is lost.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CHUNK_BYTES = 256 << 10
LINE_LIMIT = 1 << 20
LOOK_BYTES = 8 << 20
"""Most of one look, held in memory at once; what an engine writes beyond it waits in the file for the next one."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes of the file: written between `boot_ns - uncertainty_ns` and `boot_ns`."""

    offset: int
    data: bytes
    boot_ns: int
    uncertainty_ns: int


class Tail:
    """One file, looked at now and then."""

    def __init__(self, path: Path, *, offset: int = 0, looked_boot_ns: int) -> None:
        self.path = path
        self.offset = offset  # everything before it has been given out
        self.size = offset  # as last seen
        self.shrunk_to: int | None = None
        self.behind = False  # the last look left something for the next one
        self._looked_boot_ns = self._since_ns = looked_boot_ns
        self._held = b""
        self._descriptor = -1
        self._hash = hashlib.sha256()
        self._line_tail = b""  # an unfinished line already given out, for `lines`
        if offset:
            self._hash_prefix(offset)

    def look(self, boot_ns: int) -> list[Chunk]:
        """What is new and complete, up to `LOOK_BYTES`. Never raises for the file's sake: one not there yet has nothing new."""
        return list(self._look(boot_ns, LOOK_BYTES))

    def rest(self, boot_ns: int) -> Iterator[Chunk]:
        """Everything left, an unfinished last line included, piece by piece: for when the engine has ended."""
        yield from self._look(boot_ns, None)
        if self._held:
            held, self._held = self._held, b""
            yield self._give(held, boot_ns, self._since_ns)

    def lines(self, chunk: Chunk) -> list[bytes]:
        """The chunk's complete lines without their ends; a line that an earlier chunk began is put together again."""
        lines = (self._line_tail + chunk.data).split(b"\n")
        self._line_tail = lines.pop()[:LINE_LIMIT]
        return lines

    def sha256(self) -> bytes:
        """Of the bytes given out so far."""
        return self._hash.digest()

    def close(self) -> None:
        """Give the descriptor back."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _look(self, boot_ns: int, most: int | None) -> Iterator[Chunk]:
        if self._descriptor < 0:
            try:
                self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                return
        size = os.fstat(self._descriptor).st_size
        known = self.offset + len(self._held)
        if size < known and self.shrunk_to is None:
            self.shrunk_to = size
        if not self.behind:
            self._since_ns = self._looked_boot_ns
        end = size if most is None else min(size, known + most)
        self.size = size
        while known < end:
            data = os.pread(self._descriptor, min(CHUNK_BYTES, end - known), known)
            if not data:
                break
            known += len(data)
            yield from self._cut(data, boot_ns, self._since_ns)
        # What is left was there at this look, and may have been since the look before the first that left something.
        self.behind = end < size
        self._looked_boot_ns = boot_ns

    def _cut(self, data: bytes, boot_ns: int, since_ns: int) -> Iterator[Chunk]:
        end = data.rfind(b"\n") + 1
        if not end:
            self._held += data
            if len(self._held) <= LINE_LIMIT:
                return
            whole, self._held = self._held, b""
        else:
            whole, self._held = self._held + data[:end], data[end:]
        yield self._give(whole, boot_ns, since_ns)

    def _give(self, data: bytes, boot_ns: int, since_ns: int) -> Chunk:
        chunk = Chunk(self.offset, data, boot_ns, max(0, boot_ns - since_ns))
        self.offset += len(data)
        self._hash.update(data)
        return chunk

    def _hash_prefix(self, end: int) -> None:
        try:
            with self.path.open("rb") as file:
                left = end
                while left and (data := file.read(min(CHUNK_BYTES, left))):
                    self._hash.update(data)
                    left -= len(data)
        except OSError:
            return
