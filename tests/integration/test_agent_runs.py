"""The agent with the real stand-in engine: what one run leaves in the spool, for every way a run can go."""

import hashlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from bmoe_proto.v1 import telemetry_pb2 as pb
from support.agent_records import add_engines, cell, client, end, of, plan, record, run_plan, state_of, stream
from support.agents import Agent, agent, wait_for

pytestmark = pytest.mark.agent


# Loads, and never answers a request.
DEAF_ENGINE = """#!/bin/sh
case "$1" in
    --version) echo 'bmoe-cli 0.24.0-simulator' ;;
    --help) echo '-m --model --session --csv' ;;
    *) echo 'BMOE_READY {"load_s":0.1}'; exec sleep 600 ;;
esac
"""


@pytest.fixture
def phone(tmp_path: Path) -> Iterator[Agent]:
    (tmp_path / "copies").mkdir()
    with agent(tmp_path, f"tok_s=60,load_s=0.05,prefill_s=0.05,copy={tmp_path / 'copies'}") as made:
        yield made


def test_one_shot_run_is_recorded_whole(phone: Agent) -> None:
    asked = cell(
        "one", artifacts=["metrics", "route"], n_predict=30, flags=["--moe-stream", "--cache-mb", "4", "--force-cache"]
    )
    frames = run_plan(phone, plan([asked]))["one/1"]
    ended = end(frames)
    assert (ended.outcome, ended.exit_observed, ended.exit_code) == ("ok", True, 0)
    started = of(frames, "run_started")[0]
    assert started.simulated
    assert started.engine.sha256
    assert started.model.size > 0
    assert started.argv[1:4] == [b"-m", str(phone.home.parent / "models" / "tiny.gguf").encode(), b"-p"]
    stdout = stream(frames, pb.STREAM_STDOUT)
    assert stdout.count(b"BMOE_PROGRESS ") == 30
    assert hashlib.sha256(stdout).digest() == ended.stdout_sha256
    directory = Path(started.directory)
    (copy,) = (phone.home.parent / "copies").glob("*stdout")
    assert copy.read_bytes() == stdout
    assert not (directory / "stdout").exists()  # it is in the record, and its room is the next cell's
    assert {item.kind: item.sha256 for item in ended.artifacts} == {
        kind: hashlib.sha256((directory / f"{kind}.csv").read_bytes()).digest() for kind in ("metrics", "route")
    }
    samples = [sample.kind for sample in of(frames, "sample")]
    assert samples[:2] == ["entry", "launch"]
    assert samples[-1] == "exit"
    assert ended.observer.cpu_ns > 0


def test_session_turns_each_end_as_they_should(phone: Agent) -> None:
    turns = [
        pb.Turn(kind="generate", prompt='Grüße, 世界 \\u0041 "quoted"\n', n_predict=5),
        pb.Turn(kind="generate", prompt="go on for ever", n_predict=2000, cancel_after_tokens=3),
        pb.Turn(kind="generate", prompt="x", n_predict=999999, expect_rejected=True),
        pb.Turn(kind="decide", prefix="Is it? ", suffix="Answer:", choices=["yes", "no"], idle_before_ms=300),
        pb.Turn(kind="generate", prompt="again", n_predict=4, clear_kv=False),
    ]
    frames = run_plan(phone, plan([cell("talk", turns=turns)]))["talk/1"]
    ended = end(frames)
    last = {}
    for report in of(frames, "turn"):
        last[report.index] = report.state
    assert last == {0: "done", 1: "cancelled", 2: "rejected", 3: "decided", 4: "done"}
    assert (ended.outcome, ended.turns_asked, ended.turns_sent, ended.turns_ended) == ("ok", 5, 5, 5)
    requests = stream(frames, pb.STREAM_STDIN).splitlines()
    assert "Grüße, 世界".encode() in requests[0]
    assert json.loads(requests[0])["prompt"] == turns[0].prompt
    assert requests[-1] == b'{"cmd":"close"}'
    assert b'{"cmd":"cancel"}' in requests
    turn_samples = [sample.kind for sample in of(frames, "sample")].count("turn")
    assert turn_samples == 5


