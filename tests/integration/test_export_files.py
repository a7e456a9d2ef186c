"""`bmoe export` on both databases: files of every format, and the dataset as DuckDB and Spark read it."""

from __future__ import annotations

import contextlib
import csv
import io
import json
from pathlib import Path

import duckdb
import polars as pl
import pytest
from bmoe_collector.cli import main
from bmoe_collector.common import UserError
from bmoe_collector.export.dataset import MANIFEST, export_dataset, partition_of
from bmoe_collector.query.sql import run_sql
from bmoe_collector.store.artifacts import Artifacts
from bmoe_collector.store.engine import open_store
from bmoe_collector.store.schema import ARTIFACTS, RUNS, TOKENS_CSV, VERDICTS
from sqlalchemy import delete, insert, select, update
from support import stored

ROUTE = b"""# route_trace v1
# engine=0.19.0 model=/m/a.gguf n_layer=1 n_expert=4 n_expert_used=1
# layer=0 expert_bytes=100 dense_bytes=50
turn,phase,step,layer,slot,expert,weight,residency,expert_bytes,dropped
0,0,0,0,0,1,0.5,0,100,0
0,1,1,0,0,2,nan,1,0,0
"""
QUESTIONS = {
    "tokens a model": (
        "SELECT r.model_name, count(*) AS n, sum(t.read_bytes) AS bytes, avg(t.wall_ms) AS wall_ms"
        " FROM {v}tokens t JOIN {v}runs r ON r.run_id = t.run_id GROUP BY r.model_name ORDER BY r.model_name"
    ),
    "runs an outcome": "SELECT outcome, count(*) AS n, max(tok_s) AS best FROM {v}runs GROUP BY outcome ORDER BY outcome",
    "unmeasured": "SELECT count(*) AS n, count(cpu_ms) AS measured, sum(boot_ns) AS seen FROM {v}tokens",
    "verdicts": "SELECT code, count(*) AS n FROM {v}verdicts GROUP BY code ORDER BY code",
    "labels": "SELECT label_key, label_value FROM (SELECT key AS label_key, value AS label_value FROM {v}labels) AS l"
    " WHERE label_key = 'room'",
    "samples": "SELECT source, count(*) AS n, max(rss_kib) AS rss, max(battery_pct) AS battery FROM {v}samples"
    " GROUP BY source ORDER BY source",
    "turns": "SELECT run_id, text, tok_s FROM {v}turns",
}  # fmt: skip


@pytest.fixture
def store(store_url):
    with contextlib.closing(open_store(store_url)) as opened:
        stored.fill(opened)
        yield opened


def with_trace(store, folder: Path) -> None:
    digest = Artifacts(str(folder)).put(ROUTE)
    with store.write() as connection:
        number = connection.execute(select(RUNS.c.run_no).where(RUNS.c.run_id == stored.MERGED)).scalar()
        connection.execute(
            insert(ARTIFACTS).values(
                run_no=number, name="route.csv", kind="route", size=len(ROUTE), sha256=digest, state="stored"
            )
        )


def database_answers(store) -> dict[str, list[tuple]]:
    return {what: run_sql(store, query.format(v="v_")).rows for what, query in QUESTIONS.items()}


def duckdb_answers(folder: Path) -> dict[str, list[tuple]]:
    with contextlib.closing(duckdb.connect()) as connection:
        for table in ("runs", "tokens", "verdicts", "labels", "samples", "turns"):
            connection.execute(
                f"CREATE VIEW {table} AS SELECT * FROM read_parquet('{folder}/{table}/*/*/*.parquet',"
                " hive_partitioning=true)"
            )
        return {what: connection.execute(query.format(v="")).fetchall() for what, query in QUESTIONS.items()}


