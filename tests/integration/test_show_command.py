"""`bmoe show` over stored runs: real captures, the interface, exit codes."""

from __future__ import annotations

import csv
import json

import pytest
from bmoe_collector.cli import main

CSV_FILES = ("oneshot-gemma-cache", "oneshot-mmap", "oneshot-ngram", "oneshot-killed", "session-turns")


@pytest.fixture
def bmoe(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("BMOE_ARTIFACTS", str(tmp_path / "artifacts"))
    monkeypatch.setenv("BMOE_DB", str(tmp_path / "runs.db"))
    monkeypatch.setenv("BMOE_HOME", str(tmp_path / "home"))

    def call(*arguments: object, code: int = 0) -> tuple[str, str]:
        capsys.readouterr()
        found = main([*map(str, arguments)])
        out, err = capsys.readouterr()
        assert found == code, err
        return out, err

    return call


def stored(bmoe, captures, name: str) -> dict:
    """The object of a capture's run."""
    run = json.loads(bmoe("import", captures / name, "--json")[0])["run"]
    out, _ = bmoe("show", run, "--tokens", "--json")
    assert out.isascii()
    return json.loads(out)


@pytest.mark.parametrize("name", CSV_FILES)
def test_token_values_are_the_files(bmoe, captures, name):
    found = stored(bmoe, captures, name)
    with (captures / name / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    assert len(found["tokens"]) == len(rows)
    for token, row in zip(found["tokens"], rows, strict=True):
        for column, text in row.items():
            unmeasured = column in {"cache_hit_pct", "dense_resident_frac"} and float(text) == -1
            assert token[column] == (None if unmeasured else float(text)), column


def test_a_session(bmoe, captures):
    found = stored(bmoe, captures, "session-turns")
    turns = [(turn["turn"], turn["id"], turn["tokens"]) for turn in found["turns"] if turn["error"] is None]
    assert turns == [(0, 1, 16), (1, 2, 12), (2, 4, 5), (3, 5, 9)]
    [rejected] = [turn for turn in found["turns"] if turn["error"]]
    assert rejected["turn"] is None
    assert rejected["error"]["fatal"] is False
    facts = found["derived"]["facts"]
    assert facts["n_tokens"] == 42
    assert (facts["evictions"], facts["rereads"]) == (82, 75)
    assert facts["ttft_s"] == found["turns"][0]["summary"]["prefill_s"]
    assert "incomplete" not in {verdict["code"] for verdict in found["verdicts"]}


def test_a_killed_run_is_shown_with_success(bmoe, captures):
    found = stored(bmoe, captures, "oneshot-killed")
    assert (found["run"]["outcome"], found["run"]["exit"], found["run"]["signal"]) == ("killed", None, 9)
    verdicts = {verdict["code"]: verdict for verdict in found["verdicts"]}
    assert verdicts["incomplete"]["evidence"].startswith("no end record after 20 of 400 tokens")
    assert found["derived"]["facts"]["tok_s"] is not None
    assert found["derived"]["facts"]["ttft_s"] is None


def test_a_speculated_run(bmoe, captures):
    found = stored(bmoe, captures, "oneshot-ngram")
    facts = found["derived"]["facts"]
    assert facts["tok_s"] == pytest.approx(833.68)
    assert (facts["acceptance"], facts["amortisation"]) == (1.0, pytest.approx(48 / 26))
    assert found["derived"]["token_ms"]["min"] > 0
    codes = {verdict["code"]: verdict["severity"] for verdict in found["verdicts"]}
    assert codes == {"cache_below_cycle": "warn", "short_run": "warn", "speculative": "info"}


def test_a_traced_run_is_instrumented_although_its_preamble_is_clean(bmoe, captures):
    found = stored(bmoe, captures, "oneshot-traced")
    assert found["config"]["compute_trace_layers"] == 0
    assert "instrumented" in {verdict["code"] for verdict in found["verdicts"]}


def test_a_baseline_has_no_cache_and_says_so(bmoe, captures):
    found = stored(bmoe, captures, "oneshot-mmap")
    assert found["derived"]["facts"]["cache_hit_pct"] is None
    assert {"not_streaming"} <= {verdict["code"] for verdict in found["verdicts"]}
    assert found["config"]["moe_stream"] == 0


def test_every_capture_is_shown_in_the_terminal(bmoe, captures):
    runs = {json.loads(line)["run"] for line in bmoe("import", captures, "--json")[0].splitlines()}
    for run in runs:
        out, _ = bmoe("show", run[:12], "--text")
        assert run in out
        assert not [character for character in out if ord(character) < 32 and character != "\n"]


def test_an_unknown_run_names_the_nearest(bmoe, captures):
    run = stored(bmoe, captures, "oneshot-mmap")["run"]["id"]
    wrong = run[:4] + ("0" if run[4] != "0" else "1")
    out, err = bmoe("show", wrong, "--json", code=2)
    assert out == ""
    assert run in err
    bmoe("show", "nonsense", code=2)


def test_a_run_that_never_generated_is_no_page_of_dashes(bmoe, captures):
    run = stored(bmoe, captures, "error-cache-band")["run"]["id"]
    out, _ = bmoe("show", run)
    assert "not measured: speed, where the time goes, memory, cache and flash, phone" in out
    assert "config error: moe.cache_mb=500" in out
    assert "tok/s" not in out
    assert "files of" in out  # an import's time is its files', not a start


def test_bars_that_pass_the_whole_say_so(bmoe, captures):
    out, _ = bmoe("show", stored(bmoe, captures, "oneshot-killed")["run"]["id"])
    assert "together up to 134 %, and not rescaled" in out
    out, _ = bmoe("show", stored(bmoe, captures, "oneshot-mmap")["run"]["id"])
    assert "together" not in out