def test_every_cause_of_death_is_told_apart_and_the_next_cell_runs(tmp_path: Path) -> None:
    faults = {
        "segv": ("fault=segv@4", "killed", "signal:SIGSEGV"),
        "crash": ("fault=crash@4", "killed", "signal:SIGABRT"),
        "kill": ("fault=kill@4", "killed", "signal:SIGKILL"),
        "fatal": ("fault=fatal@4", "failed", ""),
        "hang": ("fault=hang@4", "aborted", "watchdog:decode"),
    }
    with agent(tmp_path, "") as phone:
        add_engines(phone, {name: f"tok_s=60,load_s=0.05,prefill_s=0.05,{sim}" for name, (sim, _, _) in faults.items()})
        library = phone.home.parent / "unlinked"
        library.write_text(
            '#!/bin/sh\necho \'CANNOT LINK EXECUTABLE "bmoe-cli": library "libc++_shared.so" not found\' >&2\nexit 1\n'
        )
        library.chmod(0o755)
        phone.run("init", "--engine", f"unlinked={library}")
        deaf = phone.home.parent / "deaf"
        deaf.write_text(DEAF_ENGINE)
        deaf.chmod(0o755)
        phone.run("init", "--engine", f"deaf={deaf}")
        cells = [cell(name, engine=name) for name in faults]
        for one in cells:
            one.watchdog.decode_s = 1.5
            one.watchdog.grace_s = 1
        cells += [
            cell("linker", engine="unlinked"),
            cell("deaf", engine="deaf", turns=[pb.Turn(prompt="x")], watchdog=pb.WatchdogAsk(prefill_s=1.5)),
            cell("no_engine", engine="absent"),
            cell("no_model", model="absent"),
            cell("bad_flag", flags=["--no-such-flag"]),
            cell("config", flags=["--moe-stream", "--cache-mb", "500"]),
            cell("fine"),
        ]
        runs = run_plan(phone, plan(cells))
    found = {name.partition("/")[0]: end(frames) for name, frames in runs.items()}
    assert list(found) == [one.name for one in cells]
    for name, (_, outcome, cause) in faults.items():
        assert (found[name].outcome, found[name].launched) == (outcome, True), found[name]
        assert found[name].cause == cause or not cause
        assert stream(runs[f"{name}/1"], pb.STREAM_STDOUT).count(b"BMOE_PROGRESS ") == 3
        assert found[name].artifacts[0].problem
    assert of(runs["hang/1"], "watchdog")[0].rule == "decode"
    assert (found["linker"].outcome, found["linker"].cause) == ("failed", "linker")
    assert "libc++_shared.so" in " ".join(found["linker"].evidence)
    assert (found["deaf"].cause, found["deaf"].turns_sent, found["deaf"].turns_ended) == ("watchdog:prefill", 1, 0)
    assert (found["no_engine"].outcome, found["no_engine"].launched) == ("failed", False)
    assert (found["no_model"].cause, found["bad_flag"].cause) == ("refused:model", "refused:flags")
    assert (found["config"].outcome, found["config"].cause, found["config"].exit_code) == ("failed", "refused:flags", 1)
    assert found["fine"].outcome == "ok"


def test_gates_retries_and_limits_leave_every_cell_on_record(tmp_path: Path) -> None:
    with agent(tmp_path, "tok_s=100,load_s=0.05,prefill_s=0.05") as phone:
        add_engines(phone, {"crashing": "tok_s=100,load_s=0.05,fault=crash@2"})
        never = {"gate": "mem_available_mib", "comparison": ">=", "bound": 1e12, "timeout_s": 0}
        cells = [
            cell("skipped", gates=[pb.GateAsk(policy="skip", **never)]),
            cell("flagged", gates=[pb.GateAsk(policy="run-flagged", **never)]),
            cell("twice", engine="crashing", retries=1),
            cell("aborting", gates=[pb.GateAsk(policy="abort", **never)]),
            cell("never reached"),
        ]
        runs = run_plan(phone, plan(cells))
        assert {name: end(frames).outcome for name, frames in runs.items()} == {
            "skipped/1": "skipped",
            "flagged/1": "ok",
            "twice/1": "killed",
            "twice/2": "killed",
            "aborting/1": "skipped",
            "never reached/1": "skipped",
        }
        assert of(runs["flagged/1"], "gate")[0].state == "gave_up"
        assert end(runs["skipped/1"]).cause == "gate:mem_available_mib"
        limited = plan([cell("no room"), cell("no room either")], limits=pb.Limits(min_free_bytes=1 << 60))
        runs = run_plan(phone, limited)
        for name in ("no room/1", "no room either/1"):
            ended = end(runs[name])
            assert (ended.outcome, ended.cause, ended.launched) == ("skipped", "gate:limit", False)
            assert "min_free_bytes" in ended.evidence[0]


