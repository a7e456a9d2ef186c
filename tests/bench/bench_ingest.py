"""Ingest from spool bytes to committed rows, against writing the same rows with nothing but the driver.

The yardstick writes exactly the rows that ingest made, into the same tables with the same indices and durability, with
`sqlite3.executemany` in commits of 1,000 rows. The ratio is ingest's speed as a share of the yardstick's.
"""

from __future__ import annotations

import json
import os
import sqlite3
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bmoe_collector.ingest import Ingestor
from bmoe_collector.store import schema as tables
from bmoe_collector.store.artifacts import Artifacts
from bmoe_collector.store.engine import open_store
from support import records

TOKENS = 2_000
RUNS = 7
ROUNDS = 3
COMMIT_ROWS = 1_000
WRITTEN = (tables.BLOCKS, *tables.DERIVED)
LIMIT, AIM = 0.25, 0.40


def spools() -> list[records.Record]:
    """Runs at 20 tokens a second: the tail's pieces at 4 Hz, a sample a second."""
    made = []
    for number in range(RUNS):
        record = records.Record(bytes([number]) * 16, seed=number, per_block=40)
        record.add(run_started=records.started())
        for second in range(TOKENS // 20):
            lines = b"".join(records.progress(second * 20 + step + 1, TOKENS) for step in range(20))
            record.output(lines, piece=len(lines) // 4)
            record.sample(rss_kib=20_000 + second)
        record.end()
        made.append(record)
    return made


def ingest(url: str, folder: str, made: list[records.Record]) -> float:
    """Seconds to take everything, in batches as the phone sends a backlog."""
    store = open_store(url)
    taker = Ingestor(store, Artifacts(folder), settle=False)  # files of streams and judging come after the commit
    deliver(taker, made[0])  # a collector runs for days: its statements are compiled
    began = time.perf_counter()
    for record in made[1:]:
        deliver(taker, record)
    took = time.perf_counter() - began
    store.close()
    return took


def deliver(taker: Ingestor, record: records.Record) -> None:
    """A run, as the phone sends a backlog: in batches of up to 1 MiB."""
    for cursor, data in record.batches([64]):
        taker.blocks(records.AGENT, cursor, data)


def yardstick(source: str, target: str) -> tuple[float, int]:
    """Seconds to write the same rows with the driver alone, and how many there are."""
    open_store(target).close()
    there = sqlite3.connect(source)
    rows: list[tuple[str, list[Any]]] = []
    for table in WRITTEN:
        found = there.execute(f'SELECT * FROM "{table.name}" WHERE run_no > 1').fetchall()
        marks = ",".join("?" * len(table.columns))
        statement = f'INSERT INTO "{table.name}" VALUES ({marks})'
        rows += [(statement, found[at : at + COMMIT_ROWS]) for at in range(0, len(found), COMMIT_ROWS)]
    there.close()
    here = sqlite3.connect(target, isolation_level=None)
    here.execute("PRAGMA journal_mode=WAL")
    here.execute("PRAGMA synchronous=FULL")
    here.execute("PRAGMA cache_size=-65536")
    began = time.perf_counter()
    for statement, some in rows:
        here.execute("BEGIN IMMEDIATE")
        here.executemany(statement, some)
        here.execute("COMMIT")
    took = time.perf_counter() - began
    here.close()
    return took, sum(len(some) for _, some in rows)


def run() -> list[dict[str, Any]]:
    """The ratio, the best of a few rounds of both."""
    made = spools()
    size = sum(len(segment.data) for record in made for segment in record.segments)
    ours: list[float] = []
    theirs: list[float] = []
    count = 0
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
            ours.append(ingest(f"sqlite:///{folder}/a.db", f"{folder}/artifacts", made))
            took, count = yardstick(f"{folder}/a.db", f"{folder}/b.db")
            theirs.append(took)
    ratio = min(theirs) / min(ours)
    return [
        {
            "bench": "ingest",
            "what": "spool bytes to committed SQLite rows, share of raw executemany of the same rows",
            "ratio": round(ratio, 3),
            "limit": LIMIT,
            "ok": ratio >= LIMIT,
            "detail": {
                "aim": AIM,
                "rows": count,
                "spool_bytes": size,
                "ingest_rows_s": round(count / min(ours)),
                "raw_rows_s": round(count / min(theirs)),
            },
        }
    ]


def main() -> None:
    """Print a line of JSON for each result."""
    for result in run():
        print(json.dumps(result))


if __name__ == "__main__":
    main()
