"""One full fast sample, read, framed and appended, against the raw `pread` of the same files; and the size of a night of them.

The limit is 2 with upb and 3 with pure-Python protobuf (set PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION=python). All sides are
measured in turn and the ratio of each round taken, so that what else the machine does falls on all; the median is reported.

What a sample costs at its moment has the limit. Hashing, compressing and writing it comes later, with the block of two
seconds it goes into: a second row has that too, without a limit, because it depends on how dear this kernel's `pread` is
beside this processor's deflate; what the agent as a whole may cost is `bench_agent`'s.
"""

from __future__ import annotations

import os
import random
import re
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from bmoe_agent.device import protobuf_implementation
from bmoe_agent.roots import Roots, lay
from bmoe_agent.sampling import Sampler, nodes
from bmoe_agent.spool import Spool
from bmoe_agent.spool.writer import RunWriter, encode_frame
from bmoe_proto.framing import frame_prefix
from bmoe_proto.v1 import telemetry_pb2 as pb

ROUNDS = 40
SAMPLES = 100
GROUP = 10  # samples that are less than a full block
PAIRS = 100
NIGHT_SAMPLES = 8 * 3600
TREE = Path(__file__).parent.parent / "support" / "trees" / "thermal_readable_capped.toml"
SAMPLE_FIELD = 8  # telemetry.proto Frame.sample


def run() -> list[dict[str, object]]:
    """Two ratios and a size."""
    limit = 3.0 if protobuf_implementation() == "python" else 2.0
    roots, pid = Roots(), os.getpid()
    paths = [f"proc/{pid}/{name}" for name in nodes.ENGINE_FAST] + nodes.fast(roots)
    descriptors = []
    for path in paths:
        try:
            descriptors.append(roots.open(path))
        except OSError:
            continue
    raw_us, ours_us, written_us = [], [], []
    with tempfile.TemporaryDirectory() as folder, Sampler(roots, pid) as sampler:
        writer = Spool(folder, 1 << 30).open_run(secrets.token_bytes(16))
        try:
            writer.append("run_started", pb.RunStarted(plan_id="00" * 16), time.monotonic_ns())
            writer.sync()
            sampler.encoded("entry")
            prefix = frame_prefix(writer.run_id, writer.segment.segment)
            for _ in range(ROUNDS):
                raw_us.append(_us_a_sample(lambda: [os.pread(descriptor, 16383, 0) for descriptor in descriptors], []))
                ours_us.append(_us_a_sample(partial(_append, writer, sampler, prefix), [writer.flush]))
                written_us.append(_us_a_sample(partial(_append, writer, sampler), [], writer.flush))
        finally:
            writer.seal()
    for descriptor in descriptors:
        os.close(descriptor)
    rows: list[dict[str, object]] = []
    for what, mine, most in (
        ("read, frame and append ÷ pread", ours_us, limit),
        ("the same, and its share of a block of two, hashed, compressed and written ÷ pread", written_us, None),
    ):
        ratio = statistics.median(ours / raw for ours, raw in zip(mine, raw_us, strict=True))
        detail = (
            f"{statistics.median(mine):.0f} µs against {statistics.median(raw_us):.0f} µs for {len(descriptors)} files, "
            f"protobuf {protobuf_implementation()}"
        )
        ok = most is None or ratio <= most
        rows.append({"bench": "sample", "what": what, "ratio": ratio, "limit": most, "ok": ok, "detail": detail})
    return [*rows, _night()]


def _append(writer: RunWriter, sampler: Sampler, prefix: bytes | None = None) -> None:
    """Append one; `prefix`: make its frame here too, which the writer does when it writes a block."""
    sample, now = sampler.encoded("fast"), time.monotonic_ns()
    if prefix is not None:
        encode_frame(prefix, writer.frames, now, SAMPLE_FIELD, sample)
    writer.append_encoded(SAMPLE_FIELD, sample, now)


