"""How fast questions are answered over a large store: commands as processes, functions beside hand-written SQL.

20,000 runs with 10 million token rows in SQLite (BMOE_BENCH_RUNS makes it smaller or larger; 500 tokens a run). Commands are timed whole,
Python's start included; functions as a ratio to `sqlite3` running SQL written for the question. Prints one JSON object a figure.
Run alone: `python tests/bench/bench_query.py`.
"""

from __future__ import annotations

import json
import os
import random
import resource
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bmoe_collector.meaning.facts import facts
from bmoe_collector.query.frames import run_numbers, view_frame
from bmoe_collector.query.runs import Selection, list_runs
from bmoe_collector.store.bulk import bulk
from bmoe_collector.store.engine import Store, open_store, plain, to_json
from bmoe_collector.store.names import CSV_COLUMNS, FACT_COLUMNS
from bmoe_collector.store.schema import CONFIGS, LABELS, RUN_FACTS, RUNS, TOKENS_CSV, VERDICTS
from support import run_records

RUNS_STORED = int(os.environ.get("BMOE_BENCH_RUNS", "20000"))
TOKENS = 500
CELL = 50
ROUNDS = 5
BMOE = Path(sys.executable).with_name("bmoe")
START = 1_750_000_000 * 10**9
WHERE = "cache_mb>=2000 and overlap=1 and token_ms_p95 < 118 and not verdict=throttled_entry"
HAND = (
    "SELECT r.run_no, r.run_id, r.started_wall_ns, coalesce((SELECT name FROM device_names n WHERE n.agent_uuid = r.agent_uuid),"
    " r.device_name, r.device_model), r.model_name, r.cell, r.outcome, f.tok_s, f.cache_hit_pct, f.ttft_s FROM runs r"
    " LEFT JOIN configs c ON c.run_no = r.run_no LEFT JOIN run_facts f ON f.run_no = r.run_no"
    " WHERE c.cache_mb >= 2000 AND c.overlap = 1 AND f.token_ms_p95 < 118 AND NOT EXISTS (SELECT 1 FROM verdicts v"
    " WHERE v.run_no = r.run_no AND v.code = 'throttled_entry') ORDER BY r.started_wall_ns DESC, r.run_no DESC LIMIT ?"
)


