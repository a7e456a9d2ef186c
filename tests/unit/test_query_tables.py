"""Text of lists that is safe wherever it lands, and times as people say them."""

from __future__ import annotations

import csv
import io
import re
from datetime import UTC, datetime

import pytest
from bmoe_collector.common import UserError
from bmoe_collector.query.runs import moment
from bmoe_collector.query.tables import markdown_cell, print_table, to_csv, to_json, to_markdown
from hypothesis import given, settings
from hypothesis import strategies as st

NOW = datetime(2026, 5, 2, 12, tzinfo=UTC)


@settings(max_examples=150)
@given(st.lists(st.one_of(st.none(), st.integers(), st.floats(allow_nan=False), st.text()), min_size=1, max_size=4))
def test_no_cell_acts_and_none_is_lost(row):
    columns = [f"c{at}" for at in range(len(row))]
    text = to_csv(columns, [row])
    assert not any(ord(letter) < 32 for letter in text.replace("\n", ""))
    found = list(csv.reader(io.StringIO(text)))
    assert len(found) == 2
    for cell, value in zip(found[1], row, strict=True):
        if isinstance(value, str):
            assert not cell.startswith(("=", "+", "-", "@", "\t"))
    marked = to_markdown(columns, [row]).splitlines()
    assert len(marked) == 3
    assert marked[2].replace("\\\\", "").replace("\\|", "").count("|") == len(row) + 1


def test_markdown_has_no_html_and_no_links():
    assert markdown_cell("<a href=x>[y](z)</a>`") == "&lt;a href=x&gt;\\[y\\](z)&lt;/a&gt;\\`"


def test_json_is_strict_and_ascii():
    assert to_json(["a", "b"], [[float("nan"), "ä"]]) == '[{"a": null, "b": "\\u00e4"}]'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2d", "2026-04-30T12:00:00+00:00"),
        ("3h", "2026-05-02T09:00:00+00:00"),
        ("45m", "2026-05-02T11:15:00+00:00"),
        ("1.5h", "2026-05-02T10:30:00+00:00"),
        ("2w", "2026-04-18T12:00:00+00:00"),
        ("2026-04-01T00:00:00+00:00", "2026-04-01T00:00:00+00:00"),
    ],
)
def test_moments(text, expected):
    assert moment(text, NOW) == int(datetime.fromisoformat(expected).timestamp()) * 10**9


@pytest.mark.parametrize("text", ["", "d", "2", "2 fortnights", "2026-13-01", "9999999999999w"])
def test_what_is_no_moment_is_refused(text):
    with pytest.raises(UserError, match="how long ago"):
        moment(text, NOW)


class Terminal(io.StringIO):
    """Stdout as a terminal."""

    def isatty(self) -> bool:
        return True


HEADS = ("run", "when", "model", "labels", "tok/s", "ttft s", "verdicts")
ROW = (
    "55f2e6a1963b",
    "2026-12-01 11:02",
    "tiny-qwen.gguf",
    "folder=one-shot file=a",
    1747.6,
    None,
    "short_run simulated",
)


def printed(monkeypatch: pytest.MonkeyPatch, width: int, out: io.StringIO) -> tuple[list[str], tuple[str, ...]]:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout", out)
    left_out = print_table(HEADS, [ROW], wide=("model", "labels", "verdicts"), gives_way=("labels", "ttft s"))
    return re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue()).splitlines(), left_out


@pytest.mark.parametrize("width", range(40, 130, 6))
def test_no_number_is_cut_however_narrow_the_terminal(monkeypatch, width):
    lines, left_out = printed(monkeypatch, width, Terminal())
    words = " ".join(lines).split()
    for whole in ("55f2e6a1963b", "2026-12-01", "11:02", "1748", "run", "when", "tok/s"):
        assert whole in words
    assert ("ttft" in words, "labels" in words) == ("ttft s" not in left_out, "labels" not in left_out)
    assert all(part in "".join(words) for part in ("short_run", "simulated"))
    if width >= 80:
        assert max(map(len, lines)) <= width


def test_columns_give_way_in_their_order(monkeypatch):
    assert printed(monkeypatch, 140, Terminal())[1] == ()
    assert printed(monkeypatch, 82, Terminal())[1] == ("labels",)
    assert printed(monkeypatch, 66, Terminal())[1] == ("labels", "ttft s")


def test_a_pipe_gets_whole_lines_and_null_is_no_zero(monkeypatch):
    (head, line), left_out = printed(monkeypatch, 40, io.StringIO())
    assert (left_out, head.split()[:2]) == ((), ["run", "when"])
    assert line.split() == [*" ".join(map(str, ROW[:4])).split(), "1748", "–", "short_run", "simulated"]
