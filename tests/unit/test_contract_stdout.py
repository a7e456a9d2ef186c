"""The stdout parser: what each line becomes, and that nothing is lost whatever the bytes and the cuts."""

import json
import random
import time

import pytest
from bmoe_proto.contract import stdout
from bmoe_proto.contract.events import Answer, Done, Error, Load, Other, Progress, Ready, Report
from bmoe_proto.contract.stdout import StdoutParser, parse
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.agent

PERF = b"=== perf ===\ngeneration: 2 tokens, 0.100 s/token (10.000 tok/s)\n"


def line(tag: str, **values: object) -> bytes:
    return f"BMOE_{tag} {json.dumps(values, ensure_ascii=False)}\n".encode("utf-8", "surrogateescape")


def delta(text: bytes, step: int = 1, **more: object) -> bytes:
    """A progress line as the engine writes it: quotes, backslashes and control bytes escaped, every other byte raw."""
    out = bytearray()
    for byte in text:
        if byte in b'"\\':
            out += b"\\" + bytes([byte])
        elif byte < 32:
            out += b"\\u%04x" % byte
        else:
            out.append(byte)
    extra = "".join(f',"{key}":{value}' for key, value in more.items()).encode()
    return b'BMOE_PROGRESS {"step":%d%s,"delta_reasoning":"","delta_text":"%s"}\n' % (step, extra, bytes(out))


def kinds(data: bytes) -> list[str]:
    return [event.event for event in parse(data)]


def texts(data: bytes) -> list[object]:
    return [event.to_json().get("delta_text") for event in parse(data) if isinstance(event, Progress)]


# ------------------------------------------------------------------ telemetry lines


def test_a_progress_line_keeps_keys_types_and_unknown_ones():
    data = line(
        "PROGRESS", step=3, steps=48, wall_ms=0.5, majflt=0, cache_hit_pct=-1.0, dense_resident_frac=-1.0, arm=7,
        note="é", delta_reasoning="hm", delta_text="x",
    )  # fmt: skip
    (event,) = parse(data)
    assert event.to_json() == {
        "event": "progress", "line": 1, "step": 3, "steps": 48, "wall_ms": 0.5, "majflt": 0, "cache_hit_pct": None,
        "dense_resident_frac": None, "arm": 7, "note": "é", "delta_reasoning": "hm", "delta_text": "x",
    }  # fmt: skip
    assert isinstance(event, Progress)
    assert (event.text, event.reasoning) == (b"x", b"hm")


def test_minus_one_is_unmeasured_only_where_the_contract_says_so():
    (event,) = parse(line("PROGRESS", step=1, io_ms=-1, majflt=-1, cache_hit_pct=-1, unknown=-1))
    assert event.to_json() | {"event": 0, "line": 0} == {
        "event": 0, "line": 0, "step": 1, "io_ms": -1, "majflt": -1, "cache_hit_pct": None, "unknown": -1,
    }  # fmt: skip


def test_a_true_zero_stays_zero():
    (event,) = parse(line("PROGRESS", step=1, cache_hit_pct=0.0, dense_resident_frac=0, majflt=0))
    assert event.to_json()["cache_hit_pct"] == 0
    assert event.to_json()["dense_resident_frac"] == 0


@pytest.mark.parametrize("number", ["nan", "-nan", "inf", "-inf", "NaN", "Infinity", "-Infinity", "1e999", "null"])
def test_numbers_that_are_none_are_null(number):
    (event,) = parse(b'BMOE_PROGRESS {"step":1,"wall_ms":%s,"delta_text":" nan ,-nan:inf"}\n' % number.encode())
    assert event.to_json() == {
        "event": "progress",
        "line": 1,
        "step": 1,
        "wall_ms": None,
        "delta_text": " nan ,-nan:inf",
    }


def test_values_of_a_known_shape_are_still_looked_at():
    lines = [b'{"step":1,"cache_hit_pct":5.0}', b'{"step":2,"cache_hit_pct":-1.0}', b'{"step":3,"cache_hit_pct":1e999}']
    lines += [b'{"step":99999999999999999999,"cache_hit_pct":5.0}', b'{"step":4,"cache_hit_pct":6.0}']
    found = parse(b"".join(b"BMOE_PROGRESS " + each + b"\n" for each in lines))
    assert [event.to_json().get("cache_hit_pct") for event in found] == [5.0, None, None, None, 6.0]
    assert [event.event for event in found] == ["progress"] * 3 + ["other", "progress"]


