"""Headers of gguf model files, versions 2 and 3: what the model is and where each tensor lies.

In: a path. Out: `Header`, or `GgufError` saying at which byte what was wrong. No tensor data is read. Every size a file
claims is held against what is left of the file before anything is allocated for it, so a hostile header costs no memory.

The format, little endian:

    "GGUF"  u32 version  u64 tensors  u64 pairs
    pair:    string key, u32 type, value
    tensor:  string name, u32 dimensions, u64 each, u32 ggml type, u64 offset in the data
    string:  u64 length, bytes
    array:   u32 type of its elements, u64 how many, elements
    padding to `general.alignment` (32 unless a pair says otherwise), then the data

A model in shards (`name-00001-of-00005.gguf`) has such a header in each; `split.count` in the first says how many.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

MAGIC = b"GGUF"
_CHUNK = 1 << 20
_STRING_LIMIT = 64 << 20
_DIMENSIONS_LIMIT = 8
_NESTING_LIMIT = 4
_KEPT_TEXT = 256  # longer strings (chat templates, licences) are no facts to list
_KEPT_PAIRS = 512

# Value types by number: struct letter, or what needs more than a letter.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

# ggml type to (elements in a block, bytes of a block). A type not listed gets its size from its neighbour's offset.
_BLOCKS = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 40),
    10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292),
    16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82),
    23: (256, 136), 24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8), 29: (256, 56), 30: (1, 2),
    34: (256, 54), 35: (256, 66), 39: (32, 17),
}  # fmt: skip

_SHARD = re.compile(r"^(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")
# Fused experts (`ffn_gate_exps`), chunk experts, and the old layout with one tensor for each expert (`ffn_gate.3`). Shared
# experts (`_shexp`) and the router (`ffn_gate_inp`) are read for every token and so are dense; so are expert biases, which
# are small and never streamed.
_EXPERT = re.compile(r"^blk\.\d+\.ffn_(?:gate|up|down|gate_up)(?:_(?:ch)?exps|\.\d+)\.weight$")
_LAYER = re.compile(r"^blk\.(\d+)\.")


class GgufError(ValueError):
    """Bytes that are no gguf header this reads."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor: where its bytes lie in its file."""

    name: str
    offset: int
    size: int
    type: int

    @property
    def expert(self) -> bool:
        """Whether it holds routed experts, which the engine streams."""
        return bool(_EXPERT.match(self.name))

    @property
    def layer(self) -> int | None:
        """The block it belongs to; None for embeddings and the output head."""
        match = _LAYER.match(self.name)
        return int(match[1]) if match else None


@dataclass(frozen=True, slots=True)
class Header:
    """One file's header. `pairs` has the small scalars and strings alone."""

    version: int
    pairs: dict[str, int | float | bool | str]
    tensors: list[Tensor]
    data_offset: int
    file_size: int
    problems: list[str] = field(default_factory=list)

    @property
    def architecture(self) -> str:
        """`general.architecture`, empty when there is none."""
        return str(self.pairs.get("general.architecture", ""))


def read(path: str | os.PathLike[str]) -> Header:
    """The header of one file. Raises GgufError, OSError."""
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        return parse(_Reader(file.fileno(), size))


