"""`bmoe demo` as a newcomer runs it, and what is left when it is interrupted."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from support.agents import BIN, make_engine, make_model, wait_for
from support.host import BMOE, Host


@pytest.fixture
def host(tmp_path: Path) -> Host:
    made = Host(tmp_path / "host")
    made.env["TMPDIR"] = str(tmp_path / "tmp")
    (tmp_path / "tmp").mkdir()
    return made


def named(folder: Path) -> list[str]:
    """Command lines of processes that name a folder."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                line = Path(f"/proc/{entry}/cmdline").read_bytes()
            except OSError:
                continue
            if os.fsencode(str(folder) + "/bmoe-demo") in line:
                found.append(line.replace(b"\0", b" ").decode(errors="replace"))
    return found


def test_demo_stores_a_complete_run_and_leaves_nothing(host: Host, tmp_path: Path) -> None:
    done = host.bmoe("demo", "-n", "24", "--json")
    answer = json.loads(done.stdout)
    assert list(answer) == ["run"]
    shown = host.json("show", answer["run"])
    assert shown["run"]["outcome"] == "ok"
    assert shown["run"]["exit"] == 0
    assert shown["run"]["simulated"] is True
    assert shown["completeness"]["complete"] is True
    assert shown["turns"][0]["tokens"] == 24
    assert {item["kind"] for item in shown["artifacts"]} >= {"metrics", "stdout", "stderr"}
    assert "simulated" in [verdict["code"] for verdict in shown["verdicts"]]
    assert list((tmp_path / "tmp").iterdir()) == []
    assert named(tmp_path / "tmp") == []


def test_demo_runs_the_engine_it_is_told_and_says_no_when_that_fails(host: Host, tmp_path: Path) -> None:
    model = make_model(tmp_path / "models")
    host.env["BMOE_CLI"] = str(make_engine(tmp_path, "fault=fatal@3"))
    assert "go together" in host.bmoe("demo", code=2).stderr
    host.env["BMOE_MODEL"] = str(tmp_path / "absent.gguf")
    assert "no such file" in host.bmoe("demo", code=2).stderr
    host.env["BMOE_MODEL"] = str(model)
    answer = json.loads(host.bmoe("demo", "-n", "9", "--json", code=1).stdout)
    assert host.json("show", answer["run"])["run"]["outcome"] != "ok"
    assert named(tmp_path / "tmp") == []


def test_demo_interrupted_leaves_nothing_running(host: Host, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [str(BMOE), "demo", "-n", "1900"], env=host.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        engine = str(BIN / "bmoe-sim") + " -m "
        wait_for(lambda: any(engine in line for line in named(tmp_path / "tmp")), "the engine to run")
        wait_for(lambda: host.json("runs"), "the run to be stored")
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, out
    assert b"goes on" not in out
    [run] = host.json("runs")
    assert run["outcome"] == "aborted", out
    wait_for(lambda: named(tmp_path / "tmp") == [], "the demo's processes to be gone", 10)
    assert list((tmp_path / "tmp").iterdir()) == []


def test_help_and_wrong_usage(host: Host) -> None:
    listed = host.bmoe("--help").stdout
    for name in ("demo", "collect", "show", "import", "events"):
        assert f"  {name} " in listed
    assert "--json" in host.bmoe("collect", "--help").stdout
    assert "did you mean `show`" in host.bmoe("shwo", code=2).stderr
    assert host.bmoe("collect", "--no-such-option", code=2).stdout == ""
    host.bmoe("run", code=2)