@pytest.mark.parametrize(
    "bad",
    [
        b"BMOE_PROGRESS {}",
        b"BMOE_PROGRESS",
        b"BMOE_PROGRESS [1]",
        b'BMOE_PROGRESS {"step":1} {"step":2}',
        b'BMOE_PROGRESS {"step":"1"}',
        b'BMOE_PROGRESS {"step":null}',
        b'BMOE_PROGRESS {"step":true}',
        b'BMOE_PROGRESS {"step":1.5}',
        b'BMOE_PROGRESS {"step":1,"delta_text":7}',
        b'BMOE_PROGRESS {"step":1,"wall_ms":"fast"}',
        b'BMOE_PROGRESS {"step":1,"wall_ms":0.1,"delta_te',
        b'BMOE_PROGRESS {"step":' + b"9" * 5000 + b"}",
        b"BMOE_PROGRESS " + b"[" * 100000,
        b'BMOE_BEGIN {"id":9223372036854775808}',
        b'BMOE_DONE {"id":1,"text":5}',
        b'BMOE_DONE {"id":1,"cancelled":"no"}',
        b'BMOE_FUTURE {"id":1}',
        b' BMOE_BEGIN {"id":1}',
    ],
)
def test_what_is_not_understood_is_kept_as_it_is(bad):
    found = parse(b'BMOE_BEGIN {"id":1}\n' + bad + b'\nBMOE_BEGIN {"id":2}\n')
    assert [event.event for event in found] == ["begin", "other", "begin"]
    assert found[1].to_json() == {"event": "other", "line": 2, "text": bad.decode()}


def test_a_key_of_the_engine_does_not_pass_for_ours():
    (event,) = parse(line("LOAD", mb=1.0, ms=2.0, event="progress", line=77))
    assert (event.to_json()["event"], event.to_json()["line"]) == ("load", 1)


def test_session_lines():
    data = b"".join(
        [
            line("READY", load_s=0.5, arch="qwen3moe", n_ctx=256, think_ctl="template", n_expert_used=2),
            line("BEGIN", id=7),
            line("LOAD", mb=0.0, ms=0.0),
            delta(b"hi"),
            line(
                "DONE", id=7, cancelled=False, tokens=1, cache_hit_pct=-1, cache_resident_mib=4, text="hi", reasoning=""
            ),
            line("BEGIN", id=8),
            b'BMOE_DECIDE {"id":8,"cancelled":false,"best":1,"choice_logp":[-0.5,null,-inf],"n_tokens":3}\n',
            line("ERROR", id=9, fatal=False, msg="no"),
            line("BEGIN", id=10),
            delta(b"x"),
        ]
    )
    found = parse(data)
    assert [event.event for event in found] == (
        ["ready", "begin", "load", "progress", "done", "begin", "decide", "error", "begin", "progress"]
    )
    done, decide, error = found[4], found[6], found[7]
    assert isinstance(done, Done)
    assert (done.text, done.values["cache_hit_pct"], done.values["cancelled"]) == (b"hi", None, False)
    assert decide.to_json()["choice_logp"] == [-0.5, None, None]
    assert isinstance(error, Error)
    assert error.values == {"id": 9, "fatal": False, "msg": "no"}
    assert [event.turn for event in found if isinstance(event, (Load, Progress, Done))] == [0, 0, 0, 1]
    assert isinstance(found[0], Ready)


# ------------------------------------------------------------------ deltas


def test_half_a_character_waits_for_its_other_half():
    assert texts(delta(b"a\xc3") + delta(b"\xa9b", 2)) == ["a", "éb"]


def test_only_bytes_that_are_truly_invalid_are_replaced():
    assert texts(delta(b"\xff\xe2\x82") + delta(b"\xac\xc3", 2) + delta(b"z", 3)) == ["\ufffd", "€", "\ufffdz"]


def test_text_and_reasoning_are_two_streams():
    first = b'BMOE_PROGRESS {"step":1,"delta_reasoning":"\xe2\x82","delta_text":"\xc3"}\n'
    second = b'BMOE_PROGRESS {"step":2,"delta_reasoning":"\xac","delta_text":"\xa9"}\n'
    found = [event.to_json() for event in parse(first + second)]
    assert [(each["delta_reasoning"], each["delta_text"]) for each in found] == [("", ""), ("€", "é")]


