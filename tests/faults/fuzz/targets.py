"""What is fuzzed: for each reader of bytes from outside, a function that feeds it and checks what must hold.

In: any bytes. Out: nothing, or an AssertionError (an invariant is broken) or any other exception (a crash). A reader may
refuse its input with the one error it documents, and with nothing else. `fuzz.py` drives these under coverage;
`test_corpus.py` runs the kept corpora through them as ordinary tests.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path

MOST_BYTES = 1 << 16
RUN, SEGMENT = b"r" * 16, b"s" * 16


def stdout(data: bytes) -> None:
    """Events are strict JSON, and the same however the bytes come in pieces."""
    from bmoe_proto.contract.stdout import StdoutParser, parse

    whole = [event.to_json() for event in parse(data)]
    json.dumps(whole, allow_nan=False).encode("ascii")
    parser, pieces = StdoutParser(), []
    step = 1 + (data[0] if data else 0) % 61
    for at in range(0, len(data), step):
        pieces += parser.feed(data[at : at + step])
    pieces += parser.close()
    assert [event.to_json() for event in pieces] == whole


def metrics(data: bytes) -> None:
    """Columns are equally long; what is not a metrics file is said to be none."""
    from bmoe_proto.contract.metrics import NotOursError, parse_metrics

    try:
        found = parse_metrics(data)
    except NotOursError:
        return
    assert len({len(column) for column in found.columns.values()}) <= 1
    json.dumps([dict(found.preamble), [dict(trailer.done) for trailer in found.trailers]], allow_nan=False)


def traces(data: bytes) -> None:
    """The sans-IO reader of decode traces, for small files."""
    from bmoe_proto.contract.metrics import NotOursError
    from bmoe_proto.contract.traces import parse_trace

    try:
        found = parse_trace(data)
    except NotOursError:
        return
    assert len({len(column) for column in found.columns.values()}) <= 1


def trace_file(data: bytes) -> None:
    """The lazy reader of trace files: a refusal, or a frame that can be collected."""
    from bmoe_collector.common import UserError
    from bmoe_collector.traces.read import open_trace

    with _file(data) as path:
        try:
            found = open_trace(path)
        except UserError:
            return
        rows = found.frame.collect()
        assert rows.height + found.malformed >= 0
        json.dumps(found.notes())


def small_files(data: bytes) -> None:
    """Every file is recognised as something; a sidecar is read or is none."""
    from bmoe_proto.contract.metrics import NotOursError
    from bmoe_proto.contract.recognise import recognise
    from bmoe_proto.contract.sidecar import parse_sidecar

    recognise(data)
    with contextlib.suppress(NotOursError):
        parse_sidecar(data)


def framing(data: bytes) -> None:
    """Blocks that say true checksums over anything: refused or whole, never beyond the limits; and the way back."""
    from bmoe_proto import framing as codec

    for hostile in (data, _sealed(data)):
        good, _why = codec.split_torn(hostile)
        assert 0 <= good <= len(hostile)
        with contextlib.suppress(codec.FramingError):
            for block in codec.scan(hostile):
                with contextlib.suppress(codec.FramingError):
                    raw = block.raw()
                    assert len(raw) == block.raw_bytes <= codec.MAX_RAW_BYTES
                    frames = block.frames()
                    assert codec.join_frames(frames) == raw or any(byte == 128 for byte in raw)
    frames = data.split(b"\n")
    made = codec.encode_block(RUN, SEGMENT, len(data), frames)
    (block,) = codec.scan(made)
    assert block.frames() == frames
    assert codec.split_torn(made[:-1])[0] == 0


def gguf(data: bytes) -> None:
    """Tensors lie inside the file; everything else is refused."""
    from bmoe_agent.residency import gguf as reader

    for content in (data, b"GGUF\x03\0\0\0" + data):
        with _file(content) as path:
            try:
                header = reader.read(path)
            except reader.GgufError:
                continue
            size = len(content)
            assert header.data_offset <= size
            for tensor in header.tensors:
                assert 0 <= tensor.offset <= tensor.offset + tensor.size <= size


def sample_text(data: bytes) -> None:
    """Decoded entries encode to what decodes alike; kernel text gives values or nothing, never an error."""
    from bmoe_proto import kernel
    from bmoe_proto import sample_text as codec

    for text in (data, b"\x01" + data):
        try:
            entries = codec.decode(text)
        except codec.SampleTextError:
            entries = []
        assert codec.decode(codec.encode(entries)) == [_plain(entry) for entry in entries]
        kernel.sample_values(text)
    for name in ("proc/engine/status", "proc/engine/stat", "proc/engine/io", "proc/engine/schedstat", "proc/meminfo",
                 "proc/engine/cgroup", "proc/pressure/memory", "proc/vmstat", "proc/stat", "dumpsys battery",
                 "dumpsys thermalservice", "dumpsys power", "sys/class/thermal/thermal_zone0/temp",
                 "sys/devices/system/cpu/cpufreq/policy0/scaling_cur_freq"):  # fmt: skip
        kernel.sample_values(codec.encode([codec.Entry(name, data)]))


def plan(data: bytes) -> None:
    """A plan's text is expanded and checked, or refused with one message."""
    from bmoe_collector.common import UserError
    from bmoe_collector.plans.check import check
    from bmoe_collector.plans.document import parse_plan
    from bmoe_collector.plans.expand import expand

    try:
        document = parse_plan(data.decode("utf-8", "replace"), "p.toml", None)
        made = expand(document)
        check(document, made)
    except UserError:
        return
    assert [cell.index for cell in made.cells] == list(range(len(made.cells)))


