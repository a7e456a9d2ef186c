"""`bmoe show`: the object's interface, what the terminal shows, and that nothing in a text acts on the terminal."""

from __future__ import annotations

import io
import json
import math
import re
from dataclasses import replace

import pytest
from bmoe_collector.common import plain
from bmoe_collector.meaning import derive
from bmoe_collector.record import ArtifactRecord, ReportLine, ResidencyRecord, Rows, RunRecord
from bmoe_collector.show import words
from bmoe_collector.show.document import document
from bmoe_collector.show.safe import clip, escape
from bmoe_collector.show.tokens import token_table
from bmoe_collector.show.view import render
from bmoe_collector.verdicts import judge
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from support.run_records import TOKENS, clean, gate, rows, run, sample, summary, turn, with_preamble

HOSTILE = "\x1b]0;owned\x07\x1b[2Jred \x1b[31m\r\x08\x00 \u202eevil \u200b\x9b1m"


def shown(record: RunRecord, **options) -> str:
    console = Console(file=io.StringIO(), width=140, highlight=False, color_system=None)
    render(console, record, derive(record), judge(record), **options)
    return console.file.getvalue()


def told(record: RunRecord, **options) -> dict:
    found = document(record, derive(record), judge(record), **options)
    return json.loads(json.dumps(plain(found), allow_nan=False))


def test_the_objects_interface():
    record = clean(
        report=(ReportLine("mode", {"moe_stream": 1}, "mode: expert streaming"),),
        artifacts=(ArtifactRecord("metrics.csv", "metrics", 10, "0" * 64),),
        run=run(signal=None, exit_code=0),
    )
    found = told(record, tokens=True)
    assert found["run"]["id"] == "ab" * 16
    assert (found["run"]["exit"], found["run"]["signal"], found["run"]["simulated"]) == (0, None, False)
    assert found["config"]["overlap"] == 0
    assert found["config"]["engine"] == "0.23.0"
    only = found["turns"][0]
    assert (only["turn"], only["id"], only["tokens"], only["cancelled"]) == (0, None, TOKENS, False)
    assert only["text"] == "Once upon a time"
    assert only["summary"]["tok_s"] == 10.0
    assert only["decide"] is only["error"] is None
    assert found["report"][0]["name"] == "mode"
    assert found["artifacts"] == [{"name": "metrics.csv", "kind": "metrics", "size": 10, "sha256": "0" * 64}]
    assert found["completeness"]["complete"] is True
    assert found["verdicts"] == []
    assert len(found["tokens"]) == TOKENS
    assert found["tokens"][0]["step"] == 1
    assert "tokens" not in told(record)


def test_tokens_carry_every_column_of_the_contract_and_the_csvs_value_stands():
    stdout = Rows({"turn": [0, 0], "step": [1, 2], "wall_ms": [99.0, 98.0], "read_mb": [1.5, 2.5], "boot_ns": [1, 2]})
    csv = Rows({"turn": [0, 0], "step": [1, 2], "wall_ms": [99.123, 98.456], "fork_column": [7, None]})
    first, second = told(clean(csv=csv, stdout=stdout), tokens=True)["tokens"]
    assert (first["wall_ms"], first["read_mb"], first["fork_column"]) == (99.123, 1.5, 7)
    assert second["fork_column"] is None
    assert first["rss_mib"] is None
    assert "boot_ns" not in first


def test_unmeasured_is_null_in_what_is_derived_and_recorded_zeros_stay_in_the_tokens():
    record = clean(
        csv=rows(cpu_ms=0.0, majflt=0, majflt_mib=0.0), turns=(turn(summary=summary(cpu_s_tok=0.0, majflt_tok=0.0)),)
    )
    found = told(record, tokens=True)
    assert found["derived"]["facts"]["cpu_s_tok"] is None
    assert found["derived"]["unmeasured"] == ["cpu"]
    assert found["tokens"][0]["cpu_ms"] == 0.0


def test_not_a_number_becomes_null():
    record = clean(csv=rows(3, wall_ms=[float("nan"), float("inf"), 1.0]), turns=())
    text = json.dumps(plain(document(record, derive(record), [], tokens=True)), allow_nan=False)
    assert "NaN" not in text


def test_half_a_character_at_the_end_of_a_text_is_one_replacement():
    assert told(clean(turns=(turn(text="ö".encode()[:1]),)))["turns"][0]["text"] == "\ufffd"


def test_the_terminal_shows_what_people_look_at():
    record = clean(
        gates=(gate("cpu_temp_c", 45, 40.0),),
        residency=(
            ResidencyRecord(1, "whole", "sample", "", 18 << 30, 0.31, 0.012, 4.5),
            ResidencyRecord(1, "dense", "unavailable", "unknown (not owner)", None, None, None, None),
        ),
    )
    text = shown(record)
    for piece in (
        "10.0 tok/s", "effective 9.52 tok/s", "time to first token  5.00 s", "flash wait", "unattributed", "p95",
        "resident whole: 31.0 % (± 1.2 %) of 18.0 GiB", "resident dense: unknown (not owner)", "hit rate", "evictions",
        "gate cpu_temp_c <= 45: held, last 40", "entry", "exit", "35.0 °C", "60.0 °C", "no verdicts", "complete, 120 frames",
        "observer: 40.0 ms CPU", "MemAvailable", "▄", "union of intervals", "Once upon a time",
    ):  # fmt: skip
        assert piece in text, piece
    assert "SIMULATED" not in text