def test_cancelling_a_cell_and_a_plan(phone: Agent) -> None:
    cells = [cell("first", n_predict=1500), cell("second", n_predict=1500), cell("third")]
    asked = plan(cells)
    phone.start()
    with client(phone) as connected:
        connected.submit(asked)

        def measuring(name: str) -> bool:
            status = connected.status()
            return status.cell == name and status.tokens > 3

        wait_for(lambda: measuring("first"), "tokens of the first cell")
        assert connected.cancel(asked.plan_id, only_current_cell=True).cancelled
        wait_for(lambda: measuring("second"), "tokens of the second cell")
        assert connected.cancel("").cancelled
        wait_for(lambda: connected.status().state == "idle", "rest after the plan was cancelled")
        assert not connected.cancel(asked.plan_id).cancelled
        assert connected.submit(asked).already
    assert state_of(phone, asked.plan_id) == "cancelled"
    phone.stop()
    outcomes = {name: (end(frames).outcome, end(frames).cause) for name, frames in record(phone).items()}
    assert outcomes == {"first/1": ("aborted", "cancelled"), "second/1": ("aborted", "cancelled")}


def test_wake_lock_and_preheat_are_on_record(phone: Agent, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("termux-wake-lock", "termux-wake-unlock"):
        (tools / name).write_text(f"#!/bin/sh\necho {name} >>{tmp_path}/said\n")
        (tools / name).chmod(0o755)
    phone.env["PATH"] = f"{tools}:{phone.env['PATH']}"
    frames = run_plan(phone, plan([cell("warm", preheat_s=2, stop_apps=["com.example.game"]), cell("same")]))["warm/1"]
    notes = {note.code: json.loads(note.facts_json or "{}") for note in of(frames, "note")}
    assert notes["preheat"]["s"] >= 2
    assert end(frames).observer.cpu_ns < 500_000_000  # what heated the phone is not what watching cost
    assert notes["stop_apps"] == {"asked": ["com.example.game"], "done": False}
    assert "wake_lock" not in notes
    assert (tmp_path / "said").read_text().split() == ["termux-wake-lock", "termux-wake-unlock"]


def test_the_cold_speed_is_not_measured_beside_a_cell(phone: Agent) -> None:
    asked = plan([cell("long", n_predict=1500)])
    phone.start()
    with client(phone) as connected:
        connected.submit(asked)
        wait_for(lambda: connected.status().tokens > 3, "tokens")
        refused = phone.run("baseline", check=False)
        assert (refused.returncode, "the agent here is measuring" in refused.stderr) == (3, True)
        assert not (phone.home / "baseline.json").exists()
        looked = json.loads(phone.run("gates", "--json").stdout)["speed_probe_ratio"]
        assert "not looked at" in looked["text"]
        connected.cancel(asked.plan_id)


def test_run_from_the_command_line(phone: Agent) -> None:
    done = phone.run("run", "--model", "tiny", '--prompt=-n 5 "$HOME"', "-n", "6", "--json")
    told = json.loads(done.stdout)
    assert (told["outcome"], told["tokens"], told["exit"]) == ("ok", 6, 0)
    started = of(record(phone)["run/1"], "run_started")[0]
    assert b'-n 5 "$HOME"' in list(started.argv)
    refused = phone.run("run", "--model", "tiny", "--", "--csv", "/tmp/elsewhere.csv", check=False)
    assert refused.returncode == 3
    assert "--csv is the agent's to give" in refused.stderr


def test_interrupting_a_run_leaves_nothing_running_and_nothing_half_written(phone: Agent) -> None:
    command = [sys.executable, "-c", "from bmoe_agent.cli import main; raise SystemExit(main())"]
    running = subprocess.Popen(
        [*command, "run", "--model", "tiny", "-n", "1500"], env=phone.env, stderr=subprocess.PIPE
    )
    wait_for(lambda: len(phone.engines()) == 2, "the engine and its launcher")
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 3
    assert b"interrupted" in said
    assert not phone.engines()
    ended = end(record(phone)["run/1"])
    assert (ended.outcome, ended.cause) == ("aborted", "cancelled")


def test_a_second_agent_on_a_home_says_so(phone: Agent) -> None:
    phone.start()
    second = phone.run("serve", check=False)
    assert second.returncode == 3
    assert "running here already" in second.stderr
    status = json.loads(phone.run("status", "--json").stdout)
    assert (status["running"], status["state"]) == (True, "idle")