def fill(store: Store) -> None:
    """Runs of 40 plans of ten cells, judged; tokens copied by the database itself."""
    rng = random.Random(7)
    base = facts(run_records.clean())
    runs: list[tuple[Any, ...]] = []
    configs: list[tuple[Any, ...]] = []
    judged: list[tuple[Any, ...]] = []
    labels: list[tuple[Any, ...]] = []
    verdicts: list[tuple[Any, ...]] = []
    for number in range(1, RUNS_STORED + 1):
        plan, cell, block = number // (10 * CELL), f"cell-{number % 10}", number // 10 % CELL
        cache = 1000 * (1 + number % 4)
        runs.append(
            (number, f"{rng.getrandbits(128):032x}", "agent", "ok" if number % 20 else "partial", True, 0, True, False, False,
             True, TOKENS, 1, f"{number % 12:032x}", f"phone-{number % 12}", "Phone", "0.24.0", "e" * 64,
             f"model-{number % 7}.gguf" if plan else "model-0.gguf", "i" * 64, "p" * 64, f"{plan:032x}", f"plan-{plan}", cell,
             number, block, 0, START + number * 60 * 10**9, START, START, False)
        )  # fmt: skip
        configs.append((number, cache, number % 2, 4, "anon", to_json({"cache_mb": cache, "overlap": number % 2})))
        found = {**base, "tok_s": 10 * (1 + 0.05 * rng.gauss(0, 1)), "token_ms_p95": 100 + 40 * rng.random()}
        held = plain(found)
        judged.append((number, *(held.get(name) for name in FACT_COLUMNS), to_json(held)))
        labels.append((number, "size", str(cache), "plan"))
        labels.append((number, "note", f"n{number % 100}", "user"))
        if number % 3 == 0:
            verdicts.append((number, 0, "throttled_entry", "warn", "48 degrees"))
        verdicts.append((number, 1, "short_run", "warn", "500 tokens"))
    columns = [
        "run_no",
        "run_id",
        "source",
        "outcome",
        "exit_observed",
        "exit_code",
        "ended",
        "simulated",
        "unmeasured",
        "complete",
        "n_tokens",
        "n_turns",
        "agent_uuid",
        "device_name",
        "device_model",
        "engine_version",
        "engine_sha256",
        "model_name",
        "model_identity",
        "prompt_sha256",
        "plan_id",
        "plan_name",
        "cell",
        "cell_index",
        "block",
        "repeat",
        "started_wall_ns",
        "stored_wall_ns",
        "changed_wall_ns",
        "session",
    ]
    with store.write() as connection:
        bulk(connection, RUNS, columns, runs)
        bulk(connection, CONFIGS, ("run_no", "cache_mb", "overlap", "io_threads", "dense_weights", "keys"), configs)
        bulk(connection, RUN_FACTS, ("run_no", *FACT_COLUMNS, "facts"), judged)
        bulk(connection, LABELS, ("run_no", "key", "value", "source"), labels)
        bulk(connection, VERDICTS, ("run_no", "at", "code", "severity", "evidence"), verdicts)
        names = [name for name in CSV_COLUMNS if name != "resident_frac"]
        rows = [
            (1, at, *(0 if name == "turn" else at + 1 if name == "step" else 100.0 + at % 37 for name in names))
            for at in range(TOKENS)
        ]
        bulk(connection, TOKENS_CSV, ("run_no", "at", *names), rows)
        quoted = ", ".join(f'"{name}"' for name in names)
        connection.exec_driver_sql(
            f"INSERT INTO tokens_csv (run_no, at, {quoted}) SELECT r.run_no, t.at, {quoted.replace(chr(34) + 'step', 't.' + chr(34) + 'step')}"
            " FROM runs r CROSS JOIN tokens_csv t WHERE t.run_no = 1 AND r.run_no > 1 ORDER BY r.run_no, t.at"
        )


def command(url: str, *arguments: str) -> tuple[float, str]:
    """Seconds of a whole command, best of a few; and in words with the CPU time, which load does not change."""
    best = cpu = float("inf")
    for _ in range(ROUNDS):
        began, used = time.perf_counter(), _children()
        done = subprocess.run([BMOE, *arguments, "--db", url], capture_output=True, check=False)
        best, cpu = min(best, time.perf_counter() - began), min(cpu, _children() - used)
        if done.returncode or not done.stdout.strip():
            raise AssertionError(f"{arguments}: {done.returncode} {done.stderr.decode()[-500:]}")
    return best, f"{best:.2f} s, {cpu:.2f} s of CPU"


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def best_of(first: Callable[[], Any], second: Callable[[], Any]) -> tuple[float, float]:
    """Seconds of two things, best of interleaved rounds, so that load hits both alike."""
    best = [float("inf"), float("inf")]
    for _ in range(ROUNDS):
        for at, what in enumerate((first, second)):
            began = time.perf_counter()
            what()
            best[at] = min(best[at], time.perf_counter() - began)
    return best[0], best[1]


def by_hand(connection: sqlite3.Connection, limit: int) -> list[Any]:
    """The list of `bmoe runs` by SQL written for it, with labels and verdicts."""
    rows = connection.execute(HAND, (limit or -1,)).fetchall()
    numbers = [row[0] for row in rows]
    labels: dict[int, dict[str, str]] = {}
    codes: dict[int, list[str]] = {}
    if limit:
        marks = ",".join("?" * len(numbers))
        some, values = f" WHERE run_no IN ({marks})", numbers
    else:
        some, values = "", []
    for run_no, key, value in connection.execute(f"SELECT run_no, key, value FROM labels{some}", values):
        labels.setdefault(run_no, {})[key] = value
    for run_no, code in connection.execute(f"SELECT run_no, code FROM verdicts{some} ORDER BY run_no, at", values):
        codes.setdefault(run_no, []).append(code)
    return [(*row, labels.get(row[0]), codes.get(row[0])) for row in rows]


