"""Blocks of a phone into the database: which rows they become, and what is said of the run."""

from __future__ import annotations

import hashlib

import pytest
from bmoe_collector.store import schema as tables
from bmoe_collector.store.load import load_run
from bmoe_proto.v1 import telemetry_pb2 as pb
from sqlalchemy import select
from support import records
from support.ingesting import RUN, STDERR, close_stores, deliver, ingestor

__all__ = ["close_stores"]


def test_a_whole_run_is_in_its_row_and_its_tables(store_url, tmp_path):
    taker = ingestor(store_url, tmp_path)
    record = records.whole(RUN, records.oneshot(), STDERR)
    deliver(taker, record)
    found = load_run(taker.store, RUN.hex())
    run = found.run
    assert (run["outcome"], run["cause"], run["exit_code"], run["signal"], run["exit_observed"]) == (
        "ok",
        "tokens",
        0,
        None,
        True,
    )
    assert run["argv"][-2:] == ["-n", "48"]
    assert run["environment"] == {"HOME": "/home", "PATH": "/bin"}
    assert run["engine_sha256"] == "ef" * 32
    assert run["engine_version"] == "0.19.0"
    assert (run["model_size"], run["model_identity"]) == (2_000_000, "12" * 32)
    assert run["prompt"] == b"Hi"
    assert run["prompt_sha256"] == hashlib.sha256(b"Hi").hexdigest()
    assert run["device_name"] == "shelf-1"
    assert run["device_model"] == "Phone 9"
    assert run["device"]["page_bytes"] == 4096
    assert run["clock_uncertainty_ns"] == 20_000
    assert run["started_wall_ns"] > 1_699_999_999_000_000_000
    assert run["labels"] == {"cache": "4"}
    assert (run["n_tokens"], run["n_turns"]) == (48, 1)
    assert found.completeness["complete"], found.completeness
    assert found.completeness["frames"] == record.segments[0].frames
    assert len(found.stdout) == 48
    assert found.stdout.get("cache_hit_pct") == [None] * 48  # the contract's -1
    assert found.stdout.get("majflt") == [0] * 48  # a true zero
    assert len(found.loads) == 48
    assert found.turns[0].text == b"x" * 48
    assert found.turns[0].summary["tok_s"] == 200.0
    assert [line.name for line in found.report] == ["generation", "compute"]
    assert [sample.kind for sample in found.samples] == ["entry", "fast", "exit"]
    assert found.samples[0].values["rss_kib"] == 19484
    assert "EACCES" in found.samples[0].refused["proc/engine/io"]
    assert {look.part: look.fraction for look in found.residency} == {"whole": 0.5, "expert": None}
    assert found.gates[0].state == "held"
    assert found.observer["cpu_ms"] == 5.0
    assert {artifact.name for artifact in found.artifacts} == {"stdout", "stderr"}
    assert taker.artifacts.get(next(a.sha256 for a in found.artifacts if a.name == "stderr")) == STDERR
    with taker.store.read() as connection:
        assert connection.execute(select(tables.PLANS.c.name)).scalar() == "night"
        assert connection.execute(select(tables.DEVICES.c.model)).scalar() == "Phone 9"


def test_the_row_is_there_before_anything_else_of_the_run(store_url, tmp_path):
    taker = ingestor(store_url, tmp_path)
    record = records.Record(RUN, per_block=2)
    record.add(run_started=records.started())
    deliver(taker, record)
    found = load_run(taker.store, RUN.hex())
    assert found.run["outcome"] == "started"
    assert found.run["argv"]
    assert not found.completeness["complete"]


def test_while_it_runs_its_text_so_far_is_there(store_url, tmp_path):
    taker = ingestor(store_url, tmp_path)
    record = records.Record(RUN)
    record.add(run_started=records.started())
    record.output(records.progress(1, text="he") + records.progress(2, text="llo"))
    record.flush()
    deliver(taker, record)
    found = load_run(taker.store, RUN.hex())
    assert found.turns[0].text == b"hello"
    assert found.turns[0].state == "began"
    assert found.run["n_tokens"] == 2


