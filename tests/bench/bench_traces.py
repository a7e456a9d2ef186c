"""Every trace view on two million rows against `csv.DictReader` computing the same; the cache curve's time and memory.

Both sides start from the file, for each view anew, and must agree on every row. `support.plain_route` and `plain_decode` are
the plain side. BMOE_BENCH_ROWS makes it shorter; the curve runs in a process of its own, where its peak memory is its own.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bmoe_collector.traces.read import Selection, open_trace
from bmoe_collector.traces.views import VIEWS
from support import plain_decode, plain_route, trace_files

ROWS = int(os.environ.get("BMOE_BENCH_ROWS", "2000000"))
ROUNDS = 3
PLAIN = {"route": plain_route, "compute": plain_decode, "io": plain_decode}
OTHER_NAMES = {"bytes": "bytes_read"}
LIMIT = 10
CURVE_SECONDS, CURVE_MIB = 60, 1024
_CURVE = """
import json, resource, sys, time
from bmoe_collector.traces.curve import curve
from bmoe_collector.traces.read import Selection, open_trace
start = time.perf_counter()
found = curve(open_trace(sys.argv[1], "route"), Selection())
took = time.perf_counter() - start
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"s": took, "peak": peak, "budgets": len(found.rows), "accesses": found.facts["accesses"]}))
"""


def run() -> list[dict[str, Any]]:
    """A row for each kind of trace with its slowest view, and the curve's two."""
    found = []
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        for kind, module in PLAIN.items():
            path = Path(folder) / f"{kind}.csv"
            getattr(trace_files, kind)(path, ROWS)
            times = {}
            for view in VIEWS[kind]:
                if view != "curve":
                    times[view] = _both(kind, view, path, getattr(module, OTHER_NAMES.get(view, view)))
            found.append(_kind(kind, times))
        found += _curve(Path(folder) / "route.csv")
    return found


def _both(kind: str, view: str, path: Path, plain: Any) -> tuple[float, float]:
    """Seconds of the plain side and of ours, the best of a few."""
    start = time.perf_counter()
    rows, facts = plain(path)
    theirs = time.perf_counter() - start
    ours = math.inf
    for _ in range(ROUNDS):
        start = time.perf_counter()
        found = VIEWS[kind][view](open_trace(path, kind), Selection())
        ours = min(ours, time.perf_counter() - start)
    _same(facts, found.facts, f"{kind} {view}")
    if len(rows) != len(found.rows):
        raise AssertionError(f"{kind} {view}: {len(found.rows)} rows are not {len(rows)}")
    for at, (expected, row) in enumerate(zip(rows, found.rows, strict=True)):
        _same(expected, row, f"{kind} {view}, row {at}")
    return theirs, ours


def _same(expected: Mapping[str, Any], found: Mapping[str, Any], where: str) -> None:
    for name, value in expected.items():
        if isinstance(value, Mapping):
            _same(value, found[name], f"{where}, {name}")
        elif not (math.isclose(value, found[name], rel_tol=1e-9) if isinstance(value, float) else value == found[name]):
            raise AssertionError(f"{where}: {name} is {found[name]!r}, not {value!r}")


def _kind(kind: str, times: Mapping[str, tuple[float, float]]) -> dict[str, Any]:
    ratios = {view: theirs / ours for view, (theirs, ours) in times.items()}
    slowest = min(ratios, key=lambda view: ratios[view])
    each = ", ".join(f"{view} {ratios[view]:.0f}x ({ours:.2f} s)" for view, (_, ours) in times.items())
    return {
        "bench": "traces",
        "what": f"{kind} trace, times faster than csv.DictReader, the slowest view ({slowest})",
        "ratio": round(ratios[slowest], 1),
        "limit": f">= {LIMIT}",
        "ok": ratios[slowest] >= LIMIT,
        "detail": each,
    }


def _curve(path: Path) -> list[dict[str, Any]]:
    done = subprocess.run([sys.executable, "-c", _CURVE, path], capture_output=True, check=True)
    told = json.loads(done.stdout)
    detail = f"{told['budgets']} budgets x 3 policies, {told['accesses']} accesses"
    rows = []
    for what, value, limit in (
        ("curve, seconds", told["s"], CURVE_SECONDS),
        ("curve, peak memory of its process in MiB", told["peak"] / 1024, CURVE_MIB),
    ):
        ok = value <= limit
        rows.append({"bench": "traces", "what": what, "ratio": round(value, 1), "limit": f"<= {limit}", "ok": ok, "detail": detail})  # fmt: skip
    return rows


if __name__ == "__main__":
    print(*run(), sep="\n")
