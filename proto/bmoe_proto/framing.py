"""Blocks: how frames lie in a spool segment and, byte for byte the same, in a batch on the wire.

In: serialised frames (telemetry.proto `Frame`), or bytes that should hold blocks. Out: blocks, or the frames in them.
Pure: no files, no clocks.

A segment file is blocks one after the other and nothing else. A block is a header of 68 bytes and a payload, integers
little-endian:

    offset size  what
         0    4  magic `BMB1`
         4    2  length of the header, 68; a later version may append to it
         6    1  codec: 0 stored, 1 zlib, 2 zlib with a preset dictionary: dictionary.py's text, then how every
                 frame of this block begins (run and segment as protobuf fields 1 and 2, 36 bytes)
         7    1  zero
         8   16  run id
        24   16  segment id
        40    8  sequence number of the first frame
        48    4  number of frames, at least 1; the others' numbers follow without holes
        52    4  length of the payload when decompressed
        56    4  length of the payload as it lies here
        60    4  CRC-32 of the payload as it lies here
        64    4  CRC-32 of the 64 bytes before
        68    …  payload: each frame with its length before it as a protobuf varint

The payloads of a segment, decompressed and joined, are therefore exactly what its sha256 in `SegmentOpened` and
`SegmentCount` is over. The header says every length before anything is allocated, and limits are checked first. There
is no resynchronisation: after a block that is not whole, nothing behind it in that segment is believed.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from bmoe_proto.dictionary import KERNEL_TEXT

MAGIC = b"BMB1"
HEADER_BYTES = 68
MAX_RAW_BYTES = 16 << 20
"""Most a block's frames may be, decompressed: a run's start carries a whole plan's text and a whole prompt."""
MAX_PAYLOAD_BYTES = MAX_RAW_BYTES + (64 << 10)
MAX_FRAMES = 1 << 20
MAX_HEADER_BYTES = 4096
MAX_BLOCK_BYTES = MAX_HEADER_BYTES + MAX_PAYLOAD_BYTES
STORED, ZLIB, ZLIB_DICTIONARY = 0, 1, 2
_QUICK_BYTES = 32 << 10

_HEADER = struct.Struct("<4sHBx16s16sQIIII")
_CRC = struct.Struct("<I")
_ONE_BYTE = [bytes((n,)) for n in range(128)]
Buffer = bytes | bytearray | memoryview


class FramingError(ValueError):
    """Bytes that are not a whole block.

    `offset` is where the block begins in the data given; `torn` is True when the data merely ends too early, as the
    tail of a file whose writer was killed does, and False when what is there is wrong.
    """

    def __init__(self, offset: int, reason: str, *, torn: bool = False) -> None:
        super().__init__(f"no whole block at byte {offset}: {reason}")
        self.offset = offset
        self.reason = reason
        self.torn = torn


def varint(value: int) -> bytes:
    """A non-negative integer as a protobuf varint."""
    if value < 128:
        return _ONE_BYTE[value]
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def frame_prefix(run_id: bytes, segment: bytes) -> bytes:
    """How every serialised Frame of a segment begins: fields 1 and 2."""
    return b"\x0a\x10" + run_id + b"\x12\x10" + segment


def join_frames(frames: Iterable[bytes]) -> bytes:
    """Frames as a payload holds them: each with its length before it."""
    parts: list[bytes] = []
    for frame in frames:
        parts.append(varint(len(frame)))
        parts.append(frame)
    return b"".join(parts)


def split_frames(raw: bytes, offset: int = 0) -> list[bytes]:
    """The frames of a decompressed payload; raises FramingError (naming `offset`) when they do not fill it exactly."""
    frames: list[bytes] = []
    at, end = 0, len(raw)
    while at < end:
        size = shift = 0
        while True:
            if at >= end or shift > 28:
                raise FramingError(offset, "a frame's length is cut or too long")
            byte = raw[at]
            at += 1
            size |= (byte & 127) << shift
            if byte < 128:
                break
            shift += 7
        if size > end - at:
            raise FramingError(offset, f"a frame of {size} bytes where {end - at} are left")
        frames.append(raw[at : at + size])
        at += size
    return frames


@dataclass(frozen=True, slots=True)
class Block:
    """One whole block: its header's facts, and where it lies in the data it was found in (`offset` to `end`)."""

    run_id: bytes
    segment: bytes
    first_seq: int
    count: int
    offset: int
    end: int
    codec: int
    raw_bytes: int
    payload: memoryview

    def raw(self) -> bytes:
        """The payload decompressed: what the segment's sha256 is over. Raises FramingError."""
        if self.codec == STORED:
            raw = bytes(self.payload)
            if len(raw) != self.raw_bytes:
                raise FramingError(self.offset, f"holds {len(raw)} bytes where its header says {self.raw_bytes}")
            return raw
        if self.codec == ZLIB_DICTIONARY:
            inflate = zlib.decompressobj(zdict=KERNEL_TEXT + frame_prefix(self.run_id, self.segment))
        else:
            inflate = zlib.decompressobj()
        try:
            # One byte more than announced shows that there is more; it is never allocated beyond that.
            raw = inflate.decompress(self.payload, self.raw_bytes + 1)
        except zlib.error as error:
            raise FramingError(self.offset, f"its payload does not decompress: {error}") from None
        if len(raw) != self.raw_bytes or not inflate.eof or inflate.unused_data:
            raise FramingError(self.offset, f"its payload is not the {self.raw_bytes} bytes its header says")
        return raw

    def frames(self) -> list[bytes]:
        """The serialised frames, in order. Raises FramingError."""
        frames = split_frames(self.raw(), self.offset)
        if len(frames) != self.count:
            raise FramingError(self.offset, f"holds {len(frames)} frames where its header says {self.count}")
        return frames