def test_counts_and_hashes_of_the_end_are_checked(store_url, tmp_path):
    taker = ingestor(store_url, tmp_path)
    lost = records.whole(RUN, records.oneshot(), STDERR, restarts=(0.5,))
    for cursor, data in lost.batches():
        if cursor.segment != lost.segments[0].name:
            taker.blocks(records.AGENT, cursor, data)
    found = load_run(taker.store, RUN.hex())
    assert any("none of its" in reason for reason in found.completeness["reasons"])
    assert any(note.code == "gap" and not note.facts["declared"] for note in found.notes)
    for cursor, data in lost.batches():
        taker.blocks(records.AGENT, cursor, data)
    assert load_run(taker.store, RUN.hex()).completeness["complete"]

    # A writer that was killed before its first block leaves a segment in which nothing was.
    nothing = records.Record(bytes.fromhex("6c" * 16))
    nothing.add(run_started=records.started())
    nothing.flush()
    nothing.segments.append(records.Segment(b"e" * 16))
    nothing.open()
    nothing.end()
    deliver(taker, nothing)
    assert load_run(taker.store, "6c" * 16).completeness["complete"]

    other = bytes.fromhex("6b" * 16)
    wrong = records.Record(other)
    wrong.add(run_started=records.started())
    wrong.segments[0].sha.update(b"not what was written")
    wrong.end()
    deliver(taker, wrong)
    reasons = load_run(taker.store, other.hex()).completeness["reasons"]
    assert any("hash" in reason for reason in reasons)


def test_frames_nobody_knows_are_kept_and_stop_nothing(store_url, tmp_path):
    taker = ingestor(store_url, tmp_path)
    record = records.Record(RUN)
    record.add(run_started=records.started())
    segment = record.segments[0]
    newer = pb.Frame(run_id=RUN, segment=segment.name, seq=2, boot_ns=77).SerializeToString() + b"\xfa\x01\x03abc"
    record.raw(newer)
    record.raw(b"\xff\xff\xff no frame at all")
    record.output(records.oneshot(3))
    record.end()
    deliver(taker, record)
    found = load_run(taker.store, RUN.hex())
    assert found.run["n_tokens"] == 3
    assert found.completeness["complete"]
    assert any("is no frame" in problem["what"] for problem in found.run["problems"])
    with taker.store.read() as connection:
        kept = connection.execute(select(tables.UNKNOWN_FRAMES.c.data).order_by(tables.UNKNOWN_FRAMES.c.at)).scalars()
        assert [bytes(data) for data in kept] == [newer, b"\xff\xff\xff no frame at all"]


@pytest.mark.parametrize("number", ["²", "9" * 5000, "-1"])
def test_a_number_of_tokens_that_is_none_is_not_known(store_url, tmp_path, number):
    start = records.started()
    start.cell.flags.extend(["-n", number])
    taker = ingestor(store_url, tmp_path)
    deliver(taker, records.whole(RUN, records.oneshot(), STDERR, start=start))
    assert load_run(taker.store, RUN.hex()).run["outcome"] == "ok"


def test_values_no_column_can_hold_go_beside_it(store_url, tmp_path):
    taker = ingestor(store_url, tmp_path)
    stdout = (
        records.progress(1, novel=3, novel_list="[1,2]")
        + records.progress(2)
        + records.progress(3).replace(b'"io_ms":4.5', b'"io_ms":%d' % 10**30)
        + b"BMOE_PROGRESS {broken\nnobody knows this \x00 line\n"
    )
    record = records.whole(RUN, stdout, exit_code=0)
    deliver(taker, record)
    found = load_run(taker.store, RUN.hex())
    assert found.stdout.get("novel") == [3, None]
    assert found.stdout.get("novel_list") == [[1, 2], None]
    assert any("BMOE_PROGRESS" in line and "1000000000000000000000000000000" in line for line in found.others)
    assert "BMOE_PROGRESS {broken" in found.others
    assert "nobody knows this ␀ line" in found.others
    assert found.run["outcome"] == "partial"  # no end record


def test_lines_that_the_engine_could_not_write_are_missed(store_url, tmp_path):
    taker = ingestor(store_url, tmp_path)
    lines = records.oneshot().splitlines(keepends=True)
    lost = [line for line in lines if line.startswith(b"BMOE_PROGRESS ")][10:13]
    deliver(taker, records.whole(RUN, b"".join(line for line in lines if line not in lost)))
    found = load_run(taker.store, RUN.hex())
    assert len(found.stdout) == 45
    assert found.completeness["reasons"] == ["stdout: the engine counts 3 tokens more than there are lines of"]
    assert (found.run["outcome"], found.run["cause"]) == ("ok", "tokens")  # lost lines are no end of generation