def shards(path: str | os.PathLike[str]) -> list[str]:
    """All files of the model `path` belongs to, in order; the path alone when its name is no shard's.

    Raises GgufError when one is missing: what would be measured is then not the model.
    """
    text = os.fspath(path)
    match = _SHARD.match(os.path.basename(text))
    if not match:
        return [text]
    count = int(match["count"])
    if not 0 < int(match["number"]) <= count:
        raise GgufError(f"{text}: shard {match['number']} of {count}")
    folder = os.path.dirname(text)
    names = [f"{match['stem']}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]
    missing = [name for name in names if not os.path.exists(os.path.join(folder, name))]
    if missing:
        raise GgufError(f"{text}: {len(missing)} of {count} shards are not there, the first is {missing[0]}")
    return [os.path.join(folder, name) for name in names]


class _Reader:
    """Bytes of a file in order, in chunks; refuses what reaches past its end before reading it."""

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor = descriptor
        self.size = size
        self._start = 0
        self._at = 0
        self._chunk = b""

    @property
    def offset(self) -> int:
        return self._start + self._at

    @property
    def left(self) -> int:
        return self.size - self.offset

    def take(self, count: int, what: str) -> bytes:
        at = self._at
        end = at + count
        if end > len(self._chunk):
            self._fill(count, what)
            at, end = 0, count
        self._at = end
        return self._chunk[at:end]

    def skip(self, count: int, what: str) -> None:
        if count > self.left:
            raise GgufError(f"byte {self.offset}: {what} needs {count} bytes, {self.left} are left")
        if self._at + count <= len(self._chunk):
            self._at += count
        else:
            self._start, self._at, self._chunk = self.offset + count, 0, b""

    def u32(self, what: str) -> int:
        return int.from_bytes(self.take(4, what), "little")

    def u64(self, what: str) -> int:
        return int.from_bytes(self.take(8, what), "little")

    def string(self, what: str) -> bytes:
        length = self.u64(what)
        if length > min(self.left, _STRING_LIMIT):
            raise GgufError(f"byte {self.offset}: {what} claims {length} bytes, {self.left} are left")
        return self.take(length, what)

    def skip_strings(self, count: int, what: str) -> None:
        """Walk over strings: vocabularies have hundreds of thousands, so the loop stays inside the chunk."""
        from_bytes = int.from_bytes
        while count:
            chunk, at, end = self._chunk, self._at, len(self._chunk)
            while count and at + 8 <= end:
                after = at + 8 + from_bytes(chunk[at : at + 8], "little")
                if after > end:
                    break
                at = after
                count -= 1
            self._at = at
            if count:
                self.skip(self.u64(what), what)
                count -= 1

    def _fill(self, count: int, what: str) -> None:
        if count > self.left:
            raise GgufError(f"byte {self.offset}: {what} needs {count} bytes, {self.left} are left")
        self._start, self._at = self.offset, 0
        parts: list[bytes] = []
        have = 0
        while have < count:
            part = os.pread(self._descriptor, max(_CHUNK, count) - have, self._start + have)
            if not part:
                raise GgufError(f"byte {self._start + have}: the file became shorter while it was read")
            parts.append(part)
            have += len(part)
        self._chunk = b"".join(parts)


def parse(reader: _Reader) -> Header:
    """A header from its first byte."""
    if (magic := reader.take(min(4, reader.size), "the magic")) != MAGIC:
        raise GgufError(f"no gguf file: it begins with {magic!r}, not {MAGIC!r}")
    version = reader.u32("the version")
    if version not in {2, 3}:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        kind = "big-endian " if swapped in {2, 3} else ""
        raise GgufError(
            f"a {kind}gguf of version {swapped if kind else version}; little-endian versions 2 and 3 are read"
        )
    tensor_count, pair_count = reader.u64("the number of tensors"), reader.u64("the number of pairs")
    # The smallest pair has 13 bytes, the smallest tensor 25.
    if pair_count * 13 + tensor_count * 25 > reader.left:
        raise GgufError(f"{tensor_count} tensors and {pair_count} pairs cannot be in the {reader.left} bytes left")
    pairs: dict[str, int | float | bool | str] = {}
    for _ in range(pair_count):
        key = reader.string("a key").decode("utf-8", "replace")
        value = _value(reader, reader.u32(f"the type of {key[:80]}"), key[:80], 0)
        if value is not None and len(pairs) < _KEPT_PAIRS:
            pairs[key[:_KEPT_TEXT]] = value
    found = [_tensor(reader) for _ in range(tensor_count)]
    alignment = pairs.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment > 1 << 24 or alignment & (alignment - 1):
        raise GgufError(f"general.alignment is {alignment!r}, which is no power of two")
    data = -(-reader.offset // alignment) * alignment
    problems: list[str] = []
    tensors = list(_placed(found, data, reader.size, problems))
    return Header(version, pairs, tensors, min(data, reader.size), reader.size, problems)


def _value(reader: _Reader, kind: int, what: str, depth: int) -> int | float | bool | str | None:
    """A pair's value; None for what is not kept (arrays, long strings)."""
    if (letter := _SCALARS.get(kind)) is not None:
        size = struct.calcsize(f"<{letter}")
        value: int | float | bool = struct.unpack(f"<{letter}", reader.take(size, what))[0]
        return value
    if kind == _STRING:
        raw = reader.string(what)
        return raw.decode("utf-8", "replace") if len(raw) <= _KEPT_TEXT else None
    if kind != _ARRAY:
        raise GgufError(f"byte {reader.offset}: {what} has the unknown value type {kind}")
    if depth >= _NESTING_LIMIT:
        raise GgufError(f"byte {reader.offset}: {what} nests arrays deeper than {_NESTING_LIMIT}")
    inner, count = reader.u32(what), reader.u64(what)
    if (letter := _SCALARS.get(inner)) is not None:
        reader.skip(count * struct.calcsize(f"<{letter}"), what)
        return None
    smallest = {_STRING: 8, _ARRAY: 12}.get(inner)
    if smallest is None:
        raise GgufError(f"byte {reader.offset}: {what} is an array of the unknown type {inner}")
    if count * smallest > reader.left:
        raise GgufError(f"byte {reader.offset}: {what} claims {count} elements, {reader.left} bytes are left")
    if inner == _STRING:
        reader.skip_strings(count, what)
    else:
        for _ in range(count):
            _value(reader, _ARRAY, what, depth + 1)
    return None


def _tensor(reader: _Reader) -> tuple[str, int | None, int, int]:
    """(name, bytes when its type is known, type, offset in the data)."""
    name = reader.string("a tensor's name").decode("utf-8", "replace")
    count = reader.u32(f"dimensions of {name[:80]}")
    if count > _DIMENSIONS_LIMIT:
        raise GgufError(f"byte {reader.offset}: tensor {name[:80]} has {count} dimensions")
    dimensions = struct.unpack(f"<{count}Q", reader.take(8 * count, name[:80]))
    kind, offset = reader.u32(name[:80]), reader.u64(name[:80])
    block = _BLOCKS.get(kind)
    size = -(-prod(dimensions) // block[0]) * block[1] if block else None
    return name, size, kind, offset


def _placed(
    found: list[tuple[str, int | None, int, int]], data: int, file_size: int, problems: list[str]
) -> Iterator[Tensor]:
    """Tensors with places in the file, cut to what the file has; what was cut is a problem, since the file is then not whole."""
    starts = sorted({offset for _, _, _, offset in found})
    following = dict(zip(starts, [*starts[1:], file_size - data], strict=False))  # no tensor, no follower
    cut = 0
    for name, size, kind, offset in found:
        wanted = following[offset] - offset if size is None else size
        begin = min(data + offset, file_size)
        end = min(begin + max(wanted, 0), file_size)
        cut += max(wanted, 0) - (end - begin)
        yield Tensor(name, begin, end - begin, kind)
    if cut:
        problems.append(f"{cut} bytes of tensors lie past the end of the file: it is not whole")