def test_a_reset_replaces_and_a_half_before_it_is_gone():
    found = parse(delta(b"ab\xc3") + delta(b"\xa9", 2, reset=1) + delta(b"c", 3))
    assert [event.to_json().get("reset") for event in found] == [None, 1, None]
    assert [event.to_json()["delta_text"] for event in found] == ["ab", "\ufffd", "c"]
    data = delta(b"ab") + delta(b"=== perf ===\nx", 2, reset=1) + b"=== answer ===\n=== perf ===\nx\n" + PERF
    assert [event.text for event in parse(data) if isinstance(event, Answer)] == [b"=== perf ===\nx"]


def test_a_new_generation_starts_a_new_text():
    data = (
        line("BEGIN", id=1) + delta(b"\xc3") + line("DONE", id=1, text="\udcc3") + line("BEGIN", id=2) + delta(b"\xa9")
    )
    found = parse(data)
    assert texts(data) == ["", "\ufffd"]
    assert found[2].to_json()["text"] == "\ufffd"


def test_escapes():
    raw = rb'BMOE_PROGRESS {"step":1,"delta_text":"\u0000\u0008\"\\ \ud83d\ude00 \ud83d \udc80 \\ud800 \/"}' + b"\n"
    (event,) = parse(raw)
    assert event.to_json()["delta_text"] == '\0\b"\\ 😀 \ufffd \ufffd \\ud800 /'
    assert isinstance(event, Progress)
    assert event.text.decode() == '\0\b"\\ 😀 \ufffd \ufffd \\ud800 /'


def test_control_bytes_and_nul_in_the_string_itself():
    assert texts(b'BMOE_PROGRESS {"step":1,"delta_text":"a\x00\x01\x1b[2Jb\tc"}\n') == ["a\0\x01\x1b[2Jb\tc"]


def test_engines_before_deltas_say_the_whole_text_every_time():
    raw = [
        b'{"step":1,"text":"a\xc3"}',
        b'{"step":2,"text":"a\xc3\xa9"}',
        b'{"step":3,"reasoning":"a\xc3\xa9","text":""}',
    ]
    found = [
        event
        for event in parse(b"".join(b"BMOE_PROGRESS " + each + b"\n" for each in raw))
        if isinstance(event, Progress)
    ]
    assert [event.to_json().get("text") for event in found] == ["a", "aé", ""]
    assert [(event.text, event.reasoning, event.reset) for event in found] == (
        [(b"a\xc3", b"", False), (b"\xa9", b"", False), (b"", b"a\xc3\xa9", True)]
    )
    assert "delta_text" not in found[0].to_json()


@given(st.lists(st.binary(max_size=8), max_size=8))
@settings(max_examples=150, deadline=None)
def test_joined_deltas_are_the_text(pieces):
    data = b"".join(delta(piece, step) for step, piece in enumerate(pieces, 1)) + b"=== answer ===\n" + b"".join(pieces)
    found = parse(data + b"\n" + PERF)
    whole = b"".join(pieces)
    assert b"".join(event.text for event in found if isinstance(event, Progress)) == whole
    (answer,) = [event for event in found if isinstance(event, Answer)]
    assert answer.text == whole
    assert answer.complete
    joined = "".join(event.delta_text or "" for event in found if isinstance(event, Progress))
    shown = whole.decode("utf-8", "replace")
    assert shown in (joined, joined + "\ufffd")
    assert [event.event for event in found][len(pieces) :] == ["answer", "report"]


# ------------------------------------------------------------------ the answer block


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\n",
        b"\n\n",
        b"plain",
        b"two\nlines\n",
        b"=== perf ===",
        b"=== perf ===\n" + PERF + b"more",
        b"x\n" + PERF,
        PERF.rstrip(b"\n"),
        b'BMOE_DONE {"id":1,"text":"x"}\nBMOE_PROGRESS {"step":1}',
        b"=== answer ===\n=== perf ===\n=== answer ===",
        b"carriage\rreturn\r\n\x00\xff\x1b",
    ],
)
def test_the_answer_is_what_the_deltas_joined_to(text):
    data = delta(text[:3]) + delta(text[3:], 2) + b"=== answer ===\n" + text + b"\n" + PERF
    found = parse(data)
    assert [event.event for event in found] == ["progress", "progress", "answer", "report"]
    assert isinstance(found[2], Answer)
    assert (found[2].text, found[2].line, found[2].complete) == (text, 3, True)
    assert found[3].line == data.count(b"\n")