def files_of(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*.parquet")}


def test_the_dataset_gives_the_database_s_answers_and_only_changes_are_written(store, tmp_path, monkeypatch):
    monkeypatch.setenv("BMOE_ARTIFACTS", str(tmp_path / "artifacts"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with_trace(store, tmp_path / "artifacts")
    place = tmp_path / "set"
    done = export_dataset(store, str(place), traces=True)
    assert (done.runs, done.unchanged, done.removed, done.problems) == (stored.RUNS_STORED, 0, 0, [])
    answers = database_answers(store)
    assert duckdb_answers(place) == answers
    assert answers["unmeasured"] == [(19, 3, 7000)]
    merged = partition_of(stored.PHONE, stored.START)
    assert merged == f"device=phone-{stored.PHONE}/month=2026-05"
    trace = pl.read_parquet(place / "trace_route" / merged / f"{stored.MERGED}.parquet", hive_partitioning=False)
    assert trace["weight"].to_list() == [0.5, None]
    assert trace["run_id"].unique().to_list() == [stored.MERGED]
    assert (place / "runs/device=imported/month=2026-06/runs.parquet").exists()
    told = json.loads((place / "_schema.json").read_text())
    for table, facts in told["tables"].items():
        held = sorted((place / table).rglob("*.parquet"))
        for path in held:
            assert list(pl.read_parquet_schema(path)) == [column["name"] for column in facts["columns"]], table

    before = files_of(place)
    again = export_dataset(store, str(place), traces=True)
    assert again.unchanged == stored.RUNS_STORED - 1  # the run that has not ended is written every time
    assert files_of(place) == before

    with store.write() as connection:  # one run changes, one goes, one is judged anew
        mine = select(RUNS.c.run_no).where(RUNS.c.run_id == stored.MERGED).scalar_subquery()
        connection.execute(update(TOKENS_CSV).where(TOKENS_CSV.c.run_no == mine).values(wall_ms=1.0))
        connection.execute(update(RUNS).where(RUNS.c.run_id == stored.MERGED).values(changed_wall_ns=stored.START + 1))
        connection.execute(delete(RUNS).where(RUNS.c.run_id == stored.NASTY))
        connection.execute(delete(VERDICTS).where(VERDICTS.c.code == "short_run"))
    third = export_dataset(store, str(place))
    assert third.unchanged == stored.RUNS_STORED - 3
    assert duckdb_answers(place) == database_answers(store)
    now = files_of(place)
    changed = {name for name in now if name in before and now[name] != before[name]}
    assert {name.split("/")[0] for name in changed} == {"tokens", "samples", "turns", "residency", "runs", "verdicts",
                                                        "trace_route"}  # fmt: skip
    assert all(stored.MERGED in name for name in changed if name.split("/")[0] not in {"runs", "verdicts", "labels"})
    assert not [name for name in now if stored.NASTY in name or f"phone-{stored.OTHER}" in name]


def test_an_interrupted_export_is_taken_up_and_a_foreign_one_refused(tmp_path, monkeypatch):
    place = tmp_path / "set"
    with contextlib.closing(open_store(f"{tmp_path}/a.db")) as store:
        stored.fill(store)
        from bmoe_collector.export import dataset

        real, calls = dataset.view_frame, []

        def stops(*arguments, **more):
            calls.append(arguments)
            if len(calls) == 9:
                raise KeyboardInterrupt
            return real(*arguments, **more)

        monkeypatch.setattr(dataset, "view_frame", stops)
        with pytest.raises(KeyboardInterrupt):
            export_dataset(store, str(place))
        assert not list(place.rglob("*.part"))
        assert not [path for path in place.rglob(".*") if path.is_file()]
        export_dataset(store, str(place))
        assert duckdb_answers(place) == database_answers(store)
        memory = export_dataset(store, "memory://bmoe-export-test/set")  # an object store: no renames
        assert memory.written == len(list(place.rglob("*.parquet")))
    with contextlib.closing(open_store(f"{tmp_path}/b.db")) as other:
        with pytest.raises(UserError, match="store"):
            export_dataset(other, str(place))
        (place / MANIFEST).write_text("{")
        with pytest.raises(UserError, match="cannot be read"):
            export_dataset(other, str(place))


def test_files_of_every_format_hold_the_same(store, store_url, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("BMOE_ARTIFACTS", str(tmp_path / "artifacts"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with_trace(store, tmp_path / "artifacts")

    def exported(*arguments, name, code=0):
        path = tmp_path / name
        assert main(["export", *arguments, "--to", str(path), "--db", store_url, "--json"]) == code
        return path, capsys.readouterr()

    chosen = ("tokens", stored.MERGED[:8], "--columns", "turn,step,wall_ms,cpu_ms,extra")
    expected = [(0, 1, 10.5, 7.0), (0, 2, 11.5, 8.0), (0, 3, 12.5, None), (1, 1, 14.0, 9.0)]
    path, said = exported(*chosen, name="t.parquet")
    assert json.loads(said.out)["rows"] == 4
    assert [row[:4] for row in pl.read_parquet(path).rows()] == expected
    path, _ = exported(*chosen, name="t.json")
    assert [tuple(row.values())[:4] for row in json.loads(path.read_text())] == expected
    path, _ = exported(*chosen, name="t.jsonl")
    assert [tuple(json.loads(line).values())[:4] for line in path.read_text().splitlines()] == expected
    path, _ = exported(*chosen, name="t.csv")
    rows = list(csv.reader(io.StringIO(path.read_text())))
    assert [tuple(float(cell) if cell else None for cell in row[:4]) for row in rows[1:]] == expected
    path, _ = exported("tokens", stored.STARTED, name="none.json")
    assert json.loads(path.read_text()) == []
    path, _ = exported("runs", "--device", "cdcd", name="runs.csv")
    text = path.read_text()
    assert not any(letter in text for letter in "\x1b\r")
    row = next(csv.DictReader(io.StringIO(text)))
    assert row["cell"].startswith("'=")
    path, _ = exported("runs", "--label", "size=large", "--columns", "run_id,label.size,verdicts", name="r.json")
    assert json.loads(path.read_text())[1] == {
        "run_id": "a2" + "0" * 30,
        "label.size": "large",
        "verdicts": ["short_run"],
    }
    path, _ = exported("trace", "route", stored.MERGED, name="route.csv")
    assert path.read_text().splitlines()[2] == "0,1,1,0,0,2,,1,0,0"
    path, _ = exported("trace", "route", stored.MERGED, "--columns", "step,weight", name="route.jsonl")
    assert path.read_text() == '{"step": 0, "weight": 0.5}\n{"step": 1, "weight": null}\n'
    kept = path.read_bytes()
    for wrong in (("nothing",), (), ("trace", "route"), ("tokens", "eeee"), ("tokens", "--columns", "nothing"),
                  ("trace", "io", stored.MERGED)):  # fmt: skip
        exported(*wrong, name="route.jsonl", code=2)
    assert path.read_bytes() == kept  # what failed replaced nothing
    exported("runs", name="x.xlsx", code=2)
    exported("runs", name="no/folder.csv", code=2)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    for wrong in (["runs"], ["--dataset", "x", "--where", "tok_s > 1"], ["--dataset", "x", "runs"], ["--community"],
                  ["runs", "--to", "a.csv", "--traces"]):  # fmt: skip
        assert main(["export", *wrong, "--db", store_url]) == 2
    capsys.readouterr()


@pytest.mark.spark
def test_spark_reads_the_dataset_as_it_is(tmp_path):
    from pyspark.sql import SparkSession

    place = tmp_path / "set"
    with contextlib.closing(open_store(f"{tmp_path}/a.db")) as store:
        stored.fill(store)
        export_dataset(store, str(place))
        expected = database_answers(store)
    session = (
        SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
        .config("spark.sql.warehouse.dir", str(tmp_path / "warehouse")).config("spark.sql.shuffle.partitions", "2")
        .config("spark.driver.host", "127.0.0.1").getOrCreate()
    )  # fmt: skip
    try:
        for table in ("runs", "tokens", "verdicts", "labels", "samples", "turns"):
            session.read.parquet(str(place / table)).createOrReplaceTempView(table)
        answers = {
            what: [tuple(row) for row in session.sql(query.format(v="")).collect()] for what, query in QUESTIONS.items()
        }
        devices = {row[0] for row in session.sql("SELECT DISTINCT device FROM tokens").collect()}
        months = {row[0] for row in session.sql("SELECT DISTINCT month FROM runs").collect()}
    finally:
        session.stop()
    assert answers == expected
    assert devices == {f"phone-{stored.PHONE}", f"phone-{stored.OTHER}", "imported"}
    assert months == {"2026-05", "2026-06", "unknown"}
