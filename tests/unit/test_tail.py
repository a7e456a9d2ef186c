"""The tail and the phases: every byte once, in order, and the least reading of what the lines say."""

from pathlib import Path

import pytest
from bmoe_agent.phase import Phases
from bmoe_agent.tail import LINE_LIMIT, LOOK_BYTES, Tail
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.agent

PIECES = st.lists(st.binary(max_size=30) | st.sampled_from([b"\n", b"BMOE_X {}\n", b"half", b"\r\n"]), max_size=12)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pieces=PIECES, restart_after=st.integers(0, 12))
def test_chunks_join_to_the_file_whatever_is_written_when(
    tmp_path: Path, pieces: list[bytes], restart_after: int
) -> None:
    path = tmp_path / "stdout"
    path.write_bytes(b"")
    tail = Tail(path, looked_boot_ns=0)
    got = b""
    lines: list[bytes] = []
    for number, piece in enumerate(pieces):
        with path.open("ab") as file:
            file.write(piece)
        for chunk in tail.look(number + 1):
            assert chunk.offset == len(got)
            assert chunk.data.endswith(b"\n")
            assert chunk.boot_ns - chunk.uncertainty_ns >= 0
            got += chunk.data
            lines += tail.lines(chunk)
        if number == restart_after:
            tail.close()
            tail = Tail(path, offset=len(got), looked_boot_ns=number + 1)
    for chunk in tail.rest(99):
        got += chunk.data
        lines += tail.lines(chunk)
    tail.close()
    whole = b"".join(pieces)
    assert got == whole
    assert lines == whole.split(b"\n")[:-1]


def test_hash_covers_what_was_recorded_before_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "stdout"
    path.write_bytes(b"one\ntwo\n")
    whole = Tail(path, looked_boot_ns=0)
    list(whole.rest(1))
    resumed = Tail(path, offset=4, looked_boot_ns=0)
    assert [chunk.data for chunk in resumed.rest(1)] == [b"two\n"]
    assert resumed.sha256() == whole.sha256()
    whole.close()
    resumed.close()


def test_a_line_without_end_cannot_fill_memory(tmp_path: Path) -> None:
    path = tmp_path / "stdout"
    path.write_bytes(b"x" * (LINE_LIMIT + (300 << 10)))
    tail = Tail(path, looked_boot_ns=0)
    first = tail.look(1)
    assert sum(len(chunk.data) for chunk in first) > LINE_LIMIT
    with path.open("ab") as file:
        file.write(b"y\nBMOE_READY {}\n")
    lines = [line for chunk in [*first, *tail.look(2)] for line in tail.lines(chunk)]
    assert lines[0].startswith(b"xxx")
    assert lines[1] == b"BMOE_READY {}"
    tail.close()


