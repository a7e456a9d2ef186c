"""Session cells of a real agent in the database: every way a turn can go, and every turn joined to its rows of the CSV."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from bmoe_proto.v1 import telemetry_pb2 as pb
from support.agent_records import add_engines, cell, client, plan
from support.agents import BIN, Agent, agent, wait_for
from support.nights import Morning, morning, submit, told, wait_done

SETTINGS = "tok_s=100,load_s=0.05,prefill_s=0.05"
LONG = 900  # tokens of a turn that outlasts the restart of an agent on a loaded machine
STREAMING = ["--moe-stream", "--cache-mb", "4", "--force-cache"]
PROMPTS = [
    "Grüße, 世界: ŝanĝiĝas ĉiu ĵaŭdo",
    'quotes "id":7, "cmd":"cancel" and \\u0041 \\n as text',
    "line one\nline two\ttabbed\r\nthird",
    "emoji 👩‍🚀🏳️‍🌈, right to left שלום, combining e\u0301, tag \U000e0041, BOM \ufeff inside",
    "x" * 70_000 + " ends here: ß",
]


@pytest.fixture
def phone(tmp_path: Path) -> Iterator[Agent]:
    with agent(tmp_path, SETTINGS) as made:
        yield made


def generate(prompt: str, n_predict: int = 5, **more: object) -> pb.Turn:
    return pb.Turn(kind="generate", prompt=prompt, n_predict=n_predict, **more)


def decide(*choices: str, **more: object) -> pb.Turn:
    return pb.Turn(kind="decide", prefix="Is it so? ", suffix="Answer:", choices=choices, **more)


def states(found: Morning, run: dict) -> list[str]:
    return [turn["state"] for turn in found.table("turns", run)]


def check_csv(found: Morning, run: dict) -> None:
    """Generations that ended are numbered from 0 in both sources, and their rows agree."""
    turns = [turn for turn in found.table("turns", run) if turn["turn"] is not None]
    assert [turn["turn"] for turn in turns] == list(range(len(turns)))
    rows = found.table("tokens_csv", run)
    lines = found.table("tokens_stdout", run)
    assert [(row["turn"], row["step"]) for row in rows] == [(row["turn"], row["step"]) for row in lines]
    for turn in turns:
        own = [row["step"] for row in rows if row["turn"] == turn["turn"]]
        assert len(own) == turn["tokens"], turn["request_id"]
        assert own == list(range(own[0], own[0] + len(own))) if own else True
    assert [item["turn"] for item in found.table("trailers", run)] == [turn["turn"] for turn in turns]


def test_turns_go_every_way_and_join_their_rows(phone: Agent, tmp_path: Path) -> None:
    add_engines(phone, {"breaks": f"{SETTINGS},fault=fatal@9", "falls": f"{SETTINGS},fault=segv@9"})
    mixed = [
        generate("first", 6, think=False),
        generate("cut after tokens", 1800, cancel_after_tokens=4),
        generate("too long", 999_999, expect_rejected=True),
        generate("cut after a time", 1800, cancel_after_ms=300),
        decide("yes", "no", "perhaps", idle_before_ms=700),
        decide("yes", "yes", expect_rejected=True),
        decide("on", "off", reuse_prefix=True),
        generate("go on", 7, clear_kv=False),
    ]
    refused = [generate("fine", 4), decide(), generate("too long", 999_999), generate("fine again", 3)]
    cells = [
        cell("mixed", turns=mixed, flags=STREAMING),
        cell("refused", turns=refused),
        cell("breaks", engine="breaks", turns=[generate("one", 5), generate("two", 9), generate("three", 5)]),
        cell("falls", engine="falls", turns=[generate("one", 5), generate("two", 9), generate("three", 5)]),
        cell("last", turns=[generate("well", 3)]),
    ]
    asked = plan(cells)
    phone.start()
    submit(phone, asked)
    assert wait_done(phone, asked) == "done"
    found = morning(phone, tmp_path)
    assert [run["cell"] for run in found.runs] == [one.name for one in cells]  # one run each, however many turns
    assert all(run["complete"] for run in found.runs), [run["completeness"] for run in found.runs]

    run = found.of("mixed")
    assert (run["outcome"], run["turns_asked"], run["turns_sent"], run["turns_ended"]) == ("ok", 8, 8, 8)
    rows = found.table("turns", run)
    assert states(found, run) == [
        "done",
        "cancelled",
        "rejected",
        "cancelled",
        "decided",
        "rejected",
        "decided",
        "done",
    ]
    assert [row["kind"] for row in rows if row["state"] == "decided"] == ["decide", "decide"]
    assert [bool(row["cancelled"]) for row in rows] == [state == "cancelled" for state in states(found, run)]
    assert [row["tokens"] for row in rows if row["state"] == "done"] == [6, 7]
    assert all(4 <= row["tokens"] < 1800 for row in rows if row["request_id"] == 2)
    assert len(rows[4]["decide"]["choice_logp"]) == 3
    assert rows[6]["decide"]["n_reused"] > 0
    assert rows[2]["error"]["fatal"] is False
    assert "n_ctx" in rows[2]["error"]["msg"]
    assert "share their first token" in rows[5]["error"]["msg"]
    assert rows[4]["begin_boot_ns"] - rows[3]["end_boot_ns"] >= 690_000_000  # the idle gap, by the tail's stamps
    check_csv(found, run)
    assert [sample["kind"] for sample in found.table("samples", run)].count("turn") == 8

    run = found.of("refused")
    assert (run["outcome"], run["cause"]) == ("partial", "rejected")
    assert "2 requests rejected unexpectedly" in told(run)
    assert states(found, run) == ["done", "rejected", "rejected", "done"]
    check_csv(found, run)

    run = found.of("breaks")
    assert (run["outcome"], run["cause"], run["exit_code"]) == ("failed", "engine_error", 1)
    assert (run["turns_asked"], run["turns_sent"]) == (3, 2)
    assert states(found, run) == ["done", "fatal", "not_run"]
    assert "llama_decode failed" in told(run)
    broken = found.table("turns", run)[1]
    assert (broken["turn"], broken["tokens"], broken["error"]["fatal"]) == (1, 3, True)

    run = found.of("falls")
    assert (run["outcome"], run["cause"], run["turns_sent"]) == ("killed", "signal:SIGSEGV", 2)
    assert states(found, run)[0] == "done"
    assert states(found, run)[2] == "not_run"
    assert found.of("last")["outcome"] == "ok"


def test_a_cancel_is_never_lost_whatever_its_timing(phone: Agent, tmp_path: Path) -> None:
    """Each turn would go on for minutes: only its cancel ends it. Prefill included, and right at the first token."""
    add_engines(phone, {"slow": "tok_s=100,load_s=0.05,prefill_s=0.3"})
    picks = random.Random(7)
    waits = [0, 1, 20, 100, 250, 290, 300, 310, 400, *(picks.randrange(500) for _ in range(3))]
    timed = [generate(f"{wait} ms", 1900, cancel_after_ms=wait) for wait in waits]
    counted = [generate(f"{count} tokens", 1900, cancel_after_tokens=count) for count in (0, 1, 20)]
    after = [generate("not cut by what was meant for another", 5)]
    asked = plan([cell("cuts", engine="slow", turns=[*timed, *counted, *after]), cell("last")])
    phone.start()
    submit(phone, asked)
    assert wait_done(phone, asked) == "done"
    found = morning(phone, tmp_path)
    run = found.of("cuts")
    assert states(found, run) == ["cancelled"] * (len(timed) + len(counted)) + ["done"]
    assert (run["outcome"], run["cause"]) == ("ok", "tokens")
    rows = found.table("turns", run)
    assert rows[-1]["tokens"] == 5
    assert max(row["tokens"] or 0 for row in rows) < 500
    check_csv(found, run)


def test_the_user_ends_a_session_at_any_moment(phone: Agent, tmp_path: Path) -> None:
    """While it loads, between turns and in a turn: the cell is aborted, says what was not run, and the next one runs."""
    add_engines(phone, {"loads": "tok_s=100,load_s=5,prefill_s=0.05"})
    turns = [generate("a", 3), generate("b", 1900)]
    cells = [
        cell("loading", engine="loads", turns=turns),
        cell("resting", turns=[generate("a", 3), generate("b", 3, idle_before_ms=600_000)]),
        cell("talking", turns=turns),
        cell("last", turns=[generate("well", 3)]),
    ]
    asked = plan(cells)
    phone.start()
    submit(phone, asked)
    with client(phone) as connected:
        for name, state, tokens in (
            ("loading", "loading", 0),
            ("resting", "measuring", 3),
            ("talking", "measuring", 9),
        ):

            def there(name: str = name, state: str = state, tokens: int = tokens) -> bool:
                status = connected.status()
                return (status.cell, status.state) == (name, state) and status.tokens >= tokens

            wait_for(there, f"{name} to be at it")
            connected.cancel(asked.plan_id, only_current_cell=True)
    assert wait_done(phone, asked) == "done"
    found = morning(phone, tmp_path)
    assert {run["cell"]: (run["outcome"], run["cause"]) for run in found.runs} == {
        "loading": ("aborted", "cancelled"),
        "resting": ("aborted", "cancelled"),
        "talking": ("aborted", "cancelled"),
        "last": ("ok", "tokens"),
    }
    assert states(found, found.of("loading")) == ["not_run", "not_run"]
    assert states(found, found.of("resting")) == ["done", "not_run"]
    assert states(found, found.of("talking"))[0] == "done"
    assert found.of("talking")["turns_sent"] == 2


def test_prompts_arrive_whole_and_an_agent_killed_in_mid_turn_says_what_was_not_run(tmp_path: Path) -> None:
    with agent(tmp_path, SETTINGS) as phone:
        heard = tmp_path / "heard"
        listening = tmp_path / "listening"
        # What the engine reads, byte for byte; `tee` ends with the session's stdin.
        script = f'#!/bin/sh\ncase "$*" in *--session*) ;; *) exec {BIN}/bmoe-sim "$@";; esac\n'
        script += f'tee -a {heard} | BMOE_SIM="{SETTINGS}" {BIN}/bmoe-sim "$@"\n'
        listening.write_text(script)
        listening.chmod(0o755)
        phone.run("init", "--engine", f"listening={listening}")
        said = [generate(prompt, 3) for prompt in PROMPTS]
        said.append(decide("ja — jawohl", "nein, 不", "может быть"))
        cut = [generate("short", 3), generate("long", LONG), generate("never", 3)]
        big = ["-c", "65536"]
        asked = plan([cell("said", engine="listening", turns=said, flags=big), cell("cut", turns=cut), cell("last")])
        phone.start()
        submit(phone, asked)
        with client(phone) as connected:

            def inside() -> bool:
                status = connected.status()
                return status.cell == "cut" and status.tokens >= 10

            wait_for(inside, "the second turn")
        phone.kill()
        phone.start()
        assert wait_done(phone, asked) == "done"
        found = morning(phone, tmp_path)
    run = found.of("said")
    assert run["outcome"] == "ok", told(run)
    rows = found.table("turns", run)
    assert [row["request"]["prompt"] for row in rows[:-1]] == PROMPTS
    assert rows[-1]["request"]["choices"] == list(said[-1].choices)
    lines = heard.read_bytes().splitlines()
    for prompt in PROMPTS:
        if prompt.isprintable() and '"' not in prompt and "\\" not in prompt:
            assert any(prompt.encode() in line for line in lines), prompt
    assert not any(b"\\u" in line.replace(b"\\\\u", b"") for line in lines)
    for choice in said[-1].choices:
        assert any(choice.encode() in line for line in lines), choice
    run = found.of("cut")
    assert (run["outcome"], run["turns_asked"], run["turns_sent"]) == ("partial", 3, 2)
    assert states(found, run) == ["done", "done", "not_run"]
    assert [row["tokens"] for row in found.table("turns", run)[:2]] == [3, LONG]
    assert "1 of 3 turns were not sent" in told(run)
    assert "adopted" in found.notes(run)
    check_csv(found, run)
    assert found.of("last")["outcome"] == "ok"
