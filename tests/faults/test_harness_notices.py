"""The harness itself is shown to notice: a planted loss, a planted duplicate, a planted leak.

Once in a database that is spoilt afterwards (what the truth says of each kind of damage), and once in a collector that is
made wrong before the play (the whole way from the schedule to the finding).
"""

import contextlib
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from faults.harness import leaks, truth
from faults.harness.database import SqliteDatabase
from faults.harness.play import play
from faults.harness.schedule import CellAsked, Schedule, Step
from support.agents import Agent, make_engine, make_model, wait_for
from support.host import Host
from support.phones import need_phones

QUIET = Schedule(
    seed=0,
    scale=0.2,
    database="sqlite",
    phones=1,
    wifi=(),
    small=(),
    cells=(CellAsked("only", 120, False, ""),),
    steps=(Step(1.0, 0.1, "forwards_removed", -1, 0.5), Step(2.5, 0.3, "adbd_kill", 0, 0.5)),
)


class Played:
    """One run of one agent, drained, and what spoils its database."""

    def __init__(self, folder: Path, phone: truth.Phone) -> None:
        self.folder = folder
        self.phone = phone

    def against(self, copies: Path) -> list[str]:
        """What the truth says of the database as it is when engines had left other copies."""
        phone = truth.Phone(self.phone.uuid, copies, {})
        host = self.folder / "host"
        return truth.check(SqliteDatabase(host), [phone], ["tiny"], host / "artifacts")

    def spoilt(self, name: str, *statements: str) -> list[str]:
        """What the truth says of a copy of the database after some statements."""
        folder = self.folder / name
        folder.mkdir()
        shutil.copy(self.folder / "host" / "runs.db", folder / "runs.db")
        database = SqliteDatabase(folder)
        with contextlib.closing(sqlite3.connect(database.path)) as connection, connection:
            for statement in statements:
                assert connection.execute(statement).rowcount > 0, statement
        return truth.check(database, [self.phone], ["tiny"], self.folder / "host" / "artifacts")


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    folder = tmp_path_factory.mktemp("played")
    copies = folder / "copies"
    copies.mkdir()
    agent = Agent(folder / "home")
    engine = make_engine(folder, f"tok_s=60,load_s=0.05,prefill_s=0.05,copy={copies}")
    agent.init(engine, make_model(folder / "models").parent)
    agent.start()
    try:
        host = Host(folder / "host")
        where = f"local:{agent.socket}"
        host.pair(agent, where)
        host.json("run", "--model", "tiny.gguf", "-p", "truth", "-n", "150", "--name", "tiny", "-d", where)
        host.json("collect", "--until-drained", "-d", where)
        uuid = agent.uuid.hex()
    finally:
        agent.destroy()
    return Played(folder, truth.Phone(uuid, copies, {}))


class TestSpoiltDatabase:
    def test_as_it_is_nothing_is_said(self, played):
        assert played.spoilt("clean") == []

    def test_a_block_that_is_gone(self, played):
        middle = "(select min(offset) from blocks where offset > 0)"
        found = played.spoilt("block", f"delete from blocks where offset = {middle}")
        assert any("a block at" in problem for problem in found)
        assert any("frames" in problem for problem in found)

    def test_the_newest_block_that_is_gone(self, played):
        found = played.spoilt("last", "delete from blocks where offset = (select max(offset) from blocks)")
        assert any("0 ends" in problem for problem in found)

    def test_a_run_that_is_gone(self, played):
        found = played.spoilt("run", "delete from blocks", "delete from tokens_stdout", "delete from runs")
        assert any("is not stored" in problem for problem in found)
        assert any("attempts []" in problem for problem in found)

    def test_a_row_of_tokens_that_is_gone_or_too_many(self, played):
        found = played.spoilt("less", "delete from tokens_stdout where at = 7")
        assert any("149 rows of tokens, 150 progress lines" in problem for problem in found)
        columns = [name for name in _columns(played) if name not in {"run_no", "at"}]
        said = ", ".join(f'"{name}"' for name in columns)
        again = f"insert into tokens_stdout (run_no, at, {said}) select run_no, 1000, {said} from tokens_stdout where at = 7"
        assert any("151 rows" in problem for problem in played.spoilt("more", again))

    def test_a_sample_that_is_gone(self, played):
        found = played.spoilt("sample", "delete from samples where boot_ns = (select max(boot_ns) from samples)")
        assert any("rows of sample" in problem for problem in found)

    def test_a_block_that_is_there_twice(self, played):
        first = "(select max(offset) from blocks where offset < (select max(offset) from blocks))"
        again = (
            "insert into blocks (run_no, segment, offset, first_seq, frames, data) "
            f"select run_no, segment, offset + 100000000, first_seq, frames, data from blocks where offset = {first}"
        )
        assert any("twice" in problem for problem in played.spoilt("twice", again))

    def test_a_file_that_is_damaged_or_lacks_rows(self, played):
        found = played.spoilt("rows", "delete from tokens_csv where at = 7")
        assert any("150 rows, 149 are stored" in problem for problem in found)
        named = "(select sha256 from artifacts where kind = 'stdout')"
        found = played.spoilt("swapped", f"update artifacts set sha256 = {named} where kind = 'metrics'")
        assert any("that are not those of its name" in problem or "not the same" in problem for problem in found)
        gone = played.spoilt("gone", "update artifacts set sha256 = '00' || substr(sha256, 3) where kind = 'metrics'")
        assert any("called stored and cannot be read" in problem for problem in gone)

    def test_a_file_that_an_engine_wrote_otherwise_or_that_nobody_names(self, played):
        folder = played.folder / "copies-files"
        shutil.copytree(played.phone.copies, folder)
        (path,) = folder.glob("*.metrics.csv")
        text = path.read_bytes()
        path.write_bytes(text[:-1] + b"?")
        (problem,) = played.against(folder)
        assert "metrics.csv has" in problem
        path.write_bytes(text)
        path.with_name(path.name.replace("metrics", "route")).write_bytes(b"rows")
        (problem,) = played.against(folder)
        assert "route.csv was written and is not named" in problem

    def test_a_file_that_never_came_and_a_run_that_is_called_whole(self, played):
        found = played.spoilt("file", "update artifacts set state = 'awaited' where kind = 'metrics'")
        assert any("is awaited" in problem for problem in found)
        found = played.spoilt("whole", "update runs set complete = 0")
        assert any("is not complete" in problem for problem in found)

    def test_an_engine_that_wrote_something_else(self, played):
        folder = played.folder / "copies-else"
        shutil.copytree(played.phone.copies, folder)
        for path in folder.glob("*.stdout"):
            path.write_bytes(path.read_bytes().replace(b"BMOE_PROGRESS", b"BMOE_PROGRESs", 1))
        (problem,) = played.against(folder)
        assert "they differ from byte" in problem