def test_a_session_has_its_turns_with_what_was_asked(store_url, tmp_path):
    taker = ingestor(store_url, tmp_path)
    record = records.Record(RUN)
    start = records.started()
    start.cell.ClearField("prompt")
    for prompt in ("one", "two", "three"):
        start.cell.turns.add(kind="generate", prompt=prompt, n_predict=2)
    start.argv[:] = [b"bmoe-cli", b"--session"]
    record.add(run_started=start)
    record.output(
        b'BMOE_READY {"load_s":0.015,"arch":"qwen3moe","n_ctx":256,"think_ctl":"template","n_expert_used":2}\n'
    )
    asked = b'{"cmd":"generate","id":1,"prompt":"one"}\n'
    record.add(turn=pb.TurnReport(index=0, request_id=1, state="sent", request=asked))
    record.output(b'BMOE_BEGIN {"id":1}\n' + records.progress(1, 2) + records.progress(2, 2))
    record.output(
        b'BMOE_DONE {"id":1,"cancelled":false,"tokens":2,"tok_s":9.5,"cache_hit_pct":-1,"n_past":7,"reasoning":"","text":"xx"}\n'
    )
    record.add(turn=pb.TurnReport(index=0, request_id=1, state="done"))
    record.add(turn=pb.TurnReport(index=1, request_id=2, state="sent", request=b'{"cmd":"generate","id":2}\n'))
    record.output(b'BMOE_BEGIN {"id":2}\nBMOE_ERROR {"id":2,"fatal":false,"msg":"too long"}\n')
    record.add(turn=pb.TurnReport(index=1, request_id=2, state="rejected"))
    record.add(turn=pb.TurnReport(index=2, request_id=3, state="not_run", detail="the engine ended"))
    record.end(turns_asked=3, turns_sent=2, turns_ended=2, outcome="partial")
    deliver(taker, record)
    found = load_run(taker.store, RUN.hex())
    assert [(t.turn, t.request_id, t.state, t.tokens) for t in found.turns] == [
        (0, 1, "done", 2),
        (None, 2, "rejected", 0),
        (None, 3, "not_run", 0),
    ]
    assert found.turns[0].request == {"cmd": "generate", "id": 1, "prompt": "one"}
    assert found.turns[0].summary["tok_s"] == 9.5
    assert "cache_hit_pct" not in found.turns[0].summary
    assert found.turns[0].begin_boot_ns is not None
    assert found.turns[0].end_boot_ns >= found.turns[0].begin_boot_ns
    assert found.turns[1].error["msg"] == "too long"
    assert found.ready["arch"] == "qwen3moe"
    assert (found.run["n_turns"], found.run["n_tokens"], found.run["session"]) == (1, 2, True)
    assert (found.run["outcome"], found.run["cause"]) == ("partial", "rejected")


@pytest.mark.parametrize(
    ("end", "outcome", "cause"),
    [
        ({"exit_code": None, "signal": 9, "outcome": "killed"}, "killed", "signal:SIGKILL"),
        ({"exit_code": 1, "outcome": "failed"}, "failed", "exit"),
        ({"exit_observed": False, "exit_code": None, "cause": "abandoned", "outcome": "lost"}, "lost", "abandoned"),
        (
            {"launched": False, "exit_observed": False, "exit_code": None, "outcome": "skipped", "ended_by": "gate"},
            "skipped",
            "gate:cpu_temp_c",
        ),
        ({"ended_by": "user", "signal": 15, "exit_code": None, "outcome": "aborted"}, "aborted", "cancelled"),
    ],
)
def test_the_outcome_is_judged_again_from_the_record(tmp_path, end, outcome, cause):
    taker = ingestor(f"{tmp_path}/runs.db", tmp_path)
    record = records.Record(RUN)
    record.add(run_started=records.started())
    if outcome == "skipped":
        record.add(
            gate=pb.GateReport(
                gate="cpu_temp_c", asked="cpu_temp_c <= 45", last=60, unit="C", state="gave_up", policy="skip"
            )
        )
    record.end(
        **{key: value for key, value in end.items() if value is not None}
        | ({"exit_code": end["exit_code"]} if end.get("exit_code") is not None else {})
    )
    deliver(taker, record)
    run = load_run(taker.store, RUN.hex()).run
    assert (run["outcome"], run["cause"]) == (outcome, cause)
    assert run["problems"] is None  # the phone said the same