def _us_a_sample(
    once: Callable[[], object], untimed: Sequence[Callable[[], object]], each_block: Callable[[], object] | None = None
) -> float:
    """Microseconds of one, of SAMPLES in groups that fill no block by themselves; `untimed` is done between the groups."""
    took, size = 0.0, 2 if each_block else GROUP
    for _ in range(SAMPLES // size):
        began = time.perf_counter()
        for _ in range(size):
            once()
        if each_block:
            each_block()
        took += time.perf_counter() - began
        for work in untimed:
            work()
    return took / (SAMPLES // size * size) * 1e6


def _night() -> dict[str, object]:
    """Megabytes of 8 h of samples a second, blocks written every two seconds, ÷ 20 MB: a phone's tree beside a live process."""
    sizes: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        phone = lay(TREE, Path(folder) / "tree")
        for name, roots, pid in (("this machine", Roots(), os.getpid()), ("a phone's tree", phone, 4242)):
            spool = Spool(Path(folder) / name, 1 << 30)
            writer = spool.open_run(secrets.token_bytes(16))
            writer.append("run_started", pb.RunStarted(plan_id="00" * 16), time.monotonic_ns())
            writer.sync()
            before = spool.used_bytes
            with Sampler(roots, pid) as sampler:
                sampler.encoded("entry")
                for _ in range(PAIRS):
                    for _ in range(2):
                        _change_numbers(Path(folder) / "tree")
                        writer.append_encoded(SAMPLE_FIELD, sampler.encoded("fast"), time.monotonic_ns())
                    writer.flush()
            sizes[name] = (spool.used_bytes - before) / (2 * PAIRS)
            writer.seal()
    worst = max(sizes.values()) * NIGHT_SAMPLES / 20e6
    detail = ", ".join(f"{size:.0f} bytes a sample on {name}" for name, size in sizes.items())
    return {
        "bench": "sample",
        "what": "8 h of samples ÷ 20 MB",
        "ratio": worst,
        "limit": 1.0,
        "ok": worst <= 1.0,
        "detail": detail,
    }


# What changes from one second to the next while an engine streams; the rest of these files stays as it is.
_CHANGING = re.compile(
    rb"((?:MemFree|MemAvailable|Cached|SwapFree|SwapCached|(?:Ina|A)ctive(?:\((?:anon|file)\))?|AnonPages|Mapped|Dirty|Slab|"
    rb"KReclaimable|SReclaimable|SUnreclaim|PageTables|KernelStack|Committed_AS|VmRSS|RssAnon|RssFile|VmSwap|VmPTE|"
    rb"voluntary_ctxt_switches|rchar|syscr|read_bytes):\s+\d*?)(\d{1,3})(?= kB|\n)"
)
_COUNTERS = re.compile(rb"(?<= 0 )\d{3,}|(?<= )\d{4,9}(?= 0 0 20)|\d{9,}(?= |$)")


def _change_numbers(tree: Path) -> None:
    """Give the files that change on a phone other last digits."""
    source = random.Random(time.monotonic_ns())

    def other(found: re.Match[bytes]) -> bytes:
        return found[1] + b"%0*d" % (len(found[2]), source.randrange(10 ** len(found[2])))

    def counter(found: re.Match[bytes]) -> bytes:
        return found[0][:-3] + b"%03d" % source.randrange(1000)

    for node, pattern, change in (
        ("proc/meminfo", _CHANGING, other),
        ("proc/4242/status", _CHANGING, other),
        ("proc/4242/io", _CHANGING, other),
        ("proc/4242/stat", _COUNTERS, counter),
        ("proc/4242/schedstat", _COUNTERS, counter),
    ):
        with (tree / node).open("rb+") as file:  # in place: the sampler holds the file open
            text = pattern.sub(change, file.read())
            file.seek(0)
            file.write(text)
    for zone in (1, 2, 3, 5):
        (tree / f"sys/class/thermal/thermal_zone{zone}/temp").write_bytes(b"%d\n" % source.randrange(45000, 65000, 100))


if __name__ == "__main__":
    for row in run():
        print(row)
