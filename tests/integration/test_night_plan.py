"""A night without a collector: 12 cells x 3 repeats, two agents killed, the phone restarted; drained in the morning."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from bmoe_collector.plans import load_plan
from bmoe_proto.v1 import telemetry_pb2 as pb
from support.agent_records import client
from support.agents import Agent, agent, wait_for
from support.host import stored_stdout
from support.nights import Morning, morning, restarted, submit, told, wait_done

pytestmark = pytest.mark.serial

PLAN = """
name = "a night"
model = "tiny.gguf"
prompt = "Grüße, 世界: why is order no configuration?"
flags = ["--moe-stream", "--force-cache"]
n_predict = 10
repeats = 3
order = "interleaved"
retries = 1
labels = { night = "one" }

[matrix]
"--cache-mb" = [4, 8]
"--overlap" = [true, false]

[[cells]]
name = "ends early"
environment = { BMOE_SIM = "eog=4" }

[[cells]]
name = "crashes"
environment = { BMOE_SIM = "fault=crash@3" }

[[cells]]
name = "hangs"
retries = 0
environment = { BMOE_SIM = "fault=hang@3" }

[[cells]]
name = "unknown flag"
flags = ["--no-such-flag"]
allow_unknown_flags = true

[[cells]]
name = "no model"
model = "absent.gguf"

[[cells]]
name = "exits"
environment = { BMOE_SIM = "fault=exit@2:7" }

[[cells]]
name = "warms up"
unmeasured = true
preheat_s = 0.2

[[cells]]
name = "talks"
environment = { BMOE_SIM = "tok_s=20" }
turns = [
  { prompt = "first", n_predict = 30 },
  { prompt = "second", n_predict = 1000, idle_s = 0.3, cancel_after_tokens = 2 },
  { prompt = "third", n_predict = 3 },
]

[[gates]]
gate = "mem_available_mib"
at_least = 1
timeout_s = 5
policy = "skip"

[[gates]]
gate = "mem_available_mib"
at_least = 1000000000
timeout_s = 0
policy = "run-flagged"

[[gates]]
gate = "screen"
equals = 0
timeout_s = 0
policy = "run-flagged"

[watchdog]
decode_s = 3
grace_s = 1