def proofs(data: bytes) -> None:
    """What strangers may send before anything is proven: the metadata of a call, and secrets as people type them."""
    from bmoe_collector.common import UserError
    from bmoe_collector.host import parse_secret
    from bmoe_proto import proof

    text = data.decode("utf-8", "replace")
    with contextlib.suppress(proof.ProofError):
        proof.parse_call_proof(text)
    with contextlib.suppress(UserError):
        assert len(parse_secret(text)) == proof.SECRET_BYTES
    with contextlib.suppress(proof.ProofError):
        proof.unseal(b"k" * 32, b"n" * 32, data)


TARGETS: dict[str, Callable[[bytes], None]] = {
    "stdout": stdout,
    "metrics": metrics,
    "traces": traces,
    "trace_file": trace_file,
    "small_files": small_files,
    "framing": framing,
    "gguf": gguf,
    "sample_text": sample_text,
    "plan": plan,
    "proofs": proofs,
}


def _sealed(data: bytes) -> bytes:
    """The bytes as a block whose checksums hold, so that what is behind them is reached: 13 bytes choose the header."""
    if len(data) < 13:
        return data
    codec, count, raw_bytes, claimed = struct.unpack_from("<BIII", data)
    payload = data[13:]
    if codec & 0x80:  # a true payload under false claims
        payload = zlib.compress(payload)
    length = claimed if codec & 0x40 else len(payload)
    head = struct.pack("<4sHBx16s16sQIIII", b"BMB1", 68, codec & 3, RUN, SEGMENT, 0, count & 0x1FFFFF or 1,
                       raw_bytes & 0x1FFFFFF, length, zlib.crc32(payload))  # fmt: skip
    return head + struct.pack("<I", zlib.crc32(head)) + payload


@contextlib.contextmanager
def _file(data: bytes):
    """A file with these bytes; in memory where the system has that."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("fuzz")
        try:
            os.write(descriptor, data)
            yield Path(f"/proc/self/fd/{descriptor}")
        finally:
            os.close(descriptor)
        return
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        yield Path(file.name)


def _plain(entry):
    """An entry as its encoding can tell it: without data, an empty reason is an errno."""
    from bmoe_proto.sample_text import Entry

    if entry.data is None and not entry.reason:
        return Entry(entry.name, None, errno=entry.errno)
    return entry
