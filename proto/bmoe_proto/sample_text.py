"""Layout of `Sample.text`: the kernel files of one sample, their bytes as read or why they could not be.

The phone encodes (values go in, bytes come out), the host decodes; neither touches a file.

    text    := version entries*
    version := one byte, 1
    entry   := varint(2-bit kind | name length << 2) name body
    body    := kind 0, bytes as read:        varint(length) bytes
               kind 1, refused:              varint(errno of the phone's kernel, Linux numbering)
               kind 2, cut at the read size: varint(length) bytes
               kind 3, refused with a text:  varint(length) text, for what has no errno (a command that failed)

Varints are protobuf's (7 bits a byte, low first). A name is UTF-8: a path from the root of the file system without the
first slash, in which the engine's own directory is written `proc/engine` whatever its pid is (`proc/engine/status`), or a
command as it was run (`dumpsys battery`). A file that refuses is told once per run and again when it was tried again;
later samples leave it out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

VERSION = 1
BYTES, REFUSED, CUT, REFUSED_TEXT = range(4)
NAME_LIMIT = 4096

# Lengths of kernel files are small and asked for at every reading: a table is several times quicker than a loop.
_SHORT = [bytes([n]) if n < 128 else bytes([n & 127 | 128, n >> 7]) for n in range(16384)]


class SampleTextError(ValueError):
    """Bytes that are no sample text; the message says at which offset and what was expected."""


class Entry(NamedTuple):
    """One file of a sample: `data` as read, or None and the reason."""

    name: str
    data: bytes | None
    errno: int = 0
    reason: str = ""
    cut: bool = False


def varint(value: int) -> bytes:
    """Protobuf's encoding of a non-negative whole number."""
    if value < 16384:
        return _SHORT[value]
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def short_varints() -> Sequence[bytes]:
    """Encodings of 0 to 16383 by index, for a sampler's inner loop."""
    return _SHORT


def head(name: str, kind: int = BYTES) -> bytes:
    """What stands before the body of an entry; the same at every sample, so made once."""
    raw = name.encode("utf-8", "surrogateescape")
    if not 0 < len(raw) <= NAME_LIMIT:
        raise ValueError(f"a node's name must have 1 to {NAME_LIMIT} bytes, this has {len(raw)}: {name[:60]!r}")
    return varint(len(raw) << 2 | kind) + raw


def refusal(name: str, errno: int) -> bytes:
    """An entry that says the file could not be read."""
    return head(name, REFUSED) + varint(errno)


def encode(entries: Iterable[Entry]) -> bytes:
    """A whole sample text; `decode` gives the same entries back."""
    out = [bytes([VERSION])]
    for entry in entries:
        if entry.data is not None:
            out += [head(entry.name, CUT if entry.cut else BYTES), varint(len(entry.data)), entry.data]
        elif entry.reason:
            reason = entry.reason.encode("utf-8", "surrogateescape")
            out += [head(entry.name, REFUSED_TEXT), varint(len(reason)), reason]
        else:
            out.append(refusal(entry.name, entry.errno))
    return b"".join(out)


def decode(text: bytes) -> list[Entry]:
    """Entries of a sample text, in the order they were read. Raises SampleTextError."""
    return list(iterate(text))


def iterate(text: bytes) -> Iterator[Entry]:
    """As `decode`, one at a time: what came before a damaged place is still given. Raises SampleTextError."""
    if not text:
        return
    if text[0] != VERSION:
        raise SampleTextError(f"sample text of layout {text[0]}, this reads layout {VERSION}: use a newer collector")
    at, size = 1, len(text)
    while at < size:
        began = at
        tag = text[at]  # most numbers are one byte
        if tag < 128:
            at += 1
        else:
            tag, at = _varint_at(text, at)
        kind, length = tag & 3, tag >> 2
        name, at = _bytes_at(text, at, length, "name")
        if not name or length > NAME_LIMIT:
            raise SampleTextError(f"offset {began}: a name of {length} bytes")
        node = _node(name)
        number, at = _varint_at(text, at)
        if kind == REFUSED:
            yield Entry(node, None, number)
            continue
        data, at = _bytes_at(text, at, number, node)
        if kind == REFUSED_TEXT:
            yield Entry(node, None, 0, data.decode("utf-8", "surrogateescape"))
        else:
            yield Entry(node, data, 0, "", kind == CUT)


@lru_cache(maxsize=1024)
def _node(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def _bytes_at(text: bytes, at: int, length: int, what: str) -> tuple[bytes, int]:
    if length > len(text) - at:
        raise SampleTextError(f"offset {at}: {what} should have {length} bytes, {len(text) - at} are left")
    return text[at : at + length], at + length


def _varint_at(text: bytes, at: int) -> tuple[int, int]:
    if at < len(text) and (value := text[at]) < 128:
        return value, at + 1
    value = shift = 0
    for place in range(at, min(at + 10, len(text))):
        byte = text[place]
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place + 1
        shift += 7
    raise SampleTextError(f"offset {at}: an unfinished number")
