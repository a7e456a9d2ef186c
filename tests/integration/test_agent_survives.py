"""Agents killed at the worst moments: nothing is repeated, nothing is skipped, and what the engine wrote is on record."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from bmoe_proto.v1 import telemetry_pb2 as pb
from support.agent_records import cell, client, end, of, plan, record, state_of, stream
from support.agents import Agent, agent, wait_for

pytestmark = pytest.mark.agent


@pytest.fixture
def phone(tmp_path: Path) -> Iterator[Agent]:
    (tmp_path / "copies").mkdir()
    settings = f"tok_s=40,load_s=0.05,prefill_s=0.05,copy={tmp_path / 'copies'}"
    with agent(tmp_path, settings) as made:
        yield made


def submit(phone: Agent, asked: pb.Plan) -> None:
    with client(phone) as connected:
        assert not connected.submit(asked).refused


def wait_tokens(phone: Agent, count: int, index: int = 0) -> None:
    """Wait until the cell of this index has some tokens, or is over: a busy machine may look too late."""
    with client(phone) as connected:

        def far_enough() -> bool:
            status = connected.status()
            measured = status.cell_index == index and status.tokens >= count
            return measured or connected.listing().plans[-1].done > index

        wait_for(far_enough, f"{count} tokens of cell {index}")


def copies(phone: Agent) -> list[bytes]:
    """What the engines wrote to stdout, by their own independent copies."""
    folder = phone.home.parent / "copies"
    return sorted(path.read_bytes() for path in folder.iterdir() if path.name.endswith("stdout"))


def recorded(runs: dict[str, list[pb.Frame]]) -> list[bytes]:
    """What the runs' frames say that the engines wrote."""
    return sorted(stream(frames, pb.STREAM_STDOUT) for frames in runs.values())


def test_engine_outlives_its_agent_and_is_adopted(phone: Agent) -> None:
    asked = plan([cell("long", n_predict=800), cell("next")])
    phone.start()
    submit(phone, asked)
    wait_tokens(phone, 20)
    phone.kill()
    phone.start()
    wait_tokens(phone, 80)
    assert phone.stop() == 0  # asked to stop, it leaves its engine as alive as SIGKILL does
    assert phone.engines()
    phone.start()
    wait_for(lambda: state_of(phone, asked.plan_id) == "done", "the plan's end")
    phone.stop()
    runs = record(phone)
    assert list(runs) == ["long/1", "next/1"]
    ended = end(runs["long/1"])
    assert (ended.outcome, ended.exit_code, len(ended.segments)) == ("ok", 0, 3)
    launched = of(runs["long/1"], "launched")
    assert [item.adopted for item in launched] == [False, True, True]
    assert len({(item.pid, item.start_ticks) for item in launched}) == 1
    assert recorded(runs) == copies(phone)


def test_engine_that_ended_meanwhile_is_closed_from_disk(phone: Agent) -> None:
    asked = plan([cell("short", n_predict=60)])
    phone.start()
    submit(phone, asked)
    wait_tokens(phone, 10)
    phone.kill()
    wait_for(lambda: not phone.engines(), "the engine's own end")
    phone.start()
    wait_for(lambda: state_of(phone, asked.plan_id) == "done", "the plan's end")
    phone.stop()
    frames = record(phone)["short/1"]
    ended = end(frames)
    assert (ended.outcome, ended.exit_observed, ended.exit_code) == ("ok", True, 0)
    assert recorded({"": frames}) == copies(phone)
    assert "closed_from_disk" in [note.code for note in of(frames, "note")]


def test_session_whose_agent_dies_finishes_its_turn_and_is_partial(phone: Agent) -> None:
    turns = [pb.Turn(kind="generate", prompt=f"turn {n}", n_predict=40) for n in range(3)]
    asked = plan([cell("talk", turns=turns)])
    phone.start()
    submit(phone, asked)
    wait_tokens(phone, 45)  # within the second turn
    phone.kill()
    phone.start()
    wait_for(lambda: state_of(phone, asked.plan_id) == "done", "the plan's end")
    phone.stop()
    frames = record(phone)["talk/1"]
    ended = end(frames)
    assert (ended.outcome, ended.turns_asked, ended.turns_sent, ended.turns_ended) == ("partial", 3, 2, 2)
    last = {report.index: report.state for report in of(frames, "turn")}
    assert last == {0: "done", 1: "done", 2: "not_run"}
    assert recorded({"": frames}) == copies(phone)


def test_reboot_loses_the_run_and_runs_the_cell_again(phone: Agent, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "proc/sys/kernel/random").mkdir(parents=True)
    (tree / "sys").mkdir()
    (tree / "tree.toml").write_text('about = "the same machine after a restart"\n')
    boot = tree / "proc/sys/kernel/random/boot_id"
    boot.write_text("00000000-0000-4000-8000-000000000001\n")
    phone.env["BMOE_AGENT_TREE"] = str(tree)
    asked = plan([cell("before"), cell("during", n_predict=60), cell("after")])
    phone.start()
    submit(phone, asked)
    wait_tokens(phone, 10, 1)
    phone.kill()
    for pid in phone.engines():  # the launcher too: a phone that restarts leaves no exit status
        os.kill(pid, signal.SIGKILL)
    boot.write_text("00000000-0000-4000-8000-000000000002\n")
    phone.start()
    wait_for(lambda: state_of(phone, asked.plan_id) == "done", "the plan's end", 90)
    phone.stop()
    runs = record(phone)
    assert {name: end(frames).outcome for name, frames in runs.items()} == {
        "before/1": "ok",
        "during/1": "lost",
        "during/2": "ok",
        "after/1": "ok",
    }
    lost = end(runs["during/1"])
    assert not lost.exit_observed
    assert not lost.HasField("exit_code")
    assert not lost.HasField("signal")
    assert len({frame.segment_opened.boot_id for frame in runs["during/1"] if frame.HasField("segment_opened")}) == 2
    # The lost engine was killed between a line and its copy at worst: they differ by less than a line.
    whole, cut = copies(phone), stream(runs["during/1"], pb.STREAM_STDOUT)
    assert any(copy.startswith(cut) or cut.startswith(copy) for copy in whole)
    assert [stream(runs[name], pb.STREAM_STDOUT) in whole for name in ("before/1", "during/2", "after/1")] == [True] * 3


