"""`bmoe events`: strict ASCII JSON for any bytes, from a file or stdin; what is no file is the user's mistake."""

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from bmoe_collector.cli import main
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

DATA = (
    b'BMOE_PROGRESS {"step":1,"wall_ms":-nan,"cache_hit_pct":-1.0,"delta_reasoning":"","delta_text":"\xc3"}\n'
    b'BMOE_PROGRESS {"step":2,"wall_ms":1.5,"delta_reasoning":"","delta_text":"\xa9\xff"}\n'
    b"=== answer ===\n\xc3\xa9\xff\n=== perf ===\n"
    b"generation: 2 tokens, 0.100 s/token (10.000 tok/s)\nmoe-future: 3 things\nBMOE_PROGRESS {\n"
)
EVENTS = [
    {
        "event": "progress",
        "line": 1,
        "step": 1,
        "wall_ms": None,
        "cache_hit_pct": None,
        "delta_reasoning": "",
        "delta_text": "",
    },
    {"event": "progress", "line": 2, "step": 2, "wall_ms": 1.5, "delta_reasoning": "", "delta_text": "é\ufffd"},
    {"event": "answer", "line": 3, "text": "é\ufffd"},
    {
        "event": "report",
        "line": 6,
        "name": "generation",
        "facts": {"tokens": 2, "s_tok": 0.1, "tok_s": 10.0},
        "text": "generation: 2 tokens, 0.100 s/token (10.000 tok/s)",
    },
    {"event": "other", "line": 7, "text": "moe-future: 3 things"},
    {"event": "other", "line": 8, "text": "BMOE_PROGRESS {"},
]


def read(text: str) -> list[dict]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"not strict JSON: {constant}")

    assert text.isascii()
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


@pytest.mark.parametrize("options", [[], ["--json"], ["--json", "--db", "sqlite:///nowhere.db"]])
def test_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]):
    path = tmp_path / "stdout.bin"
    path.write_bytes(DATA)
    assert main(["events", str(path), *options]) == 0
    out = capsys.readouterr()
    assert read(out.out) == EVENTS
    assert out.err == ""


def test_stdin_comes_in_pieces(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    class Pieces(io.RawIOBase):
        def __init__(self) -> None:
            self.left = [DATA[at : at + 5] for at in range(0, len(DATA), 5)]

        def readable(self) -> bool:
            return True

        def readinto(self, into) -> int:
            piece = self.left.pop(0) if self.left else b""
            into[: len(piece)] = piece
            return len(piece)

    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BufferedReader(Pieces())))
    assert main(["events", "-"]) == 0
    assert read(capsys.readouterr().out) == EVENTS


def test_no_such_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["events", str(tmp_path / "none")]) == 2
    assert main(["events", str(tmp_path)]) == 2
    out = capsys.readouterr()
    assert out.out == ""
    assert "none: No such file or directory" in out.err
    assert "is a directory" in out.err


def test_a_file_that_is_no_stdout_is_answered_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "metrics.csv"
    file.write_text("# bmoe_metrics v2\nstep,wall_ms\n1,2\n")
    assert main(["events", str(file)]) == 0
    out, err = capsys.readouterr()
    assert [line["event"] for line in read(out)] == ["other", "other", "other"]
    assert err == f"{file}: nothing here is of the engine's: every line is an `other`; is it the engine's stdout?\n"
    file.write_bytes(DATA)
    assert main(["events", str(file)]) == 0
    assert capsys.readouterr().err == ""


def test_an_empty_file_has_no_events(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "empty").touch()
    assert main(["events", str(tmp_path / "empty")]) == 0
    assert capsys.readouterr().out == ""


@given(
    st.binary(max_size=200), st.sampled_from([b"", b'BMOE_DONE {"id":1,"x":', b"BMOE_LOAD ", b"\xff\xfe", DATA[:100]])
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_end_well(tmp_path: Path, capsys: pytest.CaptureFixture[str], noise: bytes, start: bytes):
    path = tmp_path / "noise"
    path.write_bytes(start + noise)
    assert main(["events", str(path)]) == 0
    read(capsys.readouterr().out)