def test_an_answer_with_reasoning_in_front_of_the_deltas_text():
    shown = b"<think>\n" + PERF + b"</think>ok"
    found = parse(delta(b"ok") + b"=== answer ===\n" + shown + b"\n" + PERF)
    assert [event.text for event in found if isinstance(event, Answer)] == [shown]
    assert [event.event for event in found] == ["progress", "answer", "report"]


def test_an_answer_unlike_its_deltas_still_ends_before_its_report():
    # Half characters mangled on each line by a tool that decoded them; the answer block came through whole.
    data = delta("\ufffd".encode()) + delta("\ufffd".encode(), 2) + "=== answer ===\né\n".encode() + PERF
    found = parse(data + b"compute: 51.8% CPU occupancy (0.0002 cpu-s/token over 2 threads), 0.00 major faults/token\n")
    assert [event.event for event in found] == ["progress", "progress", "answer", "report", "report"]
    assert [event.line for event in found] == [1, 2, 3, 6, 7]
    assert found[2].to_json()["text"] == "é"


@pytest.mark.parametrize("cut", range(1, 26))
def test_an_output_cut_inside_the_answer_keeps_what_there_is(cut):
    text = b"ab\n" + PERF + b"cd"
    block = text[:cut]
    found = parse(delta(text) + b"=== answer ===\n" + block)
    assert [event.event for event in found] == ["progress", "answer"]
    assert isinstance(found[1], Answer)
    assert (found[1].text, found[1].complete) == (block, False)


def test_a_banner_in_inline_text_opens_nothing():
    data = b'once\n=== answer ===\n\nBMOE_BEGIN {"id":1}\nlast\n'
    assert kinds(data) == ["other", "other", "other", "begin", "other"]
    assert [event.line for event in parse(data)] == [1, 2, 3, 4, 5]


def test_a_banner_in_a_session_opens_nothing():
    assert kinds(line("READY", load_s=1.0) + b"=== answer ===\n" + line("BEGIN", id=1)) == ["ready", "other", "begin"]


def test_inline_text_then_its_report():
    data = b"Hello prompt and text\nmode: mmap\nmore\n\n" + PERF.partition(b"\n")[2] + b"moe-future: 3 things\n"
    found = parse(data)
    assert [event.event for event in found] == ["other"] * 4 + ["report", "other"]
    assert isinstance(found[4], Report)
    assert found[4].facts == {"tokens": 2, "s_tok": 0.1, "tok_s": 10.0}


def test_outputs_appended_to_one_file():
    one = delta(b"a") + delta(b"b", 2) + b"=== answer ===\nab\n" + PERF
    assert kinds(one + one) == kinds(one) * 2
    assert kinds(delta(b"a") + delta(b"killed", 2) + one) == ["progress"] * 2 + kinds(one)


# ------------------------------------------------------------------ ends, encodings, sizes


@pytest.mark.parametrize(
    ("last", "kind"),
    [
        (b'BMOE_PROGRESS {"step":2,"wall_ms":1.0}', "progress"),
        (b'BMOE_PROGRESS {"step":2,"wall_ms":1.', "other"),
        (b"BMOE_PRO", "other"),
        (b"\xc3", "other"),
        (b"=== answer ===", "other"),
    ],
)
def test_a_last_line_cut_off_is_what_it_is(last, kind):
    found = parse(delta(b"a") + last)
    assert [event.event for event in found] == ["progress", kind]
    assert found[1].line == 2


@pytest.mark.parametrize("cut", range(1, 54))
def test_a_report_line_cut_off_never_tells_a_wrong_number(cut):
    report = b"generation: 2 tokens, 0.100 s/token (10.000 tok/s)"[:cut]
    found = parse(delta(b"a") + b"=== answer ===\na\n=== perf ===\n" + report)
    assert [event.event for event in found] == ["progress", "answer", "report" if cut >= 50 else "other"]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_encodings_and_line_ends(encoding, end):
    text = "é\n=== perf ===\n😀"
    body = delta(text.encode()).decode() + "=== answer ===\n" + text + "\n" + PERF.decode() + "\nüber\n"
    bom = {"utf-16-le": b"\xff\xfe", "utf-16-be": b"\xfe\xff"}.get(encoding, b"")
    data = bom + body.replace("\n", end).encode(encoding)
    assert [e.to_json() for e in parse(data)] == [e.to_json() for e in parse(body.encode())]