def run() -> list[dict[str, Any]]:
    """Every figure with its limit."""
    found: list[dict[str, Any]] = []

    def say(what: str, value: float, limit: float, detail: str) -> None:
        found.append(
            {
                "bench": "query",
                "what": what,
                "ratio": round(value, 3),
                "limit": limit,
                "ok": value <= limit,
                "detail": detail,
            }
        )

    with tempfile.TemporaryDirectory(prefix="bmoe-bench-") as folder:
        path = f"{folder}/runs.db"
        with closing(open_store(path)) as store:
            began = time.perf_counter()
            fill(store)
            made = f"{RUNS_STORED} runs, {RUNS_STORED * TOKENS:,} tokens, filled in {time.perf_counter() - began:.0f} s"
            took, told = command(path, "runs", "--where", WHERE)
            say("bmoe runs --where, seconds", took, 1.0, f"{told}; {made}")
            took, told = command(path, "runs", "--model", "model-3", "--device", "phone-5", "--verdict", "short_run", "--since",
                           "2025-06-16", "--label", "size=4000", "--sort=-tok_s", "--json")  # fmt: skip
            say("bmoe runs with five filters, seconds", took, 1.0, told)
            took, told = command(path, "compare", "cell:plan-1/cell-1", "cell:plan-1/cell-8", "--force", "--json")
            say("bmoe compare of two cells of 50 runs, seconds", took, 1.0, told)
            with closing(sqlite3.connect(path)) as hand:
                hand.execute("PRAGMA cache_size=-65536")
                for limit, what in ((CELL, "a page of the list"), (0, "the whole list")):
                    ours = list_runs(store, Selection(where=WHERE, limit=limit)).rows
                    theirs = by_hand(hand, limit)
                    if [row[0] for row in ours] != [row[1] for row in theirs] or not ours:
                        raise AssertionError("the two lists differ")
                    mine, yours = best_of(
                        lambda limit=limit: list_runs(store, Selection(where=WHERE, limit=limit)),
                        lambda limit=limit: by_hand(hand, limit),
                    )
                    say(
                        f"{what} / hand-written SQL",
                        mine / yours,
                        3.0,
                        f"{mine * 1e3:.1f} ms against {yours * 1e3:.1f} ms",
                    )
                numbers = run_numbers(store, Selection(plan="plan-1", cell="cell-1"))[:CELL]
                columns = ["run_id", "step", "wall_ms", "io_ms", "cpu_ms", "read_bytes"]
                query = (
                    "SELECT r.run_id, c.step, coalesce(c.wall_ms, s.wall_ms), coalesce(c.io_ms, s.io_ms),"
                    " coalesce(c.cpu_ms, s.cpu_ms), c.read_bytes FROM tokens_csv c JOIN runs r ON r.run_no = c.run_no"
                    " LEFT JOIN tokens_stdout s ON s.run_no = c.run_no AND s.at = c.at AND s.step = c.step"
                    f" WHERE c.run_no IN ({','.join('?' * len(numbers))}) ORDER BY c.run_no, c.turn, c.step"
                )
                if view_frame(store, "v_tokens", numbers, columns).height != len(numbers) * TOKENS:
                    raise AssertionError("not every token came")
                mine, yours = best_of(
                    lambda: view_frame(store, "v_tokens", numbers, columns),
                    lambda: hand.execute(query, numbers).fetchall(),
                )
                say("tokens of 50 runs as a frame / hand-written SQL", mine / yours, 3.0,
                    f"{mine * 1e3:.0f} ms against {yours * 1e3:.0f} ms, {len(numbers) * TOKENS:,} rows")  # fmt: skip
    return found


def main() -> None:
    """Print the figures."""
    for each in run():
        print(json.dumps(each))


if __name__ == "__main__":
    main()
