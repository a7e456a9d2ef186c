"""The store on both databases: opening, versions, bulk writes, finding runs, leases, artifacts."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
from bmoe_collector.store import find, leases, migrate
from bmoe_collector.store import schema as tables
from bmoe_collector.store.artifacts import ArtifactError, Artifacts
from bmoe_collector.store.bulk import bulk
from bmoe_collector.store.engine import (
    HEAD,
    StoreError,
    StoreTooNewError,
    StoreTooOldError,
    open_store,
    view,
)
from sqlalchemy import func, insert, select, text
from sqlalchemy.exc import DBAPIError, OperationalError


def a_run(run_id: str, **more: object) -> dict[str, object]:
    base: dict[str, object] = {
        "run_id": run_id,
        "source": "import",
        "outcome": "ok",
        "exit_observed": False,
        "ended": True,
        "simulated": False,
        "unmeasured": False,
        "n_tokens": 0,
        "n_turns": 0,
        "complete": True,
        "stored_wall_ns": 1,
        "changed_wall_ns": 1,
    }
    return base | more


def test_an_empty_database_gets_its_tables_and_an_identity_once(empty_url):
    first = open_store(empty_url)
    again = open_store(empty_url)
    assert first.store_id == again.store_id
    assert len(first.store_id) == 32
    assert migrate.differences(first.engine) == []
    first.close()
    again.close()


def test_head_is_the_newest_migration():
    assert migrate.head() == HEAD


@pytest.mark.parametrize(
    ("version", "error", "says"),
    [
        ("0000", StoreTooOldError, "bmoe db upgrade"),
        ("9999", StoreTooNewError, "newer bmoe-fleet"),
    ],
)
def test_another_version_is_refused_with_what_to_do(store_url, version, error, says):
    store = open_store(store_url)
    with store.write() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = :v"), {"v": version})
    store.close()
    with pytest.raises(error, match=says):
        open_store(store_url)


def test_a_foreign_database_and_an_unreachable_one_are_named(tmp_path):
    with pytest.raises(StoreError, match="sqlite and postgresql"):
        open_store("mysql://nobody@localhost/x")
    broken = tmp_path / "broken.db"
    broken.write_bytes(b"this is no database, but it is long enough to have a header that SQLite looks at" * 20)
    with pytest.raises(StoreError, match=r"broken\.db"):
        open_store(str(broken))


def test_bulk_writes_keep_null_zero_bytes_and_json_apart(store_url):
    store = open_store(store_url)
    with store.write() as connection:
        run_no = connection.execute(insert(tables.RUNS).values(**a_run("ab" * 16))).inserted_primary_key[0]
        bulk(
            connection,
            tables.TOKENS_STDOUT,
            ("run_no", "at", "step", "majflt", "cache_hit_pct", "delta_text", "reset", "extra"),
            [
                (run_no, 0, 1, 0, None, b"\x00\xff\n\t\\N", True, '{"a":"\\u0000"}'),
                (run_no, 1, 2, None, 0.0, None, None, None),
            ],
        )
    with store.read() as connection:
        rows = connection.execute(select(tables.TOKENS_STDOUT).order_by(tables.TOKENS_STDOUT.c.at)).mappings().all()
    assert rows[0]["majflt"] == 0
    assert rows[0]["cache_hit_pct"] is None
    assert bytes(rows[0]["delta_text"]) == b"\x00\xff\n\t\\N"
    assert rows[0]["reset"] is True
    assert rows[0]["extra"] == {"a": "\x00"}
    assert rows[1]["majflt"] is None
    assert rows[1]["cache_hit_pct"] == 0.0
    assert rows[1]["extra"] is None
    store.close()


def test_a_failed_transaction_leaves_nothing(store_url):
    store = open_store(store_url)

    def broken() -> None:
        with store.write() as connection:
            connection.execute(insert(tables.RUNS).values(**a_run("cd" * 16)))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        broken()
    with store.read() as connection:
        assert connection.execute(select(func.count()).select_from(tables.RUNS)).scalar() == 0
    store.close()


def test_runs_are_found_by_unique_prefixes_and_by_what_they_were_called_before(store_url):
    store = open_store(store_url)
    one, two = "abcd" + "0" * 28, "abce" + "f" * 28
    with store.write() as connection:
        connection.execute(insert(tables.RUNS), [a_run(one), a_run(two)])
        number = connection.execute(select(tables.RUNS.c.run_no).where(tables.RUNS.c.run_id == one)).scalar()
        connection.execute(insert(tables.RUN_ALIASES).values(run_id="1234" + "5" * 28, run_no=number))
    assert find.find_run(store, "abcd") == one
    assert find.find_run(store, "ABCEF") == two
    assert find.find_run(store, "12345") == one
    assert find.find_run(store, "last") == two
    for word, near in (("abc", None), ("abcd1", [one]), ("zzzz", None), ("ffff", None)):
        with pytest.raises(find.RunNotFoundError) as caught:
            find.find_run(store, word)
        if near:
            assert caught.value.near == near
    store.close()


def test_a_lease_has_one_holder_and_tells_the_former_one(store_url):
    store = open_store(store_url)
    mine = leases.acquire(store, "phone", "me", 10, now_ns=0)
    assert mine is not None
    assert leases.acquire(store, "phone", "you", 10, now_ns=5_000_000_000) is None
    renewed = leases.acquire(store, "phone", "me", 10, now_ns=5_000_000_000)
    assert renewed is not None
    assert renewed.token == mine.token
    yours = leases.acquire(store, "phone", "you", 10, now_ns=20_000_000_000)
    assert yours is not None
    assert yours.token > mine.token
    leases.release(store, renewed)  # no longer ours: no effect
    assert leases.holder_of(store, "phone", now_ns=21_000_000_000) == yours
    leases.release(store, yours)
    assert leases.holder_of(store, "phone", now_ns=21_000_000_000) is None
    store.close()


def test_what_depends_on_a_lease_is_committed_with_it(store_url):
    store = open_store(store_url)
    mine = leases.acquire(store, "phone", "me", 10, now_ns=0)
    assert mine is not None
    with store.write() as connection:  # run out, and nobody has taken it: it is ours as long as that is so
        assert leases.keep(connection, mine, 10, now_ns=20_000_000_000)
    assert leases.acquire(store, "phone", "you", 10, now_ns=25_000_000_000) is None
    yours = leases.acquire(store, "phone", "you", 10, now_ns=31_000_000_000)
    assert yours is not None
    with store.write() as connection:
        assert not leases.keep(connection, mine, 10, now_ns=32_000_000_000)
        assert leases.keep(connection, yours, 10, now_ns=32_000_000_000)
    store.close()


def test_the_leases_of_a_shelf_are_renewed_at_once_but_for_those_that_are_no_longer_ours(store_url):
    store = open_store(store_url)
    names = [f"phone{number}" for number in range(6)]
    mine = {name: leases.acquire(store, name, "me", 10, now_ns=0) for name in names[:4]}
    leases.release(store, mine["phone1"])
    assert leases.acquire(store, "phone2", "you", 10, now_ns=11_000_000_000)
    leases.acquire(store, "phone4", "you", 10, now_ns=0)
    assert leases.renew(store, "me", names, 10, now_ns=12_000_000_000) == {"phone0", "phone3"}
    held = {name: leases.holder_of(store, name, now_ns=13_000_000_000) for name in names}
    assert {name: lease and (lease.holder, lease.token) for name, lease in held.items()} == {
        "phone0": ("me", 1),
        "phone1": None,
        "phone2": ("you", 2),
        "phone3": ("me", 1),
        "phone4": None,
        "phone5": None,
    }
    assert leases.renew(store, "me", [], 10) == set()
    store.close()


def test_a_lease_that_a_commit_is_renewing_keeps_no_other_from_being_renewed(postgres_url):
    store = open_store(postgres_url)
    mine = [leases.acquire(store, name, "me", 10) for name in ("a", "b")]
    with store.write() as connection:
        assert leases.keep(connection, mine[0], 10)
        assert leases.renew(store, "me", ["a", "b"], 10) == {"b"}
    assert leases.renew(store, "me", ["a", "b"], 10) == {"a", "b"}
    store.close()


def test_what_a_server_says_is_committed_is_written(postgres_url):
    """The tests' own server answers before it has written, as some people's do; what it says to us must hold."""
    store = open_store(postgres_url)
    with store.read() as connection:
        assert connection.execute(text("SHOW synchronous_commit")).scalar() == "on"
    store.close()


def test_nobody_takes_a_lease_while_its_holder_commits_under_it(postgres_url):
    store = open_store(postgres_url)
    mine = leases.acquire(store, "phone", "me", 1)
    assert mine is not None
    with store.write() as connection:
        assert leases.keep(connection, mine, 30)
        began = time.monotonic()
        with pytest.raises(OperationalError, match="lock timeout"):
            leases.acquire(store, "phone", "you", 10, now_ns=mine.until_wall_ns + 1)
        assert time.monotonic() - began < leases.BUSY_S + 3
    assert leases.acquire(store, "phone", "you", 10) is None
    store.close()


def test_a_transaction_in_which_nothing_is_said_is_ended(postgres_url):
    store = open_store(postgres_url)
    mine = leases.acquire(store, "phone", "me", 1)
    assert mine is not None

    def stopped_in_it() -> None:
        with store.write(idle_s=0.2) as connection:
            assert leases.keep(connection, mine, 30)
            time.sleep(0.6)
            connection.execute(text("SELECT 1"))

    with pytest.raises(DBAPIError):
        stopped_in_it()
    assert leases.holder_of(store, "phone", now_ns=mine.until_wall_ns + 1) is None
    store.close()


def test_leases_under_clocks_that_differ_and_that_are_set(store_url, monkeypatch):
    store = open_store(store_url)
    assert leases.acquire(store, "phone", "me", 30) is not None
    now = leases.wall_ns()
    monkeypatch.setattr(leases, "wall_ns", lambda: now + 3600 * leases.NS_PER_S)
    another = leases.acquire(store, "phone", "a host an hour ahead", 30)
    # a server's own clock counts; the one host of a file cannot tell its clock from time that passed
    assert (another is None) == (store.dialect == "postgresql")
    ahead = leases.acquire(store, "other", "me", 30, now_ns=now + 3600 * leases.NS_PER_S)
    assert ahead is not None
    monkeypatch.undo()  # set back by an hour: what seems to last that long runs out as if taken now
    assert leases.acquire(store, "other", "you", 30, now_ns=now) is None
    assert leases.acquire(store, "other", "you", 30, now_ns=now + 29 * leases.NS_PER_S) is None
    taken = leases.acquire(store, "other", "you", 30, now_ns=now + 31 * leases.NS_PER_S)
    assert taken is not None
    assert taken.token == ahead.token + 1
    store.close()


def test_two_hosts_ask_for_one_lease_at_once(store_url):
    store = open_store(store_url)
    got: list[object] = []
    threads = [
        threading.Thread(target=lambda n=n: got.append(leases.acquire(store, "phone", f"host{n}", 60)))
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len([lease for lease in got if lease is not None]) == 1
    store.close()


def test_artifacts_are_stored_once_and_verified_when_read(tmp_path):
    artifacts = Artifacts(str(tmp_path / "a"))
    data = os.urandom(3000) * 1000
    sha = artifacts.put(data)
    assert artifacts.put(data) == sha
    assert artifacts.get(sha) == data
    assert [name for name, _ in artifacts.all()] == [sha]
    with pytest.raises(ArtifactError, match="not stored"):
        artifacts.put_file(__file__, "0" * 64)
    assert [name for name, _ in artifacts.all()] == [sha]
    path = Path(artifacts.path(sha))
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(bytes(damaged))
    with pytest.raises(ArtifactError):
        artifacts.get(sha)
    with pytest.raises(ArtifactError, match="is not in"):
        artifacts.get("1" * 64)


def test_artifacts_go_to_any_fsspec_url():
    artifacts = Artifacts("memory://bmoe-test-artifacts")
    sha = artifacts.put(b"x" * 10_000)
    assert artifacts.get(sha) == b"x" * 10_000
    artifacts.remove(sha)
    assert not artifacts.has(sha)


def test_text_views_fit_both_databases():
    assert view(b"a\x00b\xff") == "a␀b�"
    assert view("\ud83d lone") == "��� lone"
