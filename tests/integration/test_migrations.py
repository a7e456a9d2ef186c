"""From the first schema onward: data is kept, the result is what the tables of today say."""

from __future__ import annotations

import threading

import pytest
from bmoe_collector.meaning.facts import FACTS
from bmoe_collector.store import migrate, names
from bmoe_collector.store import schema as tables
from bmoe_collector.store.engine import HEAD, StoreTooOldError, make_engine, open_store, version_of
from bmoe_collector.store.load import load_run
from bmoe_proto.contract import columns
from sqlalchemy import inspect, text

RUN = "0123456789abcdef" * 2
# What a store of the first version held, in the SQL of that time.
FIRST = (
    (
        "INSERT INTO runs (run_id, source, outcome, exit_observed, exit_code, ended, simulated, unmeasured, n_tokens, n_turns,"
        " complete, argv, prompt, completeness, stored_wall_ns, changed_wall_ns) VALUES (:id, 'import', 'ok', :yes, 0, :yes, :no,"
        " :no, 2, 1, :yes, '[\"bmoe-cli\"]', :prompt, '{\"complete\":true}', 5, 6)"
    ),
    "INSERT INTO labels (run_no, key, value, source) VALUES (1, 'cache', '2000', 'user')",
    (
        "INSERT INTO tokens_csv (run_no, at, turn, step, wall_ms, majflt, cache_hit_pct, extra)"
        ' VALUES (1, 0, 0, 1, 1.5, 0, NULL, \'{"arm":"a"}\')'
    ),
    (
        "INSERT INTO tokens_csv (run_no, at, turn, step, wall_ms, majflt, cache_hit_pct, extra)"
        " VALUES (1, 1, 0, 2, 2.5, NULL, 12.5, NULL)"
    ),
    "INSERT INTO configs (run_no, format, cache_mb, keys) VALUES (1, 'bmoe_metrics v2', 2000, '{\"cache_mb\":2000}')",
    (
        "INSERT INTO turns (run_no, at, turn, kind, state, tokens, cancelled, text, text_view, reasoning, tok_s)"
        " VALUES (1, 0, 0, 'oneshot', 'done', 2, :no, :prompt, 'x', :prompt, 9.5)"
    ),
    "INSERT INTO artifacts (run_no, name, kind, size, sha256, state) VALUES (1, 'metrics.csv', 'metrics', 9, 'ab', 'stored')",
    "INSERT INTO verdicts (run_no, at, code, severity, evidence) VALUES (1, 0, 'short_run', 'warn', '2 tokens')",
)


def test_data_of_the_first_version_is_kept(empty_url):
    engine = make_engine(empty_url)
    assert migrate.upgrade(engine, "0001") == (None, "0001")
    with engine.connect().execution_options(bmoe_write=True) as connection, connection.begin():
        for statement in FIRST:
            connection.execute(
                text(
                    statement.replace(":", "\\:")
                    .replace("\\:id", ":id")
                    .replace("\\:yes", ":yes")
                    .replace("\\:no", ":no")
                    .replace("\\:prompt", ":prompt")
                ),
                {
                    name: value
                    for name, value in {"id": RUN, "yes": True, "no": False, "prompt": b"\x00p"}.items()
                    if f":{name}" in statement
                },
            )
        store_id = connection.execute(text("SELECT value FROM meta WHERE key = 'store_id'")).scalar()
    with pytest.raises(StoreTooOldError, match="bmoe db upgrade"):
        open_store(empty_url)
    assert migrate.upgrade(engine) == ("0001", HEAD)
    assert migrate.upgrade(engine) == (HEAD, HEAD)
    assert migrate.differences(engine) == []
    engine.dispose()
    store = open_store(empty_url)
    assert store.store_id == store_id
    found = load_run(store, RUN)
    assert found.run["prompt"] == b"\x00p"
    assert found.run["labels"] == {"cache": "2000"}
    assert found.csv.get("majflt") == [0, None]
    assert found.csv.get("cache_hit_pct") == [None, 12.5]
    assert found.csv.get("arm") == ["a", None]
    assert found.preamble == {"cache_mb": 2000}
    assert found.turns[0].summary["tok_s"] == 9.5
    assert [artifact.name for artifact in found.artifacts] == ["metrics.csv"]
    store.close()


def test_two_hosts_that_start_at_once_both_find_the_tables(empty_url):
    opened, failed = [], []

    def start() -> None:
        try:
            opened.append(open_store(empty_url))
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=start) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert len({store.store_id for store in opened}) == 1
    for store in opened:
        store.close()


def test_a_migration_that_fails_leaves_the_database_as_it_was(tmp_path, monkeypatch):
    url = str(tmp_path / "runs.db")
    engine = make_engine(url)
    migrate.upgrade(engine, "0001")

    def broken(*_args: object, **_more: object) -> None:
        raise RuntimeError("power cut")

    from alembic import op

    monkeypatch.setattr(op, "create_index", broken)
    with pytest.raises(RuntimeError, match="power cut"):
        migrate.upgrade(engine)
    assert version_of(engine) == "0001"
    monkeypatch.undo()
    assert migrate.upgrade(engine) == ("0001", HEAD)
    engine.dispose()


def test_every_name_of_the_contract_has_a_column():
    assert {column.name for column in columns.METRICS.values()} <= set(tables.TOKENS_CSV.c.keys())
    assert set(columns.PREAMBLE) <= set(tables.CONFIGS.c.keys())
    kept_apart = {"id", "cancelled", "tokens", "text", "reasoning"}
    assert set(columns.DONE) - kept_apart <= set(tables.TURNS.c.keys())
    assert {column.done for column in columns.TRAILER.values()} <= set(tables.TURNS.c.keys())
    progress = {"text", "reasoning"}  # of engines before 0.18: they are turned into deltas
    assert set(columns.PROGRESS) - progress <= set(tables.TOKENS_STDOUT.c.keys())


def test_every_table_says_what_it_is():
    assert [table.name for table in tables.METADATA.tables.values() if not table.comment] == []


def test_the_columns_of_facts_are_facts():
    known = {fact.name: fact.kind for fact in FACTS}
    assert {name: kind for name, kind in names.FACT_COLUMNS.items() if known.get(name) != kind} == {}


def test_a_server_does_not_look_the_run_up_for_each_token(empty_url):
    engine = make_engine(empty_url)
    migrate.upgrade(engine)
    with engine.connect() as connection:
        keys = {table.name: bool(inspect(connection).get_foreign_keys(table.name)) for table in tables.DERIVED}
    engine.dispose()
    unchecked = {table.name for table in tables.UNCHECKED} if engine.dialect.name == "postgresql" else set()
    assert {name for name, has in keys.items() if not has} == unchecked
