"""An agent on this very machine as a phone: paired once, found without being named, and what each command says of it."""

from __future__ import annotations

import io
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from bmoe_collector.cli import main
from support.agents import Agent, agent, wait_for
from support.host import BMOE

Bmoe = Callable[..., tuple[str, str]]


@pytest.fixture
def phone(tmp_path: Path) -> Iterator[Agent]:
    with agent(tmp_path / "phone", "tok_s=100,load_s=0.05,prefill_s=0.05", name="bench") as made:
        made.start()
        yield made


@pytest.fixture
def bmoe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Bmoe:
    """Commands on a host where no adb server can be had: an agent on this machine needs none."""
    monkeypatch.setenv("BMOE_HOME", str(tmp_path / "host"))
    monkeypatch.setenv("BMOE_DB", str(tmp_path / "runs.db"))
    monkeypatch.setenv("ANDROID_ADB_SERVER_PORT", "1")
    monkeypatch.setenv("ADBUTILS_ADB_PATH", "/nonexistent")
    monkeypatch.delenv("COLUMNS", raising=False)

    def call(*words: str, code: int | None = 0, stdin: str = "") -> tuple[str, str]:
        capsys.readouterr()
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        found = main(words)
        out, err = capsys.readouterr()
        assert code in {None, found}, err
        return out, err

    return call


def test_before_there_is_a_phone_each_command_says_what_to_do(bmoe: Bmoe) -> None:
    assert "no phone is paired with this host: `bmoe pair`" in bmoe("watch", "--once")[0]
    assert bmoe("collect", "--once")[1].splitlines()[0] == "no phone is paired with this host: `bmoe pair`"


def test_paired_once_it_is_found_without_being_named(bmoe: Bmoe, phone: Agent) -> None:
    where = f"local:{phone.socket}"
    assert f"paired bench ({phone.uuid.hex()[:12]}) at {where}" in bmoe("pair", where, stdin=phone.secret_hex)[1]
    [line] = json.loads(bmoe("devices", "--json")[0])
    assert (line["name"], line["places"], line["state"]) == ("bench", [where], "ready")
    _, took = bmoe("run", "--model", "tiny", "-n", "5000", "--detach")
    assert took.startswith("bench: took plan ")
    assert took.rstrip().endswith("-d 'bench'` stops it")
    assert json.loads(bmoe("watch", "--once", "--json")[0])["phones"][0]["state"] == "ready"
    stop = took.split("`bmoe cancel ")[1].split("`")[0].replace("'", "").split()
    assert bmoe("cancel", *stop)[1] == "bench: the plan was cancelled\n"
    bmoe("collect", "--until-drained")
    assert [run["outcome"] for run in json.loads(bmoe("runs", "--json")[0])] == ["aborted"]
    assert bmoe("cancel")[1] == "bench: nothing was cancelled: nothing is running\n"


def test_when_it_does_not_serve_its_name_and_the_way_out_are_told(bmoe: Bmoe, phone: Agent) -> None:
    bmoe("pair", f"local:{phone.socket}", stdin=phone.secret_hex)
    phone.stop()
    [line] = json.loads(bmoe("devices", "--json")[0])
    assert (line["name"], line["state"]) == ("bench", "away")
    assert line["advice"] == "its agent is on this machine: `bmoe-agent serve`"
    assert json.loads(bmoe("watch", "--once", "--json")[0])["phones"][0]["name"] == "bench"
    assert "no paired phone was in reach" in bmoe("collect", "--once")[1]
    assert "known: bench (" in bmoe("devices", "name", "other", "x", code=2)[1]
    [found] = json.loads(bmoe("doctor", "bench", "--json", code=None)[0])["devices"]
    assert [check["name"] for check in found["checks"]] == ["agent"]  # what adb shows is not asked of this machine


def test_watch_prints_each_look_where_there_is_no_terminal(
    bmoe: Bmoe, phone: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bmoe("pair", f"local:{phone.socket}", stdin=phone.secret_hex)
    log = tmp_path / "watch.log"
    with log.open("wb") as out:
        watching = subprocess.Popen([BMOE, "watch", "--every", "1"], env=os.environ, stdout=out, stderr=out)
        try:
            wait_for(lambda: log.read_text().count("bench") >= 2, "two looks")
        finally:
            watching.kill()
            watching.wait()
    head, line = log.read_text().splitlines()[:2]
    assert (len(head) < 200, "tok/s" in head, f"local:{phone.socket}" in line) == (True, True, True)
    monkeypatch.setenv("COLUMNS", "80")
    head, line = bmoe("watch", "--once")[0].splitlines()
    assert max(len(head), len(line)) <= 80
    assert (head.split()[:3], line.split()[:3]) == (["phone", "state", "doing"], ["bench", "ready", "idle"])


def test_what_a_plan_asked_and_what_a_simulated_trace_is_are_told(bmoe: Bmoe, phone: Agent, tmp_path: Path) -> None:
    bmoe("pair", f"local:{phone.socket}", stdin=phone.secret_hex)
    plan = tmp_path / "plan.toml"
    plan.write_text(
        'name = "two"\nmodel = "tiny.gguf"\nprompt = "hi"\nn_predict = 4\nrepeats = 1\ntraced = true\n'
        'artifacts = ["metrics", "route"]\nflags = ["--moe-stream"]\n[matrix]\n"--overlap" = [true, false]\n'
        '[question]\ncompare = [["overlap", "no-overlap"]]\n'
    )
    _, err = bmoe("run", str(plan))
    word = err.splitlines()[-1].removeprefix("what the plan asked: bmoe compare --question ")
    assert "cell:" + word in bmoe("compare", "--question", word, code=1)[0]
    assert "a simulated run: nothing here is a measurement of any phone" in bmoe("trace", "route", "last")[1]
