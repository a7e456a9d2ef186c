"""Trace views on two million rows against `csv.DictReader` computing the same; the cache curve's time.

The plain reader computes hits, misses and bytes by layer and the entropy of the experts used, row by row; Polars does the same views.
BMOE_BENCH_ROWS makes it shorter.
"""

from __future__ import annotations

import csv
import math
import os
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from bmoe_collector.traces.curve import curve
from bmoe_collector.traces.read import Selection, open_trace
from bmoe_collector.traces.views import VIEWS

ROWS = int(os.environ.get("BMOE_BENCH_ROWS", "2000000"))
LAYERS, EXPERTS, WIDTH = 48, 128, 8


def make(path: Path) -> None:
    """A decode trace with skewed routing."""
    rng = random.Random(7)
    weights = [1 / (1 + at) ** 0.6 for at in range(EXPERTS)]
    with path.open("w") as out:
        out.write(f"# route_trace v1\n# model=m arch=x n_layer={LAYERS} n_expert={EXPERTS} n_expert_used={WIDTH}\n")
        out.writelines(f"# layer={layer} expert_bytes=2097152 dense_bytes=1\n" for layer in range(LAYERS))
        out.write("turn,phase,step,layer,slot,expert,weight,residency,expert_bytes,dropped\n")
        for step in range(max(1, ROWS // (LAYERS * WIDTH))):
            for layer in range(LAYERS):
                picked = list(dict.fromkeys(rng.choices(range(EXPERTS), weights, k=WIDTH * 3)))[:WIDTH]
                for slot, expert in enumerate(picked):
                    hit = rng.random() < 0.7
                    out.write(f"0,1,{step},{layer},{slot},{expert},0.125,{int(hit)},{0 if hit else 2097152},0\n")


def plain(path: Path) -> tuple[int, int, float]:
    """Hits, bytes and the entropy of layer 0, the way one would write it with the standard library."""
    hits: Counter[int] = Counter()
    read: Counter[int] = Counter()
    used: Counter[tuple[int, int]] = Counter()
    with path.open() as lines:
        for row in csv.DictReader(line for line in lines if not line.startswith("#")):
            layer = int(row["layer"])
            hits[layer] += int(row["residency"]) > 0
            read[layer] += int(row["expert_bytes"])
            used[layer, int(row["expert"])] += 1
    first = [count for (layer, _), count in used.items() if layer == 0]
    bits = -sum(count / sum(first) * math.log2(count / sum(first)) for count in first)
    return sum(hits.values()), sum(read.values()), bits


def ours(path: Path) -> tuple[int, int, float]:
    """The same through the views."""
    trace = open_trace(path, "route")
    cache = VIEWS["route"]["cache"](trace, Selection())
    volume = VIEWS["route"]["bytes"](trace, Selection())
    entropy = VIEWS["route"]["entropy"](trace, Selection())
    return sum(row["hit"] for row in cache.rows), volume.facts["read_bytes"], entropy.rows[0]["usage_bits"]


def run() -> list[dict[str, Any]]:
    """Both sides twice, the best of each."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "route.csv"
        make(path)
        times: dict[str, float] = {}
        answers = {}
        for _ in range(2):
            for name, view in (("plain", plain), ("ours", ours)):
                start = time.perf_counter()
                answers[name] = view(path)
                times[name] = min(times.get(name, 1e9), time.perf_counter() - start)
        assert answers["plain"][:2] == answers["ours"][:2]
        assert math.isclose(answers["plain"][2], answers["ours"][2], rel_tol=1e-9)
        start = time.perf_counter()
        found = curve(open_trace(path, "route"), Selection())
        curve_s = time.perf_counter() - start
    faster = times["plain"] / times["ours"]
    detail = f"{times['plain']:.2f} s against {times['ours']:.2f} s"
    return [
        {"bench": "traces", "what": "cache, bytes and entropy, times faster than csv.DictReader", "ratio": round(faster, 1), "limit": ">= 10", "ok": faster >= 10, "detail": detail},
        {"bench": "traces", "what": f"curve, {len(found.rows)} budgets x 3 policies, s", "ratio": round(curve_s, 1), "limit": "<= 60", "ok": curve_s <= 60, "detail": f"{found.facts['accesses']} accesses"},
    ]  # fmt: skip


if __name__ == "__main__":
    print(*run(), sep="\n")
