"""Session cells: requests as the engine reads them, one at a time, and cancels that are never lost."""

import itertools
import json

import pytest
from bmoe_agent.phase import Event
from bmoe_agent.session import CANCEL_AGAIN_NS, CANCEL_LINE, CLOSE_LINE, Session, request_line
from bmoe_proto.v1 import telemetry_pb2 as pb
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.agent

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
MS = 1_000_000


@settings(max_examples=80, deadline=None)
@given(prompt=TEXT)
def test_requests_are_one_raw_line_with_the_prompt_last(prompt: str) -> None:
    turn = pb.Turn(kind="generate", prompt=prompt, n_predict=5, think=False, clear_kv=True)
    line = request_line(turn, 3)
    assert line.endswith(b"\n")
    assert b"\n" not in line[:-1]
    read = json.loads(line)
    assert read == {"cmd": "generate", "id": 3, "n_predict": 5, "think": False, "clear_kv": True, "prompt": prompt}
    assert list(read)[-1] == "prompt"
    # Only what JSON cannot hold raw is escaped: an escape keeps its low byte alone.
    assert all(
        int(line[at + 2 : at + 6], 16) < 0x20
        for at in range(len(line))
        if line[at : at + 2] == b"\\u" and line[at - 1 : at] != b"\\"
    )
    # The engine finds keys by searching: no prompt may look like one.
    assert line.index(b'"n_predict":') < line.index(b'"prompt":')


def test_keys_not_asked_for_are_left_out() -> None:
    assert request_line(pb.Turn(prompt="x"), 1) == b'{"cmd":"generate","id":1,"prompt":"x"}\n'
    decide = pb.Turn(kind="decide", prefix="P", suffix="S", choices=["a", "b"], reuse_prefix=False)
    assert json.loads(request_line(decide, 2)) == {
        "cmd": "decide", "id": 2, "reuse_prefix": False, "choices": ["a", "b"], "suffix": "S", "prefix": "P",
    }  # fmt: skip


def test_one_request_at_a_time_and_nothing_before_ready() -> None:
    session = Session([pb.Turn(prompt="a"), pb.Turn(prompt="b", idle_before_ms=500)])
    assert session.step(0, 0).write == b""
    session.on(Event("ready", 10 * MS))
    first = session.step(11 * MS, 0)
    assert b'"id":1' in first.write
    assert [report.state for report in first.reports] == ["sent"]
    assert session.step(12 * MS, 0).write == b""
    assert [report.state for report in session.on(Event("begin", 20 * MS, 1))] == ["began"]
    assert [report.state for report in session.on(Event("done", 100 * MS, 1))] == ["done"]
    waiting = session.step(101 * MS, 0)
    assert (waiting.write, waiting.next_ns) == (b"", 600 * MS)
    assert b'"id":2' in session.step(600 * MS, 0).write
    session.on(Event("begin", 601 * MS, 2))
    session.on(Event("done", 700 * MS, 2))
    last = session.step(701 * MS, 0)
    assert (last.write, last.close) == (CLOSE_LINE, True)
    assert session.step(702 * MS, 0).write == b""
    assert (session.sent, session.ended, session.unplanned_cancels) == (2, 2, 0)


def test_cancel_waits_for_begin_and_is_repeated_until_the_end() -> None:
    session = Session([pb.Turn(prompt="a", cancel_after_ms=100)])
    session.on(Event("ready", 0))
    session.step(0, 0)
    assert session.step(5000 * MS, 0).write == b""  # sent, and not begun: a cancel now would be lost
    session.on(Event("begin", 5000 * MS, 1))
    early = session.step(5050 * MS, 0)
    assert (early.write, early.next_ns) == (b"", 5100 * MS)
    sent_ns = [at for at in range(5100 * MS, 7000 * MS, 50 * MS) if session.step(at, 0).write == CANCEL_LINE]
    assert len(sent_ns) == 4
    assert all(later - earlier >= CANCEL_AGAIN_NS for earlier, later in itertools.pairwise(sent_ns))
    (report,) = session.on(Event("done", 7000 * MS, 1, cancelled=True))
    assert report.state == "cancelled"
    assert session.unplanned_cancels == 0
    assert session.step(7001 * MS, 0).close


def test_cancel_after_tokens_and_one_nobody_planned() -> None:
    session = Session([pb.Turn(prompt="a", cancel_after_tokens=3), pb.Turn(prompt="b")])
    session.on(Event("ready", 0))
    session.step(0, 0)
    session.on(Event("begin", 0, 1))
    assert session.step(1, 2).write == b""
    assert session.step(2, 3).write == CANCEL_LINE
    session.on(Event("done", 3, 1, cancelled=True))
    session.step(4, 0)
    session.on(Event("begin", 5, 2))
    session.on(Event("done", 7, 2, cancelled=True))
    assert session.unplanned_cancels == 1


def test_rejections_expected_or_not() -> None:
    session = Session([pb.Turn(prompt="a", expect_rejected=True), pb.Turn(prompt="b"), pb.Turn(kind="decide")])
    session.on(Event("ready", 0))
    session.step(0, 0)
    assert [r.state for r in session.on(Event("error", 1, 1, message="too long"))] == ["rejected"]
    session.step(2, 0)
    session.on(Event("begin", 3, 2))
    assert session.on(Event("done", 3, 1)) == []  # of a turn that is over: not this one's end
    assert [r.state for r in session.on(Event("error", 4, 0, message="no id in it"))] == ["rejected"]
    session.step(5, 0)
    session.on(Event("begin", 6, 3))
    assert [r.state for r in session.on(Event("decided", 7, 3))] == ["decided"]
    assert (session.ended, session.unexpected_rejections) == (3, 1)


def test_fatal_error_ends_the_session() -> None:
    session = Session([pb.Turn(prompt="a"), pb.Turn(prompt="b")])
    session.on(Event("ready", 0))
    session.step(0, 0)
    assert [r.state for r in session.on(Event("error", 1, 0, fatal=True, message="broken"))] == ["fatal"]
    assert session.step(2, 0).close
    assert [(r.index, r.state) for r in session.abandon("the engine ended")] == [(1, "not_run")]
    assert (session.sent, session.ended) == (1, 0)


def test_a_session_is_taken_up_where_its_record_ends() -> None:
    session = Session([pb.Turn(prompt=str(n)) for n in range(4)])
    session.restore(
        [
            pb.TurnReport(index=0, state="sent"),
            pb.TurnReport(index=0, state="done"),
            pb.TurnReport(index=1, state="sent"),
        ]
    )
    assert [(r.index, r.state) for r in session.abandon("the agent was restarted")] == [(2, "not_run"), (3, "not_run")]
    session.on(Event("begin", 1, 2))
    assert [r.state for r in session.on(Event("done", 2, 2))] == ["done"]
    assert (session.sent, session.ended) == (2, 2)
    assert session.step(3, 0).write == b""  # its stdin is gone