def test_a_simulated_run_says_so_before_anything_else():
    assert shown(clean(run=run(simulated=True))).lstrip().startswith("SIMULATED")


def test_what_nobody_measured_is_a_dash_and_never_zero():
    text = shown(RunRecord(run=run(argv=[], n_tokens=0, outcome="lost", exit_code=None, exit_observed=False)))
    assert "not measured: configuration, speed, where the time goes, memory, cache and flash, phone" in text
    assert "exit not observed" in text
    numbers = re.findall(r"\b0(?:\.0+)? (?:tok/s|ms|MiB|%)", text)
    assert numbers == []
    assert re.search(r"rerouted +–", shown(clean()))  # among values that were, it is a dash


def test_a_session_is_shown_turn_by_turn():
    record = clean(
        run=run(argv=["bmoe-cli", "--session"]),
        ready={"load_s": 1.0},
        csv=Rows({}),
        turns=(turn(0, summary=summary(tok_s=20.0)), turn(1, summary=summary(tok_s=5.0), cancelled=True)),
    )
    text = shown(record)
    assert "Turns" in text
    assert "20.0" in text
    assert "1 (cancelled)" in text


def test_overlapping_bars_are_not_rescaled():
    record = replace(with_preamble(overlap=1), csv=rows(stall_ms=90.0, io_ms=300.0, cpu_ms=390.0))
    text = shown(record)
    assert "98 %" in text
    assert "90 %" in text


def test_no_text_from_elsewhere_acts_on_the_terminal():
    record = clean(
        run=run(
            model_name=f"m{HOSTILE}", cell=f"c{HOSTILE}", plan_name=f"p{HOSTILE}", labels={f"k{HOSTILE}": HOSTILE},
            device_name=HOSTILE, argv=["bmoe-cli", "-p", HOSTILE], evidence=[HOSTILE], cause=HOSTILE,
        ),
        turns=(turn(text=HOSTILE.encode(), reasoning=HOSTILE.encode()),),
        samples=(sample("entry", 1, wakefulness=HOSTILE, cpus_allowed=HOSTILE),),
        gates=(gate(HOSTILE, 1.0, 2.0, "gave_up"),),
        completeness={"complete": False, "reasons": [HOSTILE]},
        artifacts=(ArtifactRecord(HOSTILE, "other", 1, "0" * 64),),
    )  # fmt: skip
    text = shown(record, whole_text=True)
    assert not [character for character in text if ord(character) < 32 and character != "\n"]
    assert not {"\x7f", "\x9b", "\u202e", "\u200b"} & set(text)
    assert "\\e[2J" in text


def test_markup_in_a_text_is_only_text():
    assert "[bold red]x[/nope]" in shown(clean(turns=(turn(text=b"[bold red]x[/nope]"),)))


def test_long_texts_are_cut_unless_asked_for():
    long = b"\n".join(b"line %d" % at for at in range(50))
    assert "38 more lines" in shown(clean(turns=(turn(text=long),)))
    assert "line 49" in shown(clean(turns=(turn(text=long),)), whole_text=True)


def test_the_token_table_leaves_out_empty_columns():
    table = token_table(clean(csv=rows(2, swap_mib=None)))
    names = [column.header for column in table.columns]
    assert names[:2] == ["turn", "step"]
    assert "swap_mib" not in names
    assert table.row_count == 2


@settings(max_examples=150, deadline=None)
@given(st.text() | st.binary())
def test_escaped_text_is_printable_and_plain_text_is_left_alone(text):
    found = escape(text, lines=True)
    assert all(character.isprintable() or character in "\n\t" for character in found)
    if isinstance(text, str) and text.isascii() and text.isprintable():
        assert found == text


def test_escape_keeps_letters_of_every_script():
    assert escape("Größe 語 ñ 🙂") == "Größe 語 ñ 🙂"
    assert escape("a\nb\tc") == "a\\nb\\tc"
    assert clip("abcdef", 4) == "abc…"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (words.number(None), "–"),
        (words.number(float("nan")), "–"),
        (words.significant(0.0), "0"),
        (words.significant(0.001234), "0.00123"),
        (words.significant(1234.5), "1234" if round(1234.5) == 1234 else "1235"),
        (words.seconds(0.0123), "12.3 ms"),
        (words.seconds(300.0), "5.0 min"),
        (words.share(0.5), "50.0 %"),
        (words.mib(20480.0), "20.0 GiB"),
        (words.bar(3.0, 2.0, 10), "█████████▶"),
        (words.bar(None, 2.0), ""),
        (words.sparkline([1.0, 2.0, 3.0]), "▁▅█"),
        (words.sparkline([2.0, 2.0]), "▄▄"),
        (words.sparkline([math.nan]), ""),
    ],
)
def test_words(text, expected):
    assert text == expected
