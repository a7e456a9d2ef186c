"""Real engines' output through the contract parsers: no line lost, texts whole, numbers equal."""

import csv
import json
from collections import Counter
from pathlib import Path

import pytest
from bmoe_proto.contract.columns import DONE, METRICS, PREAMBLE, PROGRESS, READY, TRAILER
from bmoe_proto.contract.events import Answer, Begin, Done, Error, Event, Progress, Ready, Report
from bmoe_proto.contract.flags import read_argv
from bmoe_proto.contract.metrics import parse_metrics
from bmoe_proto.contract.recognise import recognise
from bmoe_proto.contract.stdout import parse
from bmoe_proto.contract.traces import parse_trace

pytestmark = pytest.mark.agent

RUNS = (
    "error-cache-band",
    "oneshot-gemma-cache",
    "oneshot-killed",
    "oneshot-mmap",
    "oneshot-ngram",
    "oneshot-stream-cache",
    "oneshot-traced",
    "session-missing-model",
    "session-turns",
)


@pytest.fixture(params=RUNS)
def run(request: pytest.FixtureRequest, captures: Path) -> Path:
    folder = captures / request.param
    if not folder.is_dir():
        pytest.skip(f"no capture {request.param} here")
    return folder


def _file(run: Path, name: str) -> bytes:
    path = run / name
    if not path.is_file():
        pytest.skip(f"this run wrote no {name}")
    return path.read_bytes()


def _kind(line: bytes) -> str:
    if line.startswith(b"BMOE_"):
        return line[5 : line.index(b" ")].decode().lower()
    return "report"


def test_there_is_no_capture_the_tests_do_not_know(captures: Path):
    assert {path.parent.name for path in captures.glob("*/run.json")} <= set(RUNS)


def test_events_by_kind_are_the_lines_of_that_kind(run: Path):
    data = _file(run, "stdout.bin")
    before, banner, rest = data.partition(b"=== answer ===\n")
    _, perf, after = rest.rpartition(b"\n=== perf ===\n")
    assert bool(banner) == bool(perf)
    lines = [*before.splitlines(), *after.splitlines()] if banner else data.split(b"\n")[:-1]
    expected = Counter(map(_kind, lines)) + Counter({"answer": 1} if banner else {})
    assert Counter(event.event for event in parse(data)) == expected


def test_joined_deltas_are_the_final_text(run: Path):
    text = b""
    shown = ""
    checked = 0
    for event in parse(_file(run, "stdout.bin")):
        if isinstance(event, Begin):
            text, shown = b"", ""
        elif isinstance(event, Progress):
            text = event.text if event.reset else text + event.text
            shown = (event.delta_text or "") if event.reset else shown + (event.delta_text or "")
        elif isinstance(event, (Answer, Done)):
            assert event.text == text
            assert event.to_json()["text"] in (shown, shown + "\ufffd")
            checked += 1
    assert checked or run.name in ("oneshot-killed", "session-missing-model", "error-cache-band")


def test_events_are_strict_json_and_in_order(run: Path):
    found = [event.to_json() for event in parse(_file(run, "stdout.bin"))]
    again = [json.loads(json.dumps(each, allow_nan=False)) for each in found]
    assert again == found
    assert [each["line"] for each in found] == sorted(each["line"] for each in found)
    assert all(-1 not in (each.get("cache_hit_pct"), each.get("dense_resident_frac")) for each in found)


def test_every_key_seen_is_in_the_table(run: Path):
    tables = {Progress: PROGRESS, Done: DONE, Ready: READY}
    for event in parse(_file(run, "stdout.bin")):
        table = tables.get(type(event))
        if table is not None:
            assert set(event.values) <= set(table)  # type: ignore[union-attr]
        if isinstance(event, Report):
            assert event.facts


def test_csv_values_are_those_of_the_file(run: Path):
    data = _file(run, "metrics.csv")
    found = parse_metrics(data)
    lines = [line for line in data.decode().splitlines() if not line.startswith("#")]
    rows = list(csv.DictReader(lines))
    assert list(found.names) == list(rows[0])
    for name in found.names:
        assert name in METRICS
        expected = [float(row[name]) for row in rows]
        if name in ("cache_hit_pct", "dense_resident_frac"):
            assert found.columns[name] == [None if value == -1 else value for value in expected]
        else:
            assert found.columns[name] == expected
        kind = int if METRICS[name].type == "int" else float
        assert {type(value) for value in found.columns[name]} <= {kind, type(None)}
    assert found.problems == []
    assert found.turns == found.columns["turn"]
    assert len(found.trailers) == sum(line.startswith("# summary") for line in data.decode().splitlines())
    assert set(found.preamble) <= set(PREAMBLE)
    for trailer in found.trailers:
        assert set(trailer.values) <= set(TRAILER)


