"""How fast a metrics CSV is read and analysed beside `csv.DictReader` computing the same view.

Prints one JSON object a ratio. Run alone: `python tests/bench/bench_metrics.py`.
"""

import csv
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from bmoe_collector.metrics_frame import metrics_frame
from bmoe_proto.contract.columns import METRICS
from bmoe_proto.contract.metrics import parse_metrics

ROWS = 100_000
TURNS = 50
ROUNDS = 3
VIEW = ("wall_ms", "io_ms", "compute_ms", "stall_ms", "mgmt_ms", "cpu_ms")


def _file() -> bytes:
    names = [name for name in METRICS if name != "resident_frac"]
    lines = [
        "# bmoe_metrics v2",
        "# engine=0.19.0",
        "# model=a.gguf arch=qwen3moe n_layer=48 n_expert=128 n_expert_used=8 threads=4",
        "# moe_stream=1 cache_mb=4000 overlap=1 dense_weights=anon",
        ",".join(names),
    ]
    each = ROWS // TURNS
    for turn in range(TURNS):
        for step in range(1, each + 1):
            wall = 90 + (step * 37 + turn) % 101 + step / 9973
            lines.append(
                f"{step},{each},{wall:.3f},{wall / 3:.3f},{wall / 2:.3f},{step * 4096},{40 + step % 50:.2f},{wall / 7:.3f},"
                f"{wall / 90:.3f},{step % 3},{wall * 3.7:.3f},-1.000,{turn},{step % 3 / 256:.2f},4000.0,"
                f"{5000 + step % 97:.1f},{4200 + step % 89:.1f},{800 + step % 13:.1f},{step % 7:.1f},{1500 + step % 211:.1f},"
                f"{200 + step % 53:.1f},{900 - step % 31:.1f},{wall / 40:.3f},1,0.000,{wall / 300:.3f},0.000,0.000,0.000"
            )
        lines.append(f"# summary tokens={each} s/tok=0.100 tok/s=10.000 cache_hit_pct=60.0")
    return ("\n".join(lines) + "\n").encode()


def _quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[round(share * (len(ordered) - 1))]


def _with_dict_reader(data: bytes) -> dict[int, dict[str, tuple[float, float]]]:
    lines = (line for line in data.decode().splitlines() if not line.startswith("#"))
    turns: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in csv.DictReader(lines):
        turn = turns[int(row["turn"])]
        for name in VIEW:
            turn[name].append(float(row[name]))
    return {
        turn: {name: (statistics.fmean(found), _quantile(found, 0.5)) for name, found in columns.items()}
        for turn, columns in turns.items()
    }


def _with_ours(data: bytes) -> dict[int, dict[str, tuple[float, float]]]:
    import polars as pl

    frame = metrics_frame(data, VIEW)
    by_turn = frame.group_by("turn").agg(
        *(pl.col(name).mean().alias(f"{name}.mean") for name in VIEW),
        *(pl.col(name).quantile(0.5, "nearest").alias(f"{name}.p50") for name in VIEW),
    )
    return {
        row["turn"]: {name: (row[f"{name}.mean"], row[f"{name}.p50"]) for name in VIEW}
        for row in by_turn.iter_rows(named=True)
    }


def _as_dicts(data: bytes) -> list[dict[str, float]]:
    lines = (line for line in data.decode().splitlines() if not line.startswith("#"))
    return [{name: float(text) for name, text in row.items()} for row in csv.DictReader(lines)]


def _seconds(work: Callable[[bytes], Any], data: bytes) -> float:
    start = time.perf_counter()
    work(data)
    return time.perf_counter() - start


def run() -> list[dict[str, Any]]:
    """The ratios. Best of interleaved rounds, so that load hits both alike."""
    data = _file()
    theirs, ours = _with_dict_reader(data), _with_ours(data)
    for turn, columns in theirs.items():
        for name, (mean, median) in columns.items():
            if abs(ours[turn][name][0] - mean) > 1e-6 or abs(ours[turn][name][1] - median) > 0.2:
                raise AssertionError(f"turn {turn} {name}: {ours[turn][name]} is not {(mean, median)}")
    views = [(_seconds(_with_dict_reader, data), _seconds(_with_ours, data)) for _ in range(ROUNDS)]
    lists = [(_seconds(_as_dicts, data), _seconds(parse_metrics, data)) for _ in range(ROUNDS)]
    out = []
    for what, rounds, limit in (
        ("metrics CSV: mean and median by turn, ours / csv.DictReader", views, 10.0),
        ("metrics CSV: every value, standard library alone / csv.DictReader", lists, 1.0),
    ):
        slow, fast = min(first for first, _ in rounds), min(second for _, second in rounds)
        out.append(
            {
                "bench": "metrics",
                "what": f"{what} (times faster, at least)",
                "ratio": round(slow / fast, 2),
                "limit": limit,
                "ok": slow / fast >= limit,
                "detail": f"{ROWS} rows: {fast:.3f} s against {slow:.3f} s",
            }
        )
    return out


def main() -> None:
    """Print the ratios."""
    for each in run():
        print(json.dumps(each))


if __name__ == "__main__":
    main()
