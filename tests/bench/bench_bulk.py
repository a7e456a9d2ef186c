"""Bulk writes from parsed rows on both databases, and ingest on Postgres beside SQLite.

Yardsticks: `sqlite3.executemany` and psycopg's `COPY` of the same tuples into the same table, with the same indices,
durability and commits of 1,000 rows. The PostgreSQL server is a real one of our own, started with its default durability.
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

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

import bench_ingest  # noqa: E402 - found through the line above
from bmoe_collector.ingest.files import metrics_rows  # noqa: E402
from bmoe_collector.ingest.record import new_run  # noqa: E402
from bmoe_collector.ingest.sink import COLUMNS, Sink  # noqa: E402
from bmoe_collector.store.bulk import bulk  # noqa: E402
from bmoe_collector.store.engine import Store, open_store  # noqa: E402
from bmoe_collector.store.schema import TOKENS_CSV  # noqa: E402
from bmoe_proto.contract.metrics import MetricsFile, parse_metrics  # noqa: E402
from support.generations import GENERATIONS  # noqa: E402
from support.postgres import binaries, running  # noqa: E402

ROWS = 20_000
COMMIT_ROWS = 1_000
ROUNDS = 5
NEWEST = next(each for each in GENERATIONS if each.name == "0.19")


def ours(store: Store, file: MetricsFile, number: int) -> float:
    """Seconds from a parsed file to committed rows, by the way the store writes."""
    with store.write() as connection:
        run_no = new_run(connection, f"{number:032x}", "import")
    began = time.perf_counter()
    sink = Sink(run_no)
    metrics_rows(sink, file)
    rows = sink.rows["tokens_csv"]
    for at in range(0, len(rows), COMMIT_ROWS):
        with store.write() as connection:
            bulk(connection, TOKENS_CSV, COLUMNS["tokens_csv"], rows[at : at + COMMIT_ROWS])
    return time.perf_counter() - began


def tuples(file: MetricsFile, run_no: int) -> list[tuple[Any, ...]]:
    """The rows, made beforehand."""
    sink = Sink(run_no)
    metrics_rows(sink, file)
    return sink.rows["tokens_csv"]


def raw_sqlite(path: str, file: MetricsFile, run_no: int) -> float:
    """Seconds of executemany alone."""
    rows = tuples(file, run_no)
    names = ",".join(f'"{name}"' for name in COLUMNS["tokens_csv"])
    statement = f"INSERT INTO tokens_csv ({names}) VALUES ({','.join('?' * len(COLUMNS['tokens_csv']))})"
    here = sqlite3.connect(path, isolation_level=None)
    here.execute("PRAGMA synchronous=FULL")
    here.execute("PRAGMA cache_size=-65536")
    began = time.perf_counter()
    for at in range(0, len(rows), COMMIT_ROWS):
        here.execute("BEGIN IMMEDIATE")
        here.executemany(statement, rows[at : at + COMMIT_ROWS])
        here.execute("COMMIT")
    took = time.perf_counter() - began
    here.close()
    return took


def raw_postgres(url: str, file: MetricsFile, run_no: int) -> float:
    """Seconds of COPY alone."""
    import psycopg

    rows = tuples(file, run_no)
    names = ",".join(f'"{name}"' for name in COLUMNS["tokens_csv"])
    with psycopg.connect(url, autocommit=True) as here:
        began = time.perf_counter()
        for at in range(0, len(rows), COMMIT_ROWS):
            with here.transaction(), here.cursor().copy(f"COPY tokens_csv ({names}) FROM STDIN") as copy:
                for row in rows[at : at + COMMIT_ROWS]:
                    copy.write_row(row)
        return time.perf_counter() - began


def _result(what: str, ratio: float, limit: float, detail: dict[str, Any]) -> dict[str, Any]:
    return {
        "bench": "bulk",
        "what": what,
        "ratio": round(ratio, 3),
        "limit": limit,
        "ok": ratio >= limit,
        "detail": detail,
    }


def _rates(mine: list[float], theirs: list[float]) -> dict[str, Any]:
    return {"rows": ROWS, "ours_rows_s": round(ROWS / min(mine)), "raw_rows_s": round(ROWS / min(theirs))}


def run() -> list[dict[str, Any]]:
    """Ratios on both databases, each the best of a few rounds."""
    file = parse_metrics(NEWEST.file(ROWS))
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        store = open_store(f"{folder}/bulk.db")
        mine, theirs = [], []
        for number in range(ROUNDS):
            mine.append(ours(store, file, 2 * number))
            with store.write() as connection:
                run_no = new_run(connection, f"{2 * number + 1:032x}", "import")
            theirs.append(raw_sqlite(f"{folder}/bulk.db", file, run_no))
        store.close()
        what = "parsed rows to SQLite, share of raw executemany"
        results.append(_result(what, min(theirs) / min(mine), 0.40, _rates(mine, theirs)))
        if binaries() is None:
            print("no PostgreSQL server here: apt-get install postgresql", file=sys.stderr)
            return results
        with running(durable=True) as server:
            results += _postgres(server, folder, file)
    return results


def _postgres(server: Any, folder: str, file: MetricsFile) -> list[dict[str, Any]]:
    name = server.new_database()
    store = open_store(server.url(name))
    mine, theirs = [], []
    for number in range(ROUNDS):
        mine.append(ours(store, file, 2 * number))
        with store.write() as connection:
            run_no = new_run(connection, f"{2 * number + 1:032x}", "import")
        theirs.append(raw_postgres(f"host={server.folder} user=bmoe dbname={name}", file, run_no))
    store.close()
    what = "parsed rows to Postgres, share of raw COPY"
    results = [_result(what, min(theirs) / min(mine), 0.50, _rates(mine, theirs))]
    made = bench_ingest.spools()
    lite, post = [], []
    for number in range(ROUNDS):
        lite.append(bench_ingest.ingest(f"{folder}/spool{number}.db", f"{folder}/a{number}", made))
        post.append(bench_ingest.ingest(server.url(server.new_database()), f"{folder}/b{number}", made))
    what = "spool bytes to Postgres, SQLite's time as a share of Postgres's (at most 1.5 times slower)"
    detail = {"sqlite_s": round(min(lite), 3), "postgres_s": round(min(post), 3)}
    return [*results, _result(what, min(lite) / min(post), 1 / 1.5, detail)]


def main() -> None:
    """Print a line of JSON for each result."""
    for result in run():
        print(json.dumps(result))


if __name__ == "__main__":
    main()