def encode_raw(run_id: bytes, segment: bytes, first_seq: int, count: int, raw: bytes) -> bytes:
    """A block of `count` frames already joined as `join_frames` does."""
    if len(run_id) != 16 or len(segment) != 16:
        raise ValueError("a run id and a segment id are 16 bytes")
    if not 1 <= count <= MAX_FRAMES:
        raise ValueError(f"a block holds 1 to {MAX_FRAMES} frames, not {count}")
    if len(raw) > MAX_RAW_BYTES:
        raise ValueError(f"{len(raw)} bytes of frames are more than a block's {MAX_RAW_BYTES}")
    # A block that filled up before its two seconds were over comes from a busy run, and repeats itself enough for the
    # quick level; a small one has little to repeat and is worth the slow one.
    deflate = zlib.compressobj(3 if len(raw) >= _QUICK_BYTES else 6, zdict=KERNEL_TEXT + frame_prefix(run_id, segment))
    payload = deflate.compress(raw) + deflate.flush()
    codec = ZLIB_DICTIONARY
    if len(payload) >= len(raw):
        payload, codec = raw, STORED
    head = _HEADER.pack(
        MAGIC, HEADER_BYTES, codec, run_id, segment, first_seq, count, len(raw), len(payload), zlib.crc32(payload)
    )
    return b"".join((head, _CRC.pack(zlib.crc32(head)), payload))


def encode_block(run_id: bytes, segment: bytes, first_seq: int, frames: Sequence[bytes]) -> bytes:
    """A block of these serialised frames, numbered from `first_seq`. Raises ValueError beyond the limits above."""
    return encode_raw(run_id, segment, first_seq, len(frames), join_frames(frames))


def read_block(data: Buffer, offset: int = 0) -> Block:
    """The block that begins at `offset`; raises FramingError when there is no whole one."""
    view = memoryview(data)
    left = len(view) - offset
    if left < HEADER_BYTES:
        start = bytes(view[offset : offset + 4])
        if not MAGIC.startswith(start):
            raise FramingError(offset, f"{left} bytes that do not begin a block")
        raise FramingError(offset, f"{left} bytes of a header of {HEADER_BYTES}", torn=True)
    magic, header_bytes, codec, run_id, segment, first_seq, count, raw_bytes, payload_bytes, payload_crc = (
        _HEADER.unpack_from(view, offset)
    )
    if magic != MAGIC:
        raise FramingError(offset, f"begins with {magic!r}, not {MAGIC!r}")
    if _CRC.unpack_from(view, offset + 64)[0] != zlib.crc32(view[offset : offset + 64]):
        raise FramingError(offset, "its header's checksum is wrong")
    if not HEADER_BYTES <= header_bytes <= MAX_HEADER_BYTES:
        raise FramingError(offset, f"a header of {header_bytes} bytes")
    if codec > ZLIB_DICTIONARY:
        raise FramingError(offset, f"codec {codec} is not known here; a newer version wrote this")
    if raw_bytes > MAX_RAW_BYTES or payload_bytes > MAX_PAYLOAD_BYTES or not 1 <= count <= MAX_FRAMES:
        raise FramingError(offset, f"beyond the limits: {count} frames, {raw_bytes} bytes, {payload_bytes} compressed")
    start = offset + header_bytes
    end = start + payload_bytes
    if end > len(view):
        raise FramingError(offset, f"{left} bytes of a block of {end - offset}", torn=True)
    payload = view[start:end]
    if zlib.crc32(payload) != payload_crc:
        raise FramingError(offset, "its payload's checksum is wrong")
    return Block(run_id, segment, first_seq, count, offset, end, codec, raw_bytes, payload)


def peek_length(header: bytes) -> int | None:
    """How long the block with this header is, from its first 68 bytes; None when they are no block's header."""
    if len(header) < HEADER_BYTES or header[:4] != MAGIC:
        return None
    if _CRC.unpack_from(header, 64)[0] != zlib.crc32(header[:64]):
        return None
    _, header_bytes, *_, payload_bytes, _ = _HEADER.unpack_from(header)
    return int(header_bytes + payload_bytes)


def scan(data: Buffer, offset: int = 0) -> Iterator[Block]:
    """The blocks from `offset` on, in order; ends by raising FramingError where something is not a whole block.

    Data that ends with a whole block ends the iteration; a torn tail raises with `torn` True. Nothing is decompressed
    here.
    """
    end = len(data)
    while offset < end:
        block = read_block(data, offset)
        yield block
        offset = block.end


def split_torn(data: Buffer) -> tuple[int, str]:
    """Where the last whole block ends, and why what follows is not one (empty when nothing follows)."""
    good = 0
    try:
        for block in scan(data):
            good = block.end
    except FramingError as error:
        return good, error.reason
    return good, ""
