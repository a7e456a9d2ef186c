"""SQL over the views on both databases: the same names, types and answers, and nothing that it could change."""

from __future__ import annotations

import contextlib
import json

import pytest
from bmoe_collector.cli import main
from bmoe_collector.common import UserError
from bmoe_collector.query.sql import run_sql
from bmoe_collector.store.engine import open_store
from bmoe_collector.store.schema import RUNS
from bmoe_collector.store.standing_views import KEY, create_views, drop_views, ensure_views
from bmoe_collector.store.views import views
from sqlalchemy import func, select, text
from support import stored

TYPES = {"int": int, "float": (float, int), "str": str, "bool": int}


@pytest.fixture
def store(store_url):
    with contextlib.closing(open_store(store_url)) as opened:
        stored.fill(opened)
        yield opened


def test_every_view_has_its_documented_columns_and_types(store):
    for view in views().values():
        result = run_sql(store, f'SELECT * FROM "{view.name}"')
        assert result.columns == tuple(column.name for column in view.columns), view.name
        assert result.rows, f"{view.name} has no row: the test shows nothing"
        for row in result.rows:
            for column, value in zip(view.columns, row, strict=True):
                assert value is None or isinstance(value, TYPES[column.kind]), (view.name, column.name, value)


def test_views_give_exactly_these_answers(store):
    rows = run_sql(
        store,
        "SELECT model_name, count(*) AS n, sum(n_tokens) AS tokens, avg(tok_s) AS rate, max(streaming) AS streaming"
        " FROM v_runs WHERE tok_s IS NOT NULL GROUP BY model_name ORDER BY model_name",
    )
    assert rows.columns == ("model_name", "n", "tokens", "rate", "streaming")
    assert rows.rows == [("Alpha.gguf", 4, 12, 11.5, 1), ("beta.gguf", 2, 6, 25.0, 0)]
    assert run_sql(
        store, "SELECT verdicts, severity FROM v_runs WHERE run_id = 'aa000000000000000000000000000000'"
    ).rows == [("incomplete short_run", "fail")]
    started = "SELECT started_utc, device FROM v_runs WHERE run_id = 'aa000000000000000000000000000000'"
    assert run_sql(store, started).rows == [("2026-05-01 10:00:00", "shelf one")]


def test_tokens_are_merged_as_the_record_merges_them(store):
    """The CSV's value stands, stdout fills what it has not, tokens of one source alone stay."""
    rows = run_sql(
        store,
        "SELECT source, turn, step, wall_ms, cpu_ms, read_bytes, read_mb, boot_ns, extra FROM v_tokens"
        f" WHERE run_id = '{stored.MERGED}' ORDER BY turn, step",
    ).rows
    assert [row[:8] for row in rows] == [
        ("both", 0, 1, 10.5, 7.0, 100, 1.5, 1000),  # cpu_ms from stdout: the CSV has none
        ("both", 0, 2, 11.5, 8.0, 200, 2.5, 2000),  # at another place in stdout
        ("csv", 0, 3, 12.5, None, 300, None, None),
        ("stdout", 1, 1, 14.0, 9.0, None, 3.5, 4000),
    ]
    assert [json.loads(row[8]) if row[8] else None for row in rows] == [{"new": 1}, None, None, {"odd": 2}]


def test_samples_of_both_sources_are_one_view(store):
    rows = run_sql(
        store,
        f"SELECT source, boot_ns, rss_kib, cpu_temp_c, battery_pct FROM v_samples WHERE run_id = '{stored.MERGED}'"
        " ORDER BY boot_ns",
    ).rows
    assert rows == [("agent", 1500, 4096, 41.5, None), ("host", 1700, None, None, 88.0)]


REFUSED = (
    "DELETE FROM runs",
    "DELETE FROM runs RETURNING run_id",
    "SELECT 1; DELETE FROM runs",
    "WITH gone AS (SELECT 1) DELETE FROM runs",
    "DROP VIEW v_runs",
    "CREATE TABLE more (a int)",
    "COMMIT",
    "SELECT nothing FROM v_runs",
    "SELEC 1",
    "",
)


def test_nothing_but_one_select_is_answered(store, tmp_path):
    outside = tmp_path / "out"
    own = (
        (f"ATTACH DATABASE '{outside}' AS other", "PRAGMA journal_mode=DELETE", "SELECT load_extension('x')")
        if store.dialect == "sqlite"
        else (f"COPY (SELECT 1) TO '{outside}'", "SET TRANSACTION READ WRITE", "SELECT nextval('runs_run_no_seq')",
              "WITH gone AS (DELETE FROM runs RETURNING 1) SELECT * FROM gone")
    )  # fmt: skip
    for query in (*REFUSED, *own):
        with pytest.raises(UserError):
            run_sql(store, query)
    with store.read() as connection:
        assert connection.execute(select(func.count()).select_from(RUNS)).scalar() == stored.RUNS_STORED
    assert not outside.exists()


def test_a_limit_says_that_there_is_more_and_other_views_are_replaced(store):
    assert run_sql(store, "SELECT run_id FROM v_runs", limit=2).more
    assert not run_sql(store, "SELECT run_id FROM v_runs", limit=stored.RUNS_STORED).more

    with store.write() as connection:
        drop_views(connection)
        connection.exec_driver_sql("CREATE VIEW v_runs AS SELECT 1 AS old")
        connection.exec_driver_sql("CREATE VIEW v_gone AS SELECT 1 AS old")
        connection.execute(text("UPDATE meta SET value = 'other' WHERE key = :key"), {"key": KEY})
    ensure_views(store)
    assert run_sql(store, "SELECT count(*) FROM v_runs").rows == [(stored.RUNS_STORED,)]
    with pytest.raises(UserError):
        run_sql(store, "SELECT * FROM v_gone")
    with store.write() as connection:
        create_views(connection)  # again is no error
    assert run_sql(store, "SELECT count(*) FROM v_runs").rows == [(stored.RUNS_STORED,)]


def test_the_command(store, store_url, capsys, monkeypatch):
    def asked(*arguments):
        code = main(["sql", *arguments, "--db", store_url])
        return code, capsys.readouterr()

    code, said = asked("SELECT run_id, tok_s FROM v_runs WHERE tok_s > 20 ORDER BY tok_s", "--json")
    assert code == 0
    assert [row["tok_s"] for row in json.loads(said.out)] == [20.5, 29.5]
    code, said = asked("SELECT '=1+1' AS a, 2 AS b", "--csv")
    assert (code, said.out) == (0, "a,b\n'=1+1,2\n")
    code, said = asked("SELECT 'x' AS word, -1 AS n")
    assert code == 0
    assert said.out.split() == ["word", "n", "x", "-1"]
    code, said = asked("DROP TABLE runs", "--json")
    assert (code, said.out) == (2, "")
    assert "sql" in said.err
    code, said = asked("--views", "--json")
    assert {view["view"] for view in json.loads(said.out)} == set(views())
    code, said = asked("v_tokens", "--views")
    assert code == 0
    assert "wall_ms" in said.out
    assert asked("v_nothing", "--views")[0] == 2
    assert asked()[0] == 2
