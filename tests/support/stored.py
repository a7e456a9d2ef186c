"""A small store whose every answer is known, made by plain inserts: for tests of lists, SQL, export and the Python API.

Six judged runs of two models and one that only started. `MERGED` is a run whose tokens are in both sources, not at the
same places; `NASTY` has text in its names that terminals, spreadsheets and Markdown would act on.
"""

from __future__ import annotations

from typing import Any

from bmoe_collector.store.bulk import bulk
from bmoe_collector.store.engine import Store, to_json
from bmoe_collector.store.facts import put
from bmoe_collector.store.schema import (
    ARTIFACTS,
    CONFIGS,
    DEVICE_NAMES,
    DEVICE_TAGS,
    DEVICES,
    GATES,
    HOST_SAMPLES,
    LABELS,
    NOTES,
    REPORT_LINES,
    RESIDENCY,
    RUNS,
    SAMPLES,
    TOKENS_CSV,
    TOKENS_STDOUT,
    TURNS,
)
from sqlalchemy import insert

HOUR = 3600 * 10**9
START = 1_777_629_600 * 10**9  # 2026-05-01T10:00:00Z
PHONE, OTHER = "ab" * 16, "cd" * 16
MERGED = "aa" + "0" * 30
NASTY = "bb" + "0" * 30
STARTED = "ff" + "0" * 30
RUNS_STORED = 7
BAD = '=HYPERLINK("http://x")|a`b\x1b[2J\r<b>*c*'


def run_row(run_id: str, at: int, **more: Any) -> dict[str, Any]:
    row = {
        "run_id": run_id, "source": "agent", "outcome": "ok", "exit_observed": True, "exit_code": 0, "ended": True,
        "simulated": False, "unmeasured": False, "complete": True, "n_tokens": 3, "n_turns": 1, "agent_uuid": PHONE,
        "device_name": "phone-a", "device_model": "Model A", "engine_name": "stable", "engine_version": "0.24.0",
        "engine_sha256": "e" * 64, "model_name": "Alpha.gguf", "model_identity": "i" * 64, "prompt_sha256": "p" * 64,
        "plan_id": "12" * 16, "plan_name": "sizes", "cell": "small", "cell_index": at, "block": at, "repeat": 0,
        "started_wall_ns": START + at * HOUR, "stored_wall_ns": START, "changed_wall_ns": START, "session": False,
        "argv": ["bmoe-cli", "-m", "Alpha.gguf"],
    }  # fmt: skip
    return {**row, **more}


RUNS_OF_STORE: tuple[tuple[dict[str, Any], dict[str, Any], dict[str, str], list[tuple[str, str, str]]], ...] = (
    (run_row(MERGED, 0), {"tok_s": 10.0, "cache_hit_pct": 80.0, "token_ms_p95": 120.5, "streaming": True},
     {"size": "small", "room": "Süd"},
     [("incomplete", "fail", "3 of 256"), ("short_run", "warn", "3 tokens")]),
    (run_row("a1" + "0" * 30, 1), {"tok_s": 11.0, "token_ms_p95": 110.0, "streaming": True}, {"size": "small"},
     [("short_run", "warn", "3 tokens")]),
    (run_row("a2" + "0" * 30, 2, cell="large"), {"tok_s": 12.0, "token_ms_p95": 90.0, "streaming": True},
     {"size": "large"}, [("short_run", "warn", "3 tokens")]),
    (run_row("a3" + "0" * 30, 3, cell="large", outcome="partial"), {"tok_s": 13.0, "token_ms_p95": 80.0},
     {"size": "large"}, []),
    (run_row(NASTY, 30, agent_uuid=OTHER, device_name=BAD, model_name="beta.gguf", model_identity="j" * 64, plan_id=None, plan_name=None,
             cell=BAD, engine_version="0.19.0", model_arch="Ärch"),
     {"tok_s": 20.5, "streaming": False}, {"note": BAD}, []),
    (run_row("b1" + "0" * 30, 31 * 24, agent_uuid=None, device_name=None, device_model=None, model_name="beta.gguf", model_identity="j" * 64,
             source="import", plan_id=None, plan_name=None, cell=None, argv=None),
     {"tok_s": 29.5, "streaming": False}, {}, []),
    (run_row(STARTED, 50, outcome="started", ended=False, complete=False, n_tokens=0, exit_code=None,
             exit_observed=False, model_name="beta.gguf", started_wall_ns=None), {}, {}, []),
)  # fmt: skip