def test_a_line_too_long_to_hold_comes_in_pieces(monkeypatch):
    monkeypatch.setattr(stdout, "MAX_LINE", 16)
    data = b"x" * 40 + b"\n" + b'BMOE_BEGIN {"id":1}\n'[:16] + b"\n" + b"y" * 16 + b"\n" + b"z" * 33
    for size in (1, 7, 16, 17, 1000):
        parser = StdoutParser()
        found = [e for at in range(0, len(data), size) for e in parser.feed(data[at : at + size])] + parser.close()
        assert all(isinstance(event, Other) for event in found)
        assert [(event.line, len(event.to_json()["text"])) for event in found] == (
            [(1, 16), (1, 16), (1, 8), (2, 16), (3, 16), (4, 16), (4, 16), (4, 1)]
        )


def test_an_endless_answer_is_not_held_for_ever(monkeypatch):
    monkeypatch.setattr(stdout, "MAX_LINE", 100)
    found = parse(delta(b"a") + b"=== answer ===\n" + b"line\n" * 100)
    assert [event.event for event in found][:2] == ["progress", "answer"]
    assert sum(event.event == "other" for event in found) == 79


_SNIPPETS = [
    delta(b"a"), delta(b"\xc3", 2), delta(b"\xa9", 3), delta(b"r", 4, reset=1), line("BEGIN", id=1), line("LOAD", mb=1.0, ms=1.0),
    line("DONE", id=1, tokens=1, text="a"), b"=== answer ===\n", b"a\n", b"=== perf ===\n", PERF, b"\r\n", b"\n", b"\xff\xfe", b"BMOE_",
    b"moe-cache: 92.0% hit, resident 3.9 MiB\n", b"mode: mmap\n", b"moe-predict: x\n", b"  1 2 3 4 5\n", b'BMOE_PROGRESS {"step":1,"te',
    b"\x00", b"\xef\xbb\xbf", b'BMOE_PROGRESS {"step":1,"text":"ab"}\n',
]  # fmt: skip


@given(st.lists(st.sampled_from(_SNIPPETS) | st.binary(max_size=6), max_size=14), st.randoms(use_true_random=False))
@settings(max_examples=400, deadline=None)
def test_any_split_gives_the_same_events_and_no_line_is_lost(parts, rng: random.Random):
    data = b"".join(parts)
    whole = parse(data)
    parser = StdoutParser()
    found = []
    at = 0
    while at < len(data):
        size = rng.choice([1, 1, 2, 3, 7, 50])
        found += parser.feed(data[at : at + size])
        at += size
    assert found + parser.close() == whole
    for event in whole:
        assert json.loads(json.dumps(event.to_json(), allow_nan=False))["event"] == event.event
    if not data.startswith((b"\xff\xfe", b"\xfe\xff")):
        lines = data.count(b"\n") + (not data.endswith(b"\n") and data not in (b"", b"\xef\xbb\xbf"))
        answers = [event for event in whole if isinstance(event, Answer)]
        told = len(whole) + sum(event.text.count(b"\n") + 1 + event.complete for event in answers)
        assert lines <= told <= lines + len(answers)  # an empty block may have had no line at all
        assert len({event.line for event in whole}) == len(whole)


@pytest.mark.parametrize(
    "data",
    [
        b'BMOE_LOAD {"a":' + b'"\\' * 100000,
        b'BMOE_LOAD {"a":' + b'""' * 100000,
        b'BMOE_LOAD {"a":"' + b"\\ud800" * 50000 + b'"}',
        delta(b"a") + b"=== answer ===\nzz\n" + PERF * 5000,
        b"=== answer ===\nzz\n" + PERF * 5000,
        delta(b"a") + b"=== answer ===\n" * 20000,
        PERF + b"moe-predict: the control is below 100%\n" + b" 1" * 100000,
        PERF + b"generation: " + b"1" * 200000 + b" tokens",
    ],
)
def test_nothing_takes_time_by_its_square(data):
    start = time.process_time()
    assert parse(data)
    assert time.process_time() - start < 10  # well under a second; minutes if it were


def test_lines_that_drip_in():
    parser = StdoutParser()
    for _ in range(20000):
        assert parser.feed(b"x" * 10) == []
    assert len(parser.close()) == 1
