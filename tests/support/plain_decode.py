"""The views of compute and I/O traces with nothing but `csv.DictReader` and loops.

As in `plain_route`: a file in, the rows of the view and the facts it computes from rows out.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path
from typing import Any

from support.plain_route import Answer, rank, rows_of

_PARTS = (
    ("op", r"^LAYER$", "segment"),
    ("op", r"(?i)^MUL_MAT_ID$", "experts"),
    ("name", r"(?i)ffn_moe|_exps?\b|expert", "experts"),
    ("name", r"(?i)ffn", "dense ffn"),
    ("name", r"(?i)^(q|k|v)cur|^kq|kqv|attn|cache_[kv]|rope", "attention"),
    ("name", r"(?i)result_output|lm_head", "output head"),
    ("name", r"(?i)embd|inp_", "embedding"),
    ("name", r"(?i)norm", "norm"),
)


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


@cache
def _part(op: str, name: str) -> str:
    for column, pattern, part in _PARTS:
        if re.search(pattern, op if column == "op" else name):
            return part
    return "other"


def ops(path: Path) -> Answer:
    """Time and faults by op and part."""
    table = defaultdict(lambda: [0, 0, 0])
    decodes = set()
    for row in rows_of(path):
        found = table[row["op"], _part(row["op"], row["name"])]
        found[0] += 1
        found[1] += int(row["wall_ns"])
        found[2] += int(row["majflt"])
        decodes.add((int(row["turn"]), int(row["phase"]), int(row["step"])))
    total_ns = sum(found[1] for found in table.values())
    total_faults = sum(found[2] for found in table.values())
    rows = [
        {
            "op": op,
            "part": part,
            "nodes": nodes,
            "wall_ns": wall_ns,
            "majflt": majflt,
            "share": wall_ns / total_ns,
            "fault_share": _share(majflt, total_faults),
        }
        for (op, part), (nodes, wall_ns, majflt) in sorted(table.items(), key=lambda pair: (-pair[1][1], pair[0]))
    ]
    return rows, {"decodes": len(decodes), "wall_ns": total_ns, "majflt": total_faults}


def layers(path: Path) -> Answer:
    """Time and faults by layer."""
    table = defaultdict(lambda: [0, 0, 0])
    decodes = defaultdict(set)
    for row in rows_of(path):
        layer = int(row["layer"])
        found = table[layer]
        found[0] += 1
        found[1] += int(row["wall_ns"])
        found[2] += int(row["majflt"])
        decodes[layer].add((int(row["turn"]), int(row["phase"]), int(row["step"])))
    total_ns = sum(found[1] for found in table.values())
    rows = [
        {
            "segment": str(layer),
            "layer": layer,
            "rows": count,
            "decodes": len(decodes[layer]),
            "wall_ns": wall_ns,
            "majflt": majflt,
            "share": wall_ns / total_ns,
            "wall_ms_per_decode": wall_ns / 1e6 / len(decodes[layer]),
        }
        for layer, (count, wall_ns, majflt) in sorted(table.items())
    ]
    return rows, {"decodes": len(set().union(*decodes.values())), "wall_ns": total_ns}


def faults(path: Path) -> Answer:
    """Where major faults were served."""
    table = defaultdict(lambda: [0, 0, 0])
    total_ns = total_faults = 0
    for row in rows_of(path):
        wall_ns, majflt = int(row["wall_ns"]), int(row["majflt"])
        total_ns += wall_ns
        total_faults += majflt
        if majflt > 0:
            found = table[int(row["layer"]), row["op"], _part(row["op"], row["name"])]
            found[0] += 1
            found[1] += wall_ns
            found[2] += majflt
    rows = [
        {
            "layer": layer,
            "op": op,
            "part": part,
            "nodes": nodes,
            "wall_ns": wall_ns,
            "majflt": majflt,
            "fault_share": _share(majflt, total_faults),
            "share": wall_ns / total_ns,
        }
        for (layer, op, part), (nodes, wall_ns, majflt) in sorted(
            table.items(), key=lambda pair: (-pair[1][2], pair[0])
        )
    ]
    share = _share(sum(row["wall_ns"] for row in rows), total_ns)
    return rows, {"majflt": total_faults, "wall_ns": total_ns, "wall_share_of_faulting_nodes": share}


def latency(path: Path) -> Answer:
    """Latency percentiles by phase, kind of read and projection."""
    taken = defaultdict(list)
    sizes: Counter[str] = Counter()
    for row in rows_of(path):
        ns, size = int(row["latency_ns"]), int(row["read_bytes"])
        phase = "prefill" if row["phase"] == "0" else "decode"
        kind = "speculative" if row["spec"] == "1" else "demanded"
        for name in ("all", phase, kind, f"projection {row['proj']}"):
            taken[name].append(ns)
            sizes[name] += size
    order = [name for name in ("all", "prefill", "decode", "demanded", "speculative") if name in taken]
    order += sorted(name for name in taken if name.startswith("projection"))
    rows = []
    for name in order:
        values = sorted(taken[name])
        rows.append(
            {
                "reads_of": name,
                "reads": len(values),
                "mean_us": sum(values) / len(values) / 1e3,
                **{f"p{percent}_us": rank(values, percent / 100) / 1e3 for percent in (50, 90, 95, 99)},
                "max_us": values[-1] / 1e3,
                "mib_s": _bandwidth(sizes[name], sum(values)),
            }
        )
    reads = len(taken["all"])
    facts = {"reads": reads, "read_bytes": sizes["all"], "speculative_share": len(taken["speculative"]) / reads}
    return rows, facts


def _bandwidth(size: int, busy_ns: int) -> float:
    return size / 1048576 / (busy_ns / 1e9)


def size(path: Path) -> Answer:
    """Bandwidth and waste by size of request."""
    sums: dict[int, Counter[str]] = defaultdict(Counter)
    taken = defaultdict(list)
    for row in rows_of(path):
        wanted = int(row["req_bytes"])
        fits = max(wanted - 1, 0).bit_length()
        found = sums[fits]
        found["req_bytes"] += wanted
        found["read_bytes"] += int(row["read_bytes"])
        taken[fits].append(int(row["latency_ns"]))
    rows = []
    for fits in sorted(sums):
        wanted, pulled, values = sums[fits]["req_bytes"], sums[fits]["read_bytes"], sorted(taken[fits])
        rows.append(
            {
                "up_to_bytes": 1 << fits,
                "reads": len(values),
                "req_bytes": wanted,
                "read_bytes": pulled,
                "waste": (pulled - wanted) / pulled,
                "mib_s": _bandwidth(pulled, sum(values)),
                "p50_us": rank(values, 0.5) / 1e3,
            }
        )
    wanted, pulled = (sum(found[name] for found in sums.values()) for name in ("req_bytes", "read_bytes"))
    return rows, {"req_bytes": wanted, "waste": (pulled - wanted) / pulled}


def lanes(path: Path) -> Answer:
    """What each lane read."""
    sums: dict[int, Counter[str]] = defaultdict(Counter)
    for row in rows_of(path):
        found = sums[int(row["lane"])]
        found["reads"] += 1
        found["speculative"] += row["spec"] == "1"
        found["read_bytes"] += int(row["read_bytes"])
        found["busy"] += int(row["latency_ns"])
    busy = sum(found["busy"] for found in sums.values())
    rows = [
        {
            "lane": lane,
            **{name: sums[lane][name] for name in ("reads", "speculative", "read_bytes")},
            "busy_ms": sums[lane]["busy"] / 1e6,
            "busy_share": sums[lane]["busy"] / busy,
            "mib_s": _bandwidth(sums[lane]["read_bytes"], sums[lane]["busy"]),
        }
        for lane in sorted(sums)
    ]
    return rows, {"lanes": len(rows)}


def adjacency(path: Path) -> Answer:
    """Reads of one decode and layer that touch in the file."""
    asked = defaultdict(list)
    pulled: Counter[int] = Counter()
    for row in rows_of(path):
        layer, offset = int(row["layer"]), int(row["offset"])
        pulled[layer] += int(row["read_bytes"])
        key = (int(row["turn"]), int(row["phase"]), int(row["step"]), layer)
        asked[key].append((offset, offset + int(row["req_bytes"])))
    reads: Counter[int] = Counter()
    joinable: Counter[int] = Counter()
    for (*_, layer), spans in asked.items():
        spans.sort()
        reach = spans[0][1]
        reads[layer] += len(spans)
        for start, end in spans[1:]:
            joinable[layer] += start <= reach
            reach = max(reach, end)
    rows: list[dict[str, Any]] = [
        {
            "layer": layer,
            "reads": reads[layer],
            "joinable": joinable[layer],
            "read_bytes": pulled[layer],
            "would_be": reads[layer] - joinable[layer],
            "share": joinable[layer] / reads[layer],
        }
        for layer in sorted(reads)
    ]
    return rows, {"reads": reads.total(), "joinable": joinable.total()}