def _columns(played: Played) -> list[str]:
    with contextlib.closing(sqlite3.connect(played.folder / "host" / "runs.db")) as connection:
        return [row[1] for row in connection.execute("pragma table_info(tokens_stdout)")]


LEAKER = """
import os, socket, sqlite3, sys, threading
held = []
for word in sys.stdin:
    word = word.strip()
    if word == "descriptors":
        held += [socket.socket() for _ in range(20)]
    elif word == "threads":
        for _ in range(20):
            threading.Thread(target=threading.Event().wait, daemon=True).start()
    elif word == "memory":
        held.append(os.urandom(200 << 20))
    elif word == "connections":
        held += [sqlite3.connect(sys.argv[1]) for _ in range(5)]
        for connection in held:
            connection.execute("create table if not exists t (x)")
    print("done", flush=True)
"""


@pytest.mark.parametrize(("what", "named"), [("descriptors", "descriptors"), ("threads", "threads"), ("memory", "rss")])
def test_what_a_process_holds_too_much_is_named(what, named):
    process = subprocess.Popen([sys.executable, "-c", LEAKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdin is not None
        assert process.stdout is not None

        def say(word: str) -> None:
            process.stdin.write(word + "\n")
            process.stdin.flush()
            assert process.stdout.readline() == "done\n"

        say("nothing")
        before = leaks.look(process.pid)
        assert leaks.beyond(before, leaks.look(process.pid), leaks.COLLECTOR) == []
        say(what)
        wait_for(lambda: leaks.beyond(before, leaks.look(process.pid), leaks.COLLECTOR), "the leak to show", 20)
        (found,) = leaks.beyond(before, leaks.look(process.pid), leaks.COLLECTOR)
        assert found.startswith(named)
    finally:
        process.kill()
        process.communicate()


def test_more_connections_than_a_pool_keeps_are_named_and_no_others(tmp_path):
    database = SqliteDatabase(tmp_path)
    command = [sys.executable, "-c", LEAKER, str(database.path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        before = leaks.look(process.pid, database)
        for expected in (5, 10):
            process.stdin.write("connections\n")
            process.stdin.flush()
            assert process.stdout.readline() == "done\n"
            after = leaks.look(process.pid, database)
            assert (after.connections, after.descriptors) == (expected, before.descriptors)
            assert bool(leaks.beyond(before, after, leaks.COLLECTOR)) is (expected > 5)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.serial
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("defect", "said"),
    [
        ("forget", "bytes of stdout are missing"),
        ("twice", "rows of tokens"),
        ("descriptors", "collector leaks descriptors"),
    ],
)
def test_a_collector_that_is_wrong_is_noticed(defect, said):
    need_phones()
    result = play(QUIET, plant=defect)
    assert any(said in problem for problem in result.problems), result.as_dict()


@pytest.mark.serial
def test_being_told_to_end_twice_ends_what_was_begun_and_leaves_nothing(tmp_path):
    need_phones()
    command = [sys.executable, "-m", "faults.harness", "--seeds", "2,2", "--jobs", "2"]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(command, env=env, cwd=Path(__file__).parents[1], stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: len(list(tmp_path.glob("bmoe-f2-*/phone0/home/lock"))) == 2, "two plays to be under way")
        process.terminate()
        time.sleep(0.1)  # the second word comes while the first is obeyed
        process.terminate()
        assert process.wait(60) == 1
    finally:
        process.kill()
        process.wait()
    assert list(tmp_path.glob("bmoe-*")) == []
