"""A batch as it came, to whole blocks with their frames, before any transaction begins.

In: the bytes of a batch and the cursor where they begin. Out: `Piece`s, and why what follows the last one is none. Pure: no
database, no clock; what a phone sends is looked at before anything is made of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from bmoe_proto import framing
from bmoe_proto.v1 import telemetry_pb2 as pb

MOST_RAW_BYTES = 32 << 20
"""Most of a batch that is decompressed at once; a batch may be 64 MiB of blocks that grow a thousandfold."""
MOST_FRAMES = 1 << 40


@dataclass(frozen=True, slots=True)
class Piece:
    """A whole block of a batch, decoded before the transaction begins."""

    offset: int
    end: int
    first_seq: int
    frames: list[bytes]
    raw: bytes
    data: bytes


def whole_blocks(cursor: pb.Cursor, data: bytes, begin: int = 0) -> tuple[list[Piece], str, int]:
    """Whole blocks from byte `begin` of a batch (where `cursor` stands), why what follows them is none, and how many
    bytes they are: at most `MOST_RAW_BYTES` of frames are decompressed, the next call goes on.
    """
    pieces: list[Piece] = []
    grown = 0
    done = begin
    base = cursor.offset - begin
    try:
        for block in framing.scan(data, begin):
            if pieces and grown + block.raw_bytes > MOST_RAW_BYTES:
                break
            grown += block.raw_bytes
            if block.run_id != cursor.run_id or block.segment != cursor.segment:
                return pieces, f"byte {base + block.offset}: a block of another run or segment", done - begin
            if block.first_seq + block.count > MOST_FRAMES:
                return pieces, f"byte {base + block.offset}: frame {block.first_seq} of one run", done - begin
            raw = block.raw()
            frames = framing.split_frames(raw, block.offset)
            if len(frames) != block.count:
                said = f"byte {base + block.offset}: {len(frames)} frames, its header says {block.count}"
                return pieces, said, done - begin
            start = base + block.offset
            end = base + block.end
            done = block.end
            pieces.append(Piece(start, end, block.first_seq, frames, raw, bytes(data[block.offset : block.end])))
    except framing.FramingError as error:
        if not error.torn:
            return pieces, f"byte {base + error.offset}: {error.reason}", done - begin
    return pieces, "", done - begin
