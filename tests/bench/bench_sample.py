"""One full fast sample, read, framed and appended, against the raw `pread` of the same files.

The limit is 2 with upb and 3 with pure-Python protobuf (set PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION=python). Both sides are measured in turn and the
ratio of each pair taken, so that what else the machine does falls on both; the median of the pairs is reported.
"""

from __future__ import annotations

import os
import secrets
import statistics
import tempfile
import time

from bmoe_agent.device import protobuf_implementation
from bmoe_agent.roots import Roots
from bmoe_agent.sampling import Sampler, nodes
from bmoe_agent.spool import Spool
from bmoe_proto.v1 import telemetry_pb2 as pb

ROUNDS = 40
SAMPLES = 100
SAMPLE_FIELD = 8  # telemetry.proto Frame.sample


def run() -> list[dict[str, object]]:
    """The ratio, as one row."""
    limit = 3.0 if protobuf_implementation() == "python" else 2.0
    roots, pid = Roots(), os.getpid()
    paths = [f"proc/{pid}/{name}" for name in nodes.ENGINE_FAST] + nodes.fast(roots)
    descriptors = []
    for path in paths:
        try:
            descriptors.append(roots.open(path))
        except OSError:
            continue
    ratios, raw_us, ours_us = [], [], []
    with tempfile.TemporaryDirectory() as folder, Sampler(roots, pid) as sampler:
        writer = Spool(folder, 1 << 30).open_run(secrets.token_bytes(16))
        try:
            writer.append("run_started", pb.RunStarted(plan_id="00" * 16), time.monotonic_ns())
            writer.sync()
            sampler.encoded("entry")
            for _ in range(ROUNDS):
                began = time.perf_counter()
                for _ in range(SAMPLES):
                    for descriptor in descriptors:
                        os.pread(descriptor, 16383, 0)
                raw = time.perf_counter() - began
                began = time.perf_counter()
                for _ in range(SAMPLES):
                    writer.append_encoded(SAMPLE_FIELD, sampler.encoded("fast"), time.monotonic_ns())
                ours = time.perf_counter() - began
                ratios.append(ours / raw)
                raw_us.append(raw / SAMPLES * 1e6)
                ours_us.append(ours / SAMPLES * 1e6)
        finally:
            writer.seal()
    for descriptor in descriptors:
        os.close(descriptor)
    ratio = statistics.median(ratios)
    detail = (
        f"{statistics.median(ours_us):.0f} µs against {statistics.median(raw_us):.0f} µs for {len(descriptors)} files, "
        f"protobuf {protobuf_implementation()}, compression included"
    )
    return [
        {
            "bench": "sample",
            "what": "read, frame and append ÷ pread",
            "ratio": ratio,
            "limit": limit,
            "ok": ratio <= limit,
            "detail": detail,
        }
    ]


if __name__ == "__main__":
    for row in run():
        print(row)
