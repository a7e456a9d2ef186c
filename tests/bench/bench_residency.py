"""What one look at residency costs: a sample of a 60 GB sparse file, as a share of the 10 s between two looks."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from bmoe_agent.residency.look import Residency
from bmoe_agent.residency.model import Extent, Layout

SIZE = 60 << 30
PERIOD_NS = 10_000_000_000
LIMIT = 0.002  # of one core


def run() -> list[dict[str, object]]:
    """The sample's share of one core, and the sweep's cost for comparison."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sparse.gguf"
        with path.open("wb") as file:
            file.truncate(SIZE)
        layer = SIZE // 48
        extents = tuple(
            Extent(0, number * layer + (begin * layer) // 10, size * layer // 10, part, number)
            for number in range(48)
            for part, begin, size in (("dense", 0, 1), ("expert", 1, 9))
        )
        with Residency(Layout((str(path),), (SIZE,), extents, (None,))) as residency:
            looks = [residency.look() for _ in range(40)]
            layered = [residency.look(layers=True) for _ in range(10)]
            sweep = residency.look(sweep=True)
    rows: list[dict[str, object]] = []
    for what, found in (("sample", looks), ("sample with layers", layered)):
        cpu_ns = statistics.median(look.cpu_ns for look in found)
        detail = f"{cpu_ns / 1e6:.1f} ms of CPU a look at {found[0].parts[0].pages_looked_at} pages of 60 GiB; a sweep {sweep.cpu_ns / 1e6:.0f} ms"
        share = cpu_ns / PERIOD_NS
        rows.append(
            {"bench": "residency", "what": what, "ratio": share, "limit": LIMIT, "ok": share <= LIMIT, "detail": detail}
        )
    return rows


if __name__ == "__main__":
    for row in run():
        print(row)
