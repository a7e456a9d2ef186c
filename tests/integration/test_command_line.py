"""How `bmoe` ends: readers that leave, full disks, Ctrl-C, and databases that are not there or not ours."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sqlite3
import subprocess

import pytest
from bmoe_collector import common
from bmoe_collector.cli import main
from bmoe_collector.store import engine
from support.host import BMOE


@pytest.fixture
def bmoe(tmp_path, monkeypatch, capsys):
    """One command, in this process; its exit code must be as said."""
    monkeypatch.setenv("BMOE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("BMOE_ARTIFACTS", str(tmp_path / "artifacts"))
    monkeypatch.delenv("BMOE_DB", raising=False)

    def call(*words: object, code: int = 0) -> tuple[str, str]:
        capsys.readouterr()
        found = main([*map(str, words)])
        out, err = capsys.readouterr()
        assert found == code, err
        return out, err

    return call


@pytest.mark.parametrize("words", [("--help",), ("runs", "--fields"), ("sql", "--views"), ("plan", "--help")])
def test_a_reader_that_left_is_no_error(words):
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([BMOE, *words], stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(writer)
    assert done.stderr == ""


@pytest.mark.parametrize("words", [("--help",), ("runs", "--fields")])
def test_a_full_disk_behind_stdout_is_one_line(words):
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = subprocess.run([BMOE, *words], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 3
    assert len(done.stderr.splitlines()) == 1
    assert "No space left" in done.stderr


def test_stdout_that_was_closed_is_none():
    done = subprocess.run(["sh", "-c", f"'{BMOE}' runs --fields >&-"], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_ctrl_c_while_a_command_loads_is_one_word(bmoe, monkeypatch):
    def interrupted(_name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(common, "import_module", interrupted)
    assert bmoe("runs", code=130) == ("", "interrupted\n")


@pytest.mark.parametrize(
    "words",
    [
        ("runs",),
        ("show", "last"),
        ("compare", "aaaa", "bbbb"),
        ("regress", "aaaa", "--baseline", "bbbb"),
        ("judge", "--all"),
        ("sql", "SELECT 1"),
        ("trace", "route", "aaaa"),
        ("export", "runs", "--to", "x.csv"),
        ("db", "check"),
        ("db", "vacuum"),
        ("db", "reparse", "--all"),
    ],
)
def test_asking_a_database_that_is_not_there_makes_none(bmoe, tmp_path, monkeypatch, words):
    wrong = tmp_path / "rnus.db"
    _, err = bmoe(*words, "--db", wrong, code=2)
    assert f"--db {wrong}: there is no such database" in err
    monkeypatch.setenv("BMOE_DB", str(wrong))
    _, err = bmoe(*words, code=2)
    assert f"BMOE_DB {wrong}: there is no such database" in err
    assert not wrong.exists()


def test_a_folder_is_no_database(bmoe, tmp_path):
    assert f"--db {tmp_path}: is a folder" in bmoe("runs", "--db", tmp_path, code=2)[1]


def test_a_database_of_something_else_is_left_as_it_is(bmoe, tmp_path):
    other = tmp_path / "places.sqlite"
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE bookmarks (url TEXT)")
    connection.close()
    before = other.read_bytes()
    for words in (("runs",), ("db", "upgrade"), ("queue",)):
        _, err = bmoe(*words, "--db", other, code=3)
        assert f"{other}: this SQLite database is of something else (it holds bookmarks) and was left as it is" in err
    assert other.read_bytes() == before


def test_a_database_one_may_only_read_answers_and_stays(bmoe, tmp_path, captures, monkeypatch):
    db = tmp_path / "theirs.db"
    bmoe("import", captures / "oneshot-mmap", "--db", db)
    before = hashlib.sha256(db.read_bytes()).hexdigest()
    # The tests may run as root, whom no mode keeps from writing.
    monkeypatch.setattr(engine, "_only_readable", lambda _file: True)
    assert "tiny-qwen" in bmoe("runs", "--db", db)[0]
    assert "tiny-qwen" in bmoe("show", "last", "--db", db)[0]
    assert bmoe("sql", "SELECT count(*) FROM v_runs", "--db", db)[0].split() == ["count(*)", "1"]
    for words in (("import", captures / "oneshot-ngram"), ("judge", "--all")):
        _, err = bmoe(*words, "--db", db, code=3)
        assert len(err.splitlines()) == 1
        assert "name one of your own with --db" in err
    assert hashlib.sha256(db.read_bytes()).hexdigest() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["artifacts", "theirs.db"]


def test_a_trace_that_was_archived_is_read_where_it_is(bmoe, tmp_path, captures, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    db = tmp_path / "runs.db"
    bmoe("import", captures / "oneshot-traced", "--db", db)
    assert "3 archived" in bmoe("db", "vacuum", "--archive", "old", "--older-than", 0, "--db", db)[0]
    monkeypatch.chdir("/")
    assert "routings" in bmoe("trace", "route", "last", "--db", db)[0]


def test_import_says_where_each_run_lay_and_what_could_not_be_read(bmoe, tmp_path, captures, monkeypatch):
    years = tmp_path / "years"
    (years / "closed").mkdir(parents=True)
    for name in ("oneshot-mmap", "oneshot-killed"):
        shutil.copytree(captures / name, years / name)
    (years / "notes.txt").write_text("bread, milk")
    really = os.scandir

    def scandir(path):
        # The tests may run as root, whom no mode keeps out.
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return really(path)

    monkeypatch.setattr(os, "scandir", scandir)
    out, err = bmoe("import", years, "--db", tmp_path / "runs.db")
    assert {line.split()[-1] for line in out.splitlines()} == {f"{years}/oneshot-mmap", f"{years}/oneshot-killed"}
    assert f"{years}/closed: cannot be read: Permission denied" in err
    assert err.splitlines()[-1] == "2 runs: 2 new; 1 file of no run"
    assert (
        bmoe("import", years, "--db", tmp_path / "runs.db")[1].splitlines()[-1] == "2 runs: 2 known; 1 file of no run"
    )


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("collect", "--once", "--metrics", 99999), 2, "--metrics"),
        (("db", "vacuum", "--archive", "old", "--older-than", -1), 2, "--older-than"),
        (("import", "DIR", "--artifacts", "nosuch://x"), 3, "bmoe import: nosuch://x: "),
        (("db", "check", "--artifacts", "nosuch://x"), 3, "bmoe db: nosuch://x: "),
        (("plan", "init", "DIR"), 2, "is a folder; name a file in it"),
        (("export", "runs", "--to", "DIR"), 2, "the format is the file's suffix"),
        (("trace", "route", "DIR"), 2, "is a folder; name the trace in it"),
        (("events", "DIR"), 2, "is a directory"),
        (("plan", "check", "DIR"), 2, "Is a directory"),
        (("run", "-m", "tiny", "--prompt-file", "DIR"), 2, "Is a directory"),
        (("plan", "check", "/dev/zero"), 2, "more than 16 MiB"),
        (("run", "-m", "tiny", "--prompt-file", "/dev/zero"), 2, "more than 16 MiB"),
        (("runs", "--label", "who=\udcff"), 2, "what was typed is no UTF-8 text"),
        (("import", "/dev/zero"), 0, "/dev/zero: cannot be read: is neither a file nor a folder"),
    ],
)
def test_what_is_wrong_with_a_command_is_one_message(bmoe, tmp_path, words, code, says):
    db = tmp_path / "runs.db"
    bmoe("db", "upgrade", "--db", db)
    (tmp_path / "folder").mkdir()
    _, err = bmoe(*[tmp_path / "folder" if word == "DIR" else word for word in words], "--db", db, code=code)
    assert says in err
    assert "Traceback" not in err


def test_a_database_that_lost_bits_is_named_and_is_no_fault_of_ours(bmoe, tmp_path, captures):
    db = tmp_path / "runs.db"
    bmoe("import", captures / "oneshot-mmap", "--db", db)
    with contextlib.closing(sqlite3.connect(db)) as connection, connection:
        connection.execute("UPDATE runs SET completeness = '{\"complete\": tru', evidence = cast(x'22ff22' as text)")
    for words in (("show", "last"), ("judge", "--all")):
        _, err = bmoe(*words, "--db", db, code=3)
        assert "Traceback" not in err
        assert "database: " in err
        assert "`bmoe db check`" in err
