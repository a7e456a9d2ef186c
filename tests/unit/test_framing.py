"""Blocks: what is written is read back, and nothing that is not whole and right is ever believed."""

import hashlib
import struct
import zlib

import pytest
from bmoe_proto import framing
from bmoe_proto.dictionary import KERNEL_TEXT
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.agent

RUN, SEGMENT = b"r" * 16, b"s" * 16
frame_lists = st.lists(st.binary(max_size=300), min_size=1, max_size=20)


def blocks_of(lists: list[list[bytes]]) -> bytes:
    """A segment file's bytes."""
    data, seq = b"", 0
    for frames in lists:
        data += framing.encode_block(RUN, SEGMENT, seq, frames)
        seq += len(frames)
    return data


@settings(max_examples=60)
@given(st.lists(frame_lists, max_size=5), st.integers(0, 40))
def test_what_is_written_is_read_back(lists, lead):
    data = bytes(lead) + blocks_of(lists)
    seq = 0
    found = []
    for block in framing.scan(memoryview(data), lead):
        assert (block.run_id, block.segment, block.first_seq) == (RUN, SEGMENT, seq)
        seq += block.count
        found.append(block.frames())
        assert block.raw() == framing.join_frames(found[-1])
    assert found == lists


@settings(max_examples=80)
@given(frame_lists, st.data())
def test_any_flipped_bit_is_noticed(frames, data):
    whole = blocks_of([[b"first"], frames])
    start = len(blocks_of([[b"first"]]))
    bit = data.draw(st.integers(start * 8, len(whole) * 8 - 1))
    flipped = bytearray(whole)
    flipped[bit // 8] ^= 1 << bit % 8
    blocks = framing.scan(flipped)
    assert next(blocks).frames() == [b"first"]
    with pytest.raises(framing.FramingError) as caught:
        next(blocks)
    assert caught.value.offset == start


@settings(max_examples=60)
@given(st.lists(frame_lists, min_size=1, max_size=4), st.data())
def test_a_cut_anywhere_keeps_the_whole_blocks_before_it(lists, data):
    ends = [len(blocks_of(lists[:at])) for at in range(len(lists) + 1)]
    whole = blocks_of(lists)
    cut = data.draw(st.integers(0, len(whole)))
    good, reason = framing.split_torn(whole[:cut])
    assert good == max(end for end in ends if end <= cut)
    assert bool(reason) == (good != cut)
    if good != cut:
        with pytest.raises(framing.FramingError) as caught:
            list(framing.scan(whole[:cut]))
        assert caught.value.torn


@settings(max_examples=60)
@given(st.binary(max_size=400))
def test_no_bytes_make_it_raise_anything_else(data):
    try:
        for block in framing.scan(data):
            block.frames()
    except framing.FramingError:
        pass
    try:
        framing.split_frames(data)
    except framing.FramingError:
        pass


def forged(*, count=1, raw_bytes=1, payload=b"x", payload_bytes=None, codec=framing.ZLIB, header_bytes=68) -> bytes:
    """A block whose checksums hold and whose header lies."""
    head = struct.pack(
        "<4sHBx16s16sQIIII",
        b"BMB1",
        header_bytes,
        codec,
        RUN,
        SEGMENT,
        0,
        count,
        raw_bytes,
        len(payload) if payload_bytes is None else payload_bytes,
        zlib.crc32(payload),
    )
    return head + struct.pack("<I", zlib.crc32(head)) + payload


@pytest.mark.parametrize(
    ("block", "said"),
    [
        (forged(raw_bytes=framing.MAX_RAW_BYTES + 1), "limits"),
        (forged(payload_bytes=0xFFFFFFFF), "limits"),
        (forged(count=0), "limits"),
        (forged(count=0xFFFFFFFF), "limits"),
        (forged(codec=9), "codec"),
        (forged(header_bytes=20), "header of 20"),
        (forged(header_bytes=60000), "header of 60000"),
    ],
)
def test_lying_headers_are_refused_before_anything_is_allocated(block, said):
    with pytest.raises(framing.FramingError, match=said):
        framing.read_block(block)


def test_a_payload_that_inflates_to_more_than_announced_is_refused():
    bomb = zlib.compress(bytes(10 << 20))
    block = framing.read_block(forged(raw_bytes=100, payload=bomb))
    with pytest.raises(framing.FramingError, match="not the 100 bytes"):
        block.raw()


def test_a_count_that_does_not_hold_is_refused():
    payload = framing.join_frames([b"a", b"b"])
    block = framing.read_block(forged(count=3, raw_bytes=len(payload), payload=payload, codec=framing.STORED))
    with pytest.raises(framing.FramingError, match="2 frames where its header says 3"):
        block.frames()


def test_a_later_header_may_be_longer():
    data = framing.encode_block(RUN, SEGMENT, 0, [b"abc"])
    payload = data[68:]
    longer = forged(header_bytes=80, raw_bytes=4, payload=payload, codec=framing.read_block(data).codec)
    longer = longer[:68] + bytes(12) + payload
    assert framing.read_block(longer).frames() == [b"abc"]
    assert framing.peek_length(longer[:68]) == len(longer)


def test_kernel_text_is_half_as_long_with_the_dictionary():
    status = "".join(
        f"Vm{name}:\t{at * 7919:8d} kB\n" for at, name in enumerate(["Peak", "Size", "HWM", "RSS", "Data"])
    )
    status += "SigPnd:\t0000000000000000\nSeccomp_filters:\t1\nCpus_allowed_list:\t0-7\nvoluntary_ctxt_switches:\t37\n"
    status += "MemAvailable:   24262628 kB\nSUnreclaim:        26604 kB\nActive(file):     117056 kB\n"
    assert len(framing.encode_block(RUN, SEGMENT, 0, [status.encode()])) - 68 < 0.6 * len(
        zlib.compress(status.encode())
    )


def test_the_dictionary_is_the_one_old_spools_were_written_with():
    digest = hashlib.sha256(KERNEL_TEXT).hexdigest()
    assert digest == "ebbfb6d7f68d8b85c6dc3025b2d9ae17c9dd65de16930245b9f77b1e64769dc6", (
        "another text needs another codec"
    )


def test_beyond_the_limits_nothing_is_encoded():
    with pytest.raises(ValueError, match="more than a block"):
        framing.encode_block(RUN, SEGMENT, 0, [bytes(framing.MAX_RAW_BYTES)])
    with pytest.raises(ValueError, match="not 0"):
        framing.encode_block(RUN, SEGMENT, 0, [])
    with pytest.raises(ValueError, match="16 bytes"):
        framing.encode_block(b"short", SEGMENT, 0, [b"x"])
