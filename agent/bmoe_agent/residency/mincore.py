"""mincore(2) over this process's own mapping of a file: which pages are in the page cache.

In: a file. Out: per page whether it is in memory. The pages are never touched, so looking changes nothing.

Since Linux 5.2 the kernel answers "all resident" to a caller that neither owns the file nor could write it, without an error.
That lie is recognised before it is asked for: see `Mapped.why_unknown`. `cachestat` would be quicker and is not used: Android's
system call filter kills the caller (field notes, section 4); `mincore` is on its list.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from types import TracebackType
from typing import Any

NOT_OWNER = "unknown (not owner)"
_PROT_READ = 1
_MAP_SHARED = 1
_MAP_FAILED = ctypes.c_void_p(-1).value
# One call's answer vector: 64 Ki pages.
WINDOW_PAGES = 1 << 16


class MincoreError(Exception):
    """Residency cannot be had here; the message says why, in the words that are recorded."""


def _library() -> Any:
    try:
        library = ctypes.CDLL(None, use_errno=True)
        library.mmap.restype = ctypes.c_void_p
        library.mmap.argtypes = [
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_long,
        ]
        library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        library.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    except (OSError, AttributeError, TypeError) as problem:
        raise MincoreError(f"this Python cannot call mincore: {problem}") from problem
    return library


class Mapped:
    """One file mapped for asking. A mapping pins the file's inode, so a model replaced meanwhile is still the one asked about."""

    def __init__(self, path: str, page_bytes: int | None = None) -> None:
        """Raises MincoreError when the file cannot be opened or mapped.

        `page_bytes` may be several of the kernel's pages (a device with larger ones is stood in for): such a page is resident
        when all of it is. Anything else than a multiple is the kernel's own size.
        """
        self._library = _library()
        kernel_bytes = os.sysconf("SC_PAGE_SIZE")
        self._answers = max(1, (page_bytes or 0) // kernel_bytes) if (page_bytes or 0) % kernel_bytes == 0 else 1
        self.page_bytes = kernel_bytes * self._answers
        self.path = path
        self._address = 0
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as problem:
            raise MincoreError(f"{path}: {problem.strerror}") from problem
        try:
            stat = os.fstat(descriptor)
            self.size = stat.st_size
            self.pages = -(-self.size // self.page_bytes)
            self._owner = stat.st_uid
            if self.size:
                try:
                    address = self._library.mmap(None, self.size, _PROT_READ, _MAP_SHARED, descriptor, 0)
                except ctypes.ArgumentError as problem:  # a file larger than a 32-bit address space
                    raise MincoreError(f"{path}: too large to map here: {problem}") from problem
                if address == _MAP_FAILED:
                    raise MincoreError(f"{path}: mmap: {os.strerror(ctypes.get_errno())}")
                self._address = int(address)
        finally:
            os.close(descriptor)
        self._window: Any = None

    def why_unknown(self) -> str:
        """Why the kernel would not tell this caller the truth; empty when it would.

        The kernel's rule (mm/mincore.c, can_do_mincore): the file's owner, a caller with CAP_FOWNER, or one who may write it.
        """
        if os.geteuid() in {0, self._owner} or os.access(self.path, os.W_OK):
            return ""
        return NOT_OWNER

    def resident(self, pages: Sequence[int]) -> bytes:
        """One byte a page, 1 where it is in memory. Raises MincoreError."""
        each = self._answers
        # The last page of a file may get fewer answers than it has room for: what is past the end is not missing.
        vector = ctypes.create_string_buffer(b"\1" * (each * len(pages)), max(1, each * len(pages)))
        at, base, size, mincore = ctypes.addressof(vector), self._address, self.page_bytes, self._library.mincore
        for number, page in enumerate(pages):
            if not 0 <= page < self.pages:
                raise IndexError(f"page {page} of {self.pages}")
            length = size if page < self.pages - 1 else self.size - page * size
            if mincore(base + page * size, length, at + number * each):
                self._refused()
        return self._folded(vector.raw[: each * len(pages)])

    def count(self, first: int, last: int) -> int:
        """How many of the pages first..last-1 are in memory. Raises MincoreError."""
        if not 0 <= first <= last <= self.pages:
            raise IndexError(f"pages {first} to {last} of {self.pages}")
        if self._window is None:
            self._window = ctypes.create_string_buffer(WINDOW_PAGES * self._answers)
        found = 0
        for begin in range(first, last, WINDOW_PAGES):
            pages = min(WINDOW_PAGES, last - begin)
            length = min(pages * self.page_bytes, self.size - begin * self.page_bytes)
            if self._answers > 1:
                ctypes.memset(self._window, 1, pages * self._answers)
            if self._library.mincore(self._address + begin * self.page_bytes, length, self._window):
                self._refused()
            found += self._folded(ctypes.string_at(self._window, pages * self._answers)).count(1)
        return found

    def _folded(self, answers: bytes) -> bytes:
        """The kernel's answers to ours. It sets the lowest bit and leaves the others clear, so whole bytes can be compared."""
        if self._answers == 1:
            return answers
        whole = b"\1" * self._answers
        starts = range(0, len(answers), self._answers)
        return bytes(answers[start : start + self._answers] == whole for start in starts)

    def close(self) -> None:
        """Unmap."""
        if self._address:
            self._library.munmap(self._address, self.size)
            self._address = 0

    def __enter__(self) -> Mapped:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _refused(self) -> None:
        raise MincoreError(f"{self.path}: mincore: {os.strerror(ctypes.get_errno())}")