def test_stdout_and_csv_tell_the_same_tokens(run: Path):
    rows = parse_metrics(_file(run, "metrics.csv"))
    tokens = [event for event in parse(_file(run, "stdout.bin")) if isinstance(event, Progress)]
    assert [event.values["step"] for event in tokens] == rows.columns["step"]
    assert [event.turn for event in tokens] == rows.turns


def test_a_sessions_trailers_and_dones_agree(captures: Path):
    run = captures / "session-turns"
    dones = [event for event in parse((run / "stdout.bin").read_bytes()) if isinstance(event, Done)]
    trailers = parse_metrics((run / "metrics.csv").read_bytes()).trailers
    assert [(each.turn, each.values["tokens"]) for each in dones] == [(t.turn, t.done["tokens"]) for t in trailers]
    for done, trailer in zip(dones, trailers, strict=True):
        same = {key for key in trailer.done if key in done.values} - {"load_s"}
        assert {"tok_s", "prefill_tps", "cache_hit_pct", "n_prompt", "read_mib", "mtp_decodes"} <= same
        for key in ("tok_s", "prefill_tps", "cache_hit_pct", "n_prompt", "read_mib"):
            assert trailer.done[key] == pytest.approx(done.values[key])


@pytest.mark.parametrize(("name", "kind"), [("route", "route"), ("compute", "compute"), ("io", "io")])
def test_trace_values_are_those_of_the_file(captures: Path, name: str, kind: str):
    data = (captures / "oneshot-traced" / f"{name}.csv").read_bytes()
    found = parse_trace(data)
    assert found.header.kind == kind
    assert data[found.header.offset :].startswith(b"0,")
    rows = list(csv.DictReader(line for line in data.decode().splitlines() if not line.startswith("#")))
    assert len(found) == len(rows)
    for column, values in found.columns.items():
        assert [str(value) if isinstance(value, str) else float(value) for value in values] == (
            [row[column] if column in ("op", "name") else float(row[column]) for row in rows]
        )
    assert found.problems == []


def test_every_file_is_recognised(run: Path):
    expected = {"stdout.bin": "stdout", "stderr.bin": "stderr", "metrics.csv": "metrics", "run.json": "run.json"}
    expected |= {f"{name}.csv": name for name in ("route", "compute", "io")}
    for path in run.iterdir():
        data = path.read_bytes()
        assert recognise(data) == (expected[path.name] if data else "empty")


def test_argvs_hold_only_known_flags(run: Path):
    argv = read_argv(json.loads((run / "run.json").read_text())["argv"])
    assert (argv.unknown, argv.missing) == ([], [])
    assert argv.get("--model")


def test_errors_are_errors(captures: Path):
    (event,) = parse((captures / "session-missing-model" / "stdout.bin").read_bytes())
    assert isinstance(event, Error)
    assert event.values["fatal"] is True
    rejected = [e for e in parse((captures / "session-turns" / "stdout.bin").read_bytes()) if isinstance(e, Error)]
    assert [(e.values["id"], e.values["fatal"]) for e in rejected] == [(3, False)]


def _named(events: list[Event], name: str) -> list[Report]:
    return [event for event in events if isinstance(event, Report) and event.name == name]


def test_the_report_of_a_speculated_run(captures: Path):
    found = parse((captures / "oneshot-ngram" / "stdout.bin").read_bytes())
    accepted, cost, coverage = (event.facts for event in _named(found, "ngram"))
    assert (accepted["mtp_accepted"], accepted["mtp_drafted"], accepted["mtp_decodes"]) == (22, 22, 26)
    assert (cost["effective_tok_s"], cost["tok_s"]) == (833.58, 833.68)
    assert (coverage["drafted_steps"], coverage["drafted_steps_pct"]) == (8, 30.8)
    hit, churn = (event.facts for event in _named(found, "moe-cache"))
    assert hit == {"cache_hit_pct": 35.8, "cache_resident_mib": 3.9}
    assert churn == {"evictions": 210, "rereads": 199, "rereads_tok": 4.1}
    assert _named(found, "prefill")[0].facts["ttft_s"] == 0.015


def test_a_ready_line(captures: Path):
    ready = parse((captures / "session-turns" / "stdout.bin").read_bytes())[0]
    assert isinstance(ready, Ready)
    assert dict(ready.values) == {
        "load_s": 0.015,
        "arch": "qwen3moe",
        "n_ctx": 256,
        "think_ctl": "template",
        "n_expert_used": 2,
    }