[question]
compare = [["cache-mb=4 overlap", "cache-mb=8 overlap"]]
metric = "tok_s"
smallest_effect = 0.1
"""

ENDS = {
    "ends early": [("ok", "eog")],
    "crashes": [("killed", "signal:SIGABRT")] * 2,
    "hangs": [("aborted", "watchdog:decode")],
    "unknown flag": [("failed", "refused:flags")],
    "no model": [("failed", "refused:model")],
    "exits": [("failed", "exit")] * 2,
    "warms up": [("ok", "tokens")],
    "talks": [("ok", "tokens")],
}
WELL = [("ok", "tokens")]
UNLAUNCHED = {"no model"}
TOLD = {"signal:SIGABRT": "SIGABRT", "watchdog:decode": "no progress in decode", "refused:flags": "--no-such-flag"}
TOLD |= {"refused:model": "absent.gguf", "exit": "exit code 7"}


@pytest.fixture
def phone(tmp_path: Path) -> Iterator[Agent]:
    (tmp_path / "copies").mkdir()
    with agent(tmp_path, f"tok_s=60,load_s=0.02,prefill_s=0.02,copy={tmp_path / 'copies'}") as made:
        yield made


def wait_inside(phone: Agent, name: str, first_index: int, tokens: int) -> None:
    """Wait until a cell of this name, from that place in the plan on, has some tokens."""
    with client(phone) as connected:

        def inside() -> bool:
            status = connected.status()
            return status.cell == name and status.cell_index >= first_index and status.tokens >= tokens

        wait_for(inside, f"{tokens} tokens of {name}", 90)


@pytest.mark.timeout(240)
def test_a_night_of_kills_and_a_restart_is_whole_in_the_morning(phone: Agent, tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(PLAN)
    plan = load_plan(path)
    assert len(plan.cells) == 36
    phone.start()
    submit(phone, plan)
    wait_inside(phone, "hangs", 0, 2)
    phone.kill()  # the engine hangs on, and its next agent's watchdog must find it
    phone.start()
    wait_inside(phone, "talks", 12, 2)
    phone.kill()  # in mid-turn: the engine's stdin closes
    phone.start()
    wait_inside(phone, "hangs", 24, 2)
    with restarted(phone, tmp_path):
        phone.start()
        assert wait_done(phone, plan) == "done"
        assert phone.engines() == []
        found = morning(phone, tmp_path)
        again = phone.run("status", "--json").stdout
        assert '"state": "idle"' in again or '"state":"idle"' in again
    check(found, plan, tmp_path)


def check(found: Morning, plan: pb.Plan, folder: Path) -> None:
    expected: list[tuple[int, str, int, str, str]] = []
    for cell in plan.cells:
        ends = list(ENDS.get(cell.name, WELL))
        if cell.name == "talks" and cell.repeat == 1:
            ends.insert(0, ("partial", "incomplete"))
        if cell.name == "hangs" and cell.repeat == 2:
            ends.insert(0, ("lost", "abandoned"))
        expected += [(cell.index, cell.name, at, *end) for at, end in enumerate(ends, 1)]
    runs = found.runs
    seen = [(run["cell_index"], run["cell"], run["attempt"], run["outcome"], run["cause"]) for run in runs]
    assert seen == expected  # in the order they were recorded in, nothing twice, nothing left out
    partial = next(run for run in runs if run["outcome"] == "partial")
    assert (partial["turns_asked"], partial["turns_sent"]) == (3, 1)
    assert [turn["state"] for turn in found.table("turns", partial)] == ["done", "not_run", "not_run"]
    starts = [run["started_wall_ns"] for run in runs]
    assert starts == sorted(starts)
    assert len({run["boot_id"] for run in runs}) == 2
    boots = [run["boot_id"] for run in runs]
    assert boots == sorted(boots, key=boots.index)  # the restart divides them once
    first_after = boots.index(boots[-1])
    assert runs[first_after]["started_boot_ns"] < runs[first_after - 1]["started_boot_ns"]
    for run, cell in zip(runs, (plan.cells[item[0]] for item in expected), strict=True):
        check_run(found, run, cell)
    check_stdout(found, folder)


def check_run(found: Morning, run: dict, cell: pb.Cell) -> None:
    name = (run["cell"], run["repeat"], run["attempt"])
    if (
        run["cause"] == "refused:flags"
    ):  # the record is whole, and says which file an engine that was refused never wrote
        assert run["completeness"]["reasons"] == ["artifact metrics.csv cannot be had: was not written"], name
    else:
        assert run["complete"], (name, run["completeness"])
    assert run["ended"], name
    assert (run["repeat"], run["block"], run["simulated"]) == (cell.repeat, cell.block, 1), name
    assert run["unmeasured"] == cell.unmeasured, name
    assert run["plan_name"] == "a night"
    assert run["question"], name
    assert run["asked"]["retries"] == cell.retries if cell.retries else "retries" not in run["asked"]
    assert told(run), name
    if wanted := TOLD.get(run["cause"]):
        assert wanted in told(run), (name, told(run))
    if run["cell"] in UNLAUNCHED:
        assert not run["launched"]
        return
    gates = found.table("gates", run)
    assert [gate["state"] for gate in gates] == ["held", "gave_up", "unreadable"], name
    assert [gate["policy"] for gate in gates] == ["skip", "run-flagged", "run-flagged"], name
    assert gates[0]["last"] > 1
    assert gates[1]["asked"] == "mem_available_mib >= 1e+09"
    assert gates[1]["readings"], name
    assert all(gate["waited_s"] >= 0 for gate in gates)
    kinds = [sample["kind"] for sample in found.table("samples", run)]
    assert kinds[:2] == ["entry", "launch"], name
    # An engine that ended before the next agent was there left no exit state to read.
    if run["outcome"] != "lost" and "closed_from_disk" not in found.notes(run):
        assert "exit" in kinds, name
    if run["outcome"] == "ok" and run["cell"] != "talks":
        assert run["n_tokens"] == (4 if run["cell"] == "ends early" else 10), name
        stored = found.table("artifacts", run)
        assert {item["kind"] for item in stored if item["state"] == "stored"} >= {"metrics", "stdout"}, name


def check_stdout(found: Morning, folder: Path) -> None:
    """Every engine's own copy is in the database once, whole; of the engine that died with the phone what was seen."""
    stored = stored_stdout(found.host)
    lost = {run["run_id"] for run in found.runs if run["outcome"] == "lost"}
    kept = Counter(data for run_id, data in stored.items() if run_id not in lost)
    written = Counter(path.read_bytes() for path in (folder / "copies").glob("*.stdout"))
    (cut,) = [stored[run_id] for run_id in lost]
    # An engine that refused its flags printed its usage, and left no copy.
    missing = written - kept
    assert sum(missing.values()) == 1, missing
    (whole,) = missing
    assert whole.startswith(cut) or cut.startswith(whole)
    assert all(data.startswith(b"usage:") for data in kept - written)