def test_one_look_takes_a_bounded_part_and_the_next_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "stderr"
    line = b"e" * 1023 + b"\n"
    whole = line * (2 * LOOK_BYTES // len(line) + 5)
    path.write_bytes(whole)
    tail = Tail(path, looked_boot_ns=7)
    got: list[bytes] = []
    for now in (10, 20, 30):
        chunks = tail.look(now)
        assert sum(len(chunk.data) for chunk in chunks) <= LOOK_BYTES
        # It may have been there since before the first look that did not take it.
        assert {chunk.boot_ns - chunk.uncertainty_ns for chunk in chunks} == {7}
        got += [chunk.data for chunk in chunks]
        assert tail.behind == (now < 30)
    assert b"".join(got) == whole
    with path.open("ab") as file:
        file.write(b"new\n")
    assert [(chunk.data, chunk.uncertainty_ns) for chunk in tail.look(40)] == [(b"new\n", 10)]
    tail.close()


def test_the_rest_goes_on_after_whoever_took_it_failed(tmp_path: Path) -> None:
    path = tmp_path / "stdout"
    path.write_bytes(b"x\n" * (1 << 20) + b"unfinished")
    tail = Tail(path, looked_boot_ns=0)
    first = next(iter(tail.rest(1)))
    joined = first.data + b"".join(chunk.data for chunk in tail.rest(2))
    assert joined == path.read_bytes()
    tail.close()


def test_a_file_that_is_not_there_has_nothing_new(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "absent", looked_boot_ns=0)
    assert tail.look(1) == []
    (tmp_path / "absent").write_bytes(b"late\n")
    assert [(chunk.data, chunk.uncertainty_ns) for chunk in tail.look(5)] == [(b"late\n", 5)]
    tail.close()


def test_one_shot_phases_ignore_what_the_answer_looks_like() -> None:
    phases = Phases(session=False)
    assert phases.phase == "load"
    token = b'BMOE_PROGRESS {"step":1,"steps":3,"delta_text":"x"}'
    assert [event.name for event in phases.feed([b'BMOE_LOAD {"mb":0}', token], 10)] == ["first_token"]
    phases.feed([token], 1_000_000_010)
    assert phases.rate_tok_s(1_000_000_010) == pytest.approx(1.0)
    assert phases.rate_tok_s(60_000_000_000) is None
    phases.feed([token, b"=== answer ===", token, b"=== perf ===", b"generation: 99 tokens, x"], 2_000_000_010)
    phases.feed([b"text", b"=== perf ===", b"generation: 3 tokens, 0.1 s/token (9 tok/s)"], 2_000_000_011)
    assert (phases.tokens, phases.steps_asked, phases.phase) == (3, 3, "finishing")
    assert (phases.got_tokens, phases.saw_end) == (3, True)


def test_session_phases_follow_the_control_lines() -> None:
    phases = Phases(session=True)
    script = [
        (b'BMOE_READY {"load_s":1.0}\r', "ready", "ready"),
        (b'BMOE_BEGIN {"id":7}', "begin", "prefill"),
        (b'BMOE_PROGRESS {"step":1,"steps":2}', "first_token", "decode"),
        (b'BMOE_DONE {"id":7,"cancelled":true,"tokens":1,"text":"\\"fatal\\":true"}', "done", "ready"),
        (b'BMOE_BEGIN {"id":8}', "begin", "prefill"),
        (b'BMOE_DECIDE {"id":8,"cancelled":false,"best":1}', "decided", "ready"),
        (b'BMOE_ERROR {"id":9,"fatal":false,"msg":"too long"}', "error", "ready"),
        (b'BMOE_ERROR {"id":0,"fatal":true,"msg":"broken \xff"}', "error", "fatal"),
    ]
    for line, name, phase in script:
        (event,) = phases.feed([line], 5)
        assert (event.name, phases.phase) == (name, phase)
        if b"cancelled" in line:
            assert event.cancelled == (b'cancelled":true' in line)
    assert phases.fatal_message.startswith("broken")
    assert phases.steps_asked == 2
    assert phases.feed([b"BMOE_NEWER {}", b"=== answer ===", b"noise"], 6) == []


def test_without_progress_lines_the_report_says_how_many_tokens() -> None:
    phases = Phases(session=False)
    phases.feed([b"=== answer ===", b"hello", b"=== perf ===", b"generation: 12 tokens, 1 s/token (1 tok/s)"], 1)
    assert (phases.tokens, phases.got_tokens) == (0, 12)


def test_numbers_of_thousands_of_digits_are_no_counts() -> None:
    """Python refuses to read them, and an engine's garbage must not end the run that records it."""
    many = b"9" * 6000
    phases = Phases(session=False)
    phases.feed([b'BMOE_PROGRESS {"step":1,"steps":' + many + b"}"], 1)
    phases.feed([b"=== answer ===", b"x", b"=== perf ===", b"generation: " + many + b" tokens, x"], 2)
    assert (phases.tokens, phases.steps_asked, phases.got_tokens, phases.saw_end) == (1, None, 1, True)
    talk = Phases(session=True)
    (done,) = talk.feed([b'BMOE_DONE {"id":' + many[:400] + b',"tokens":' + many[:50] + b"}"], 1)
    assert (done.request_id, done.tokens) == (None, None)