def fill(store: Store) -> None:
    """Store them."""
    with store.write() as connection:
        for phone, model in ((PHONE, "Model A"), (OTHER, "Model B")):
            connection.execute(
                insert(DEVICES).values(
                    agent_uuid=phone, model=model, facts={}, first_seen_wall_ns=START, last_seen_wall_ns=START
                )
            )
        connection.execute(insert(DEVICE_NAMES).values(agent_uuid=PHONE, name="shelf one"))
        connection.execute(insert(DEVICE_TAGS).values(agent_uuid=OTHER, tag="lab"))
        for row, facts, labels, verdicts in RUNS_OF_STORE:
            number = connection.execute(insert(RUNS).values(**row)).inserted_primary_key[0]
            for key, value in labels.items():
                connection.execute(insert(LABELS).values(run_no=number, key=key, value=value, source="plan"))
            if row["run_id"] != STARTED:
                put(connection, number, facts, verdicts)
            if row["run_id"] == MERGED:
                _whole(store, connection, number)
            elif row["run_id"] != STARTED:
                _tokens(store, connection, number)


def _tokens(store: Store, connection: Any, number: int) -> None:
    rows = [(number, at, 0, at + 1, 3, 100.0 + at, 10 * (at + 1)) for at in range(3)]
    bulk(connection, TOKENS_CSV, ("run_no", "at", "turn", "step", "steps", "wall_ms", "read_bytes"), rows)


def _whole(store: Store, connection: Any, number: int) -> None:
    """Everything a run can have, for the run whose tokens are in both sources."""
    connection.execute(
        insert(CONFIGS).values(
            run_no=number, cache_mb=2000, overlap=1, o_direct=0, keys={"cache_mb": 2000, "overlap": 1}
        )
    )
    columns = ("run_no", "at", "turn", "step", "steps", "wall_ms", "read_bytes", "extra")
    bulk(
        connection, TOKENS_CSV, columns,
        [(number, 0, 0, 1, 3, 10.5, 100, to_json({"new": 1})), (number, 1, 0, 2, 3, 11.5, 200, None),
         (number, 2, 0, 3, 3, 12.5, 300, None)],
    )  # fmt: skip
    columns = ("run_no", "at", "turn", "step", "steps", "wall_ms", "cpu_ms", "read_mb", "boot_ns", "extra")
    bulk(
        connection, TOKENS_STDOUT, columns,
        [(number, 0, 0, 1, 3, 10.0, 7.0, 1.5, 1000, None), (number, 2, 0, 2, 3, 11.0, 8.0, 2.5, 2000, None),
         (number, 3, 1, 1, 3, 14.0, 9.0, 3.5, 4000, to_json({"odd": 2}))],
    )  # fmt: skip
    connection.execute(
        insert(TURNS).values(
            run_no=number, at=0, turn=0, kind="oneshot", state="done", tokens=3, cancelled=False, text=b"a\0b",
            text_view="a\u2400b", reasoning=b"", tok_s=10.0,
        )
    )  # fmt: skip
    connection.execute(
        insert(SAMPLES).values(
            run_no=number, at=0, boot_ns=1500, source="agent", kind="fast", took_ms=0.25, rss_kib=4096, cpu_temp_c=41.5,
            values={"rss_kib": 4096, "cpu_temp_c": 41.5}, refused={"battery": "denied"},
        )
    )  # fmt: skip
    connection.execute(
        insert(HOST_SAMPLES).values(
            agent_uuid=PHONE, run_no=number, boot_ns=1700, kind="probe", values={"battery_pct": 88}, took_ms=30.0
        )
    )
    connection.execute(
        insert(RESIDENCY).values(
            run_no=number, at=0, boot_ns=1600, part="whole", method="sample", problem="", bytes=100, fraction=0.25,
            standard_error=0.01,
        )
    )  # fmt: skip
    connection.execute(
        insert(GATES).values(
            run_no=number, at=0, boot_ns=1, gate="battery_pct", asked="battery_pct >= 50", bound=50.0, last=88.0,
            unit="%", state="held", waited_s=0.0, policy="skip", source="host", readings=[],
        )
    )  # fmt: skip
    connection.execute(
        insert(NOTES).values(
            run_no=number, at=0, boot_ns=1, source="agent", code="launched", text="pid 1", facts={"pid": 1}
        )
    )
    connection.execute(
        insert(REPORT_LINES).values(
            run_no=number, at=0, turn=0, name="generation", facts={"tokens": 3}, text="3 tokens"
        )
    )
    connection.execute(
        insert(ARTIFACTS).values(
            run_no=number, name="metrics.csv", kind="metrics", size=10, sha256="d" * 64, state="stored"
        )
    )