def test_a_cell_that_was_waiting_at_its_gate_waits_again(phone: Agent) -> None:
    never = pb.GateAsk(gate="mem_available_mib", comparison=">=", bound=1e12, timeout_s=600, policy="skip")
    asked = plan([cell("gated", gates=[never]), cell("next")])
    phone.start()
    submit(phone, asked)
    with client(phone) as connected:
        wait_for(lambda: [run.cell for run in connected.listing().runs] == ["gated"], "the run's durable start")
    phone.kill()
    phone.start()
    with client(phone) as connected:
        wait_for(lambda: len(connected.listing().runs) == 2, "the second run's durable start")
        connected.cancel(asked.plan_id, only_current_cell=True)
    wait_for(lambda: state_of(phone, asked.plan_id) == "done", "the plan's end")
    phone.stop()
    runs = record(phone)
    ends = {name: end(frames) for name, frames in runs.items()}
    assert {name: (ended.outcome, ended.launched) for name, ended in ends.items()} == {
        "gated/1": ("lost", False),
        "gated/2": ("aborted", False),
        "next/1": ("ok", True),
    }
    assert "cancelled" in [note.code for note in of(runs["gated/2"], "note")]


def test_plan_goes_on_through_kills_without_repeating_or_skipping(phone: Agent) -> None:
    cells = [cell(f"cell {number}", n_predict=20) for number in range(5)]
    asked = plan(cells)
    phone.start()
    submit(phone, asked)
    for number in (0, 2, 3):
        wait_tokens(phone, 3, number)
        phone.kill()
        phone.start()
    wait_for(lambda: state_of(phone, asked.plan_id) == "done", "the plan's end", 90)
    phone.stop()
    runs = record(phone)
    assert list(runs) == [f"cell {number}/1" for number in range(5)]
    assert [end(frames).outcome for frames in runs.values()] == ["ok"] * 5
    assert recorded(runs) == copies(phone)


def test_engine_nobody_adopted_is_ended_before_the_next_launch(phone: Agent) -> None:
    asked = plan([cell("orphaned", n_predict=1500)])
    phone.start()
    submit(phone, asked)
    wait_tokens(phone, 5)
    phone.kill()
    assert phone.engines()
    for segment in (phone.home / "spool").glob("*/*.seg"):
        segment.unlink()  # its record is gone, so nobody can adopt it
    for path in (phone.home / "plans").iterdir():
        path.unlink()
    patient = pb.GateAsk(gate="mem_available_mib", comparison=">=", bound=1, policy="skip")
    asked = plan([cell("next", gates=[patient])])
    phone.start()
    submit(phone, asked)
    wait_for(lambda: state_of(phone, asked.plan_id) == "done", "the plan's end")
    phone.stop()
    frames = record(phone)["next/1"]
    assert end(frames).outcome == "ok"
    told = ["survivor" if frame.note.code == "survivor" else frame.WhichOneof("what") for frame in frames]
    assert told.index("survivor") < told.index("gate")  # a gate must not wait for what it uses
    assert not phone.engines()


def test_a_cancel_outlives_the_agent_and_so_does_the_wake_lock(phone: Agent, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("termux-wake-lock", "termux-wake-unlock"):
        (tools / name).write_text(f"#!/bin/sh\necho {name} >>{tmp_path}/said\n")
        (tools / name).chmod(0o755)
    phone.env["PATH"] = f"{tools}:{phone.env['PATH']}"
    deaf = phone.home.parent / "engine"
    deaf.write_text(deaf.read_text().replace("#!/bin/sh\n", "#!/bin/sh\ntrap '' TERM\n"))
    long = cell("long", n_predict=1900)
    long.watchdog.grace_s = 4
    asked = plan([long, cell("never reached")])
    phone.start()
    submit(phone, asked)
    wait_tokens(phone, 5)
    with client(phone) as connected:
        assert connected.cancel(asked.plan_id).cancelled
    phone.kill()  # the engine was asked at most, and does not listen
    assert phone.engines()
    phone.start()
    wait_for(lambda: not phone.engines(), "the end of a cancelled plan's engine", 30)
    with client(phone) as connected:
        wait_for(lambda: connected.status().state == "idle", "rest")
    phone.stop()
    runs = record(phone)
    ended = end(runs["long/1"])
    assert list(runs) == ["long/1"]
    assert (ended.outcome, ended.cause, ended.signal) == ("aborted", "cancelled", signal.SIGKILL)
    assert (tmp_path / "said").read_text().split() == ["termux-wake-lock", "termux-wake-lock", "termux-wake-unlock"]
