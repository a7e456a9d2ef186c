r"""What an executable needs to start: its machine, interpreter, libraries, run path and page alignment.

In: a file. Out: `Elf`, or `ElfError` saying why it is none. Only headers and the dynamic section are read. 32 and 64 bit,
little-endian (all Android machines).

    offset 0   \x7fELF, class (1: 32, 2: 64 bit), data (1: little-endian); at 18 the machine
    program headers: PT_LOAD 1 (its p_align bounds the page size it can be mapped with), PT_DYNAMIC 2, PT_INTERP 3
    dynamic section: pairs of (tag, value); DT_NEEDED 1, DT_STRTAB 5, DT_RPATH 15, DT_RUNPATH 29
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MACHINES = {3: "x86", 40: "arm", 62: "x86_64", 183: "aarch64", 243: "riscv64"}
_LOAD, _DYNAMIC, _INTERP = 1, 2, 3
_NEEDED, _STRTAB, _RPATH, _RUNPATH = 1, 5, 15, 29
_MOST_HEADERS = 256
_MOST_BYTES = 1 << 20


class ElfError(ValueError):
    """Not an executable this module can read; the message says what it is instead."""


@dataclass(frozen=True, slots=True)
class Elf:
    """What one file says of itself."""

    machine: str
    interpreter: str
    needed: tuple[str, ...]
    run_path: tuple[str, ...]
    smallest_alignment: int

    def search(self, binary: Path, extra: Sequence[str] = ()) -> tuple[str, ...]:
        """Directories its libraries are looked for in, in order: LD_LIBRARY_PATH (`extra`), then the run path."""
        origin = str(binary.resolve().parent)
        own = (part.replace("${ORIGIN}", origin).replace("$ORIGIN", origin) for part in self.run_path)
        return (*(part for part in extra if part), *own)


def read(path: str | os.PathLike[str]) -> Elf:
    """Read one file. Raises ElfError, OSError."""
    with open(path, "rb") as file:
        whole = os.fstat(file.fileno()).st_size
        head = file.read(64)
        if head[:4] != b"\x7fELF":
            what = "a script" if head[:2] == b"#!" else "no ELF executable"
            raise ElfError(f"{path}: {what}")
        if len(head) < 64:
            raise ElfError(f"{path}: cut short at {len(head)}")
        if head[4] not in (1, 2) or head[5] != 1:
            raise ElfError(f"{path}: an ELF file of a kind Android does not run (class {head[4]}, data {head[5]})")
        wide = head[4] == 2
        (machine,) = struct.unpack_from("<H", head, 18)
        table, size, count = (
            (*struct.unpack_from("<Q", head, 32), *struct.unpack_from("<HH", head, 54))
            if wide
            else (*struct.unpack_from("<I", head, 28), *struct.unpack_from("<HH", head, 42))
        )
        if count > _MOST_HEADERS or size < (56 if wide else 32):
            raise ElfError(f"{path}: damaged: {count} program headers of {size} bytes")

        def at(offset: int, length: int) -> bytes:
            if length > _MOST_BYTES:
                raise ElfError(f"{path}: damaged: a section of {length} bytes")
            if offset + length > whole:
                raise ElfError(f"{path}: cut short or damaged: {length} bytes at {offset} of {whole}")
            file.seek(offset)
            return file.read(length)

        segments = []
        for number in range(count):
            entry = at(table + number * size, size)
            if wide:
                kind, _, offset, address, _, in_file, _, align = struct.unpack_from("<IIQQQQQQ", entry)
            else:
                kind, offset, address, _, in_file, _, _, align = struct.unpack_from("<IIIIIIII", entry)
            segments.append((kind, offset, address, in_file, align))
        interpreter = next((at(offset, long) for kind, offset, _, long, _ in segments if kind == _INTERP), b"")
        pairs: list[tuple[int, int]] = []
        for kind, offset, _, long, _ in segments:
            if kind == _DYNAMIC:
                pairs = list(
                    struct.iter_unpack("<qQ" if wide else "<iI", at(offset, long - long % (16 if wide else 8)))
                )
        strings = _file_offset(dict(pairs).get(_STRTAB, 0), segments)

        def name(value: int) -> str:
            at(strings + value, 1)
            file.seek(strings + value)
            return file.read(4096).partition(b"\0")[0].decode("utf-8", "replace")

        needed = tuple(name(value) for tag, value in pairs if tag == _NEEDED)
        paths = [name(value) for tag, value in pairs if tag == _RUNPATH] or [
            name(value) for tag, value in pairs if tag == _RPATH
        ]
    return Elf(
        MACHINES.get(machine, f"machine {machine}"),
        interpreter.rstrip(b"\0").decode("utf-8", "replace"),
        needed,
        tuple(part for path_text in paths for part in path_text.split(":") if part),
        min((align for kind, _, _, _, align in segments if kind == _LOAD and align), default=0),
    )


def _file_offset(address: int, segments: Sequence[tuple[int, int, int, int, int]]) -> int:
    for kind, offset, begin, long, _ in segments:
        if kind == _LOAD and begin <= address < begin + long:
            return address - begin + offset
    return address
