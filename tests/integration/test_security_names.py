"""Names and texts that mean harm, from a phone to every place where they are read: databases, paths, terminals, tables.

One run whose every text is hostile is delivered by an agent, one is imported; then every command that reads is run.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import logging
import re
import unicodedata

import pytest
from bmoe_collector.cli import main
from bmoe_collector.commands.watch import _print
from bmoe_collector.fleet.logs import JsonLines, Words
from bmoe_collector.ingest import Ingestor
from bmoe_collector.store.artifacts import Artifacts
from bmoe_collector.store.engine import open_store
from bmoe_proto.v1 import telemetry_pb2 as pb
from support import records

RUN, SECOND = bytes.fromhex("ab" * 16), bytes.fromhex("cd" * 16)
SQL = "'; DROP TABLE runs; -- \" %s ${x} :name ?"
TERMINAL = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\u202egnp\u2066\u200b\u2028"
MARKUP = "<script>alert(1)</script>|[x](javascript:y)`![i](http://x)"
FORMULA = '=HYPERLINK("http://x")'
PATH = "../../../../tmp/x/\u2044etc"
NASTY = FORMULA + SQL + TERMINAL + MARKUP + PATH


def hostile(run_id):
    """A whole run of an agent that says NASTY wherever it may say anything."""
    stdout = records.oneshot().replace(b"xxxx", TERMINAL.encode() + MARKUP.encode())
    made = records.Record(run_id, seed=run_id[0])
    started = records.started()
    started.plan_name = started.plan_text = started.directory = NASTY
    started.cell.name = started.cell.model = started.device.name = started.engine.name = started.model.name = NASTY
    started.model.architecture = started.engine.version_text = NASTY
    started.cell.labels[NASTY] = NASTY
    started.cell.prompt = NASTY.encode()
    started.argv.append(NASTY.encode())
    for key in list(started.device.properties):
        started.device.properties[key] = NASTY
    made.add(run_started=started)
    made.add(launched=pb.Launched(pid=1))
    made.output(stdout)
    made.output(NASTY.encode() + b"\n", pb.STREAM_STDERR)
    made.sample("entry")
    made.add(gate=pb.GateReport(gate=NASTY, asked=NASTY, unit=NASTY, state="gave_up", policy=NASTY, source=NASTY))
    made.add(watchdog=pb.WatchdogReport(rule=NASTY, unit=NASTY, action=NASTY, detail=NASTY))
    made.add(note=pb.Note(code=NASTY, text=NASTY, facts_json=json.dumps({NASTY: NASTY})))
    made.add(turn=pb.TurnReport(state=NASTY, detail=NASTY, request=NASTY.encode()))
    made.end(cause=NASTY, evidence=[NASTY], ended_by=NASTY,
             artifacts=[pb.ArtifactFacts(name=NASTY, kind=NASTY, size=3, sha256=b"h" * 32, problem=NASTY)])  # fmt: skip
    return made


@pytest.fixture
def bmoe(store_url, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("BMOE_ARTIFACTS", str(tmp_path / "artifacts"))
    monkeypatch.setenv("BMOE_DB", store_url)
    monkeypatch.setenv("BMOE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")
    with contextlib.closing(open_store(store_url)) as store:
        taker = Ingestor(store, Artifacts(str(tmp_path / "artifacts")))
        for run_id in (RUN, SECOND):
            for cursor, data in hostile(run_id).batches():
                taker.blocks(records.AGENT, cursor, data)

    def call(*arguments, codes=(0,)):
        capsys.readouterr()
        code = main([*map(str, arguments)])
        said = capsys.readouterr()
        assert code in codes, (arguments, code, said.err)
        return said.out, said.err

    return call


def acts(text):
    """Characters in an output that a terminal would act on, or that change how it reads."""
    return {
        f"U+{ord(character):04X}"
        for character in text
        if character not in "\n\t" and unicodedata.category(character) in {"Cc", "Cf", "Zl", "Zp", "Cs"}
    }


def test_no_command_lets_text_from_elsewhere_act(bmoe, tmp_path):
    one, two = RUN.hex(), SECOND.hex()
    commands = [
        ("runs",), ("runs", "--columns", "run,model,device,cell,plan,labels"), ("runs", "--csv"), ("runs", "--markdown"),
        ("show", one), ("show", one, "--tokens"), ("judge", "--all"), ("compare", one, two), ("compare", one, two, "--force"),
        ("compare", "label:nothing=here", two), ("queue",), ("db", "check"), ("show", "zz" + TERMINAL), ("runs", "--where", TERMINAL),
        ("regress", two, "--baseline", one), ("sql", "select run, model_name from runs"), ("plan", "show", TERMINAL), ("import", tmp_path / TERMINAL),
    ]  # fmt: skip
    seen = ""
    for command in commands:
        out, err = bmoe(*command, codes=(0, 1, 2, 3))
        assert not acts(out + err), command
        assert "Traceback" not in err, (command, err)
        seen += out
    assert "owned" in seen  # it was shown, harmless


def test_json_is_ascii_and_whole(bmoe):
    for command in (
        ("runs",),
        ("show", RUN.hex(), "--tokens"),
        ("compare", RUN.hex(), SECOND.hex(), "--force"),
        ("judge", "--all"),
    ):
        out, err = bmoe(*command, "--json", codes=(0, 1))
        assert out.isascii()
        assert "\x1b" not in out + err
        for line in out.splitlines():
            json.loads(line)


def test_tables_for_spreadsheets_and_markdown_hold_only_text(bmoe, tmp_path):
    out, _ = bmoe("runs", "--csv", "--columns", "run,model,cell,device")
    rows = list(csv.reader(io.StringIO(out)))
    assert len(rows) == 3
    assert not [cell for row in rows for cell in row if cell[:1] in tuple("=+-@\t\r")]
    out, _ = bmoe("runs", "--markdown", "--columns", "run,model,cell,device")
    lines = out.strip().splitlines()
    assert len(lines) == 4
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {5}
    assert not re.search(r"<script|(?<!\\)\[x|(?<!\\)`", out)
    for name in ("runs.csv", "turns.csv"):
        bmoe("export", name.partition(".")[0], "--to", tmp_path / name)
        text = (tmp_path / name).read_text()
        assert not acts(text) - {"U+200B", "U+2028"}, name  # no more than odd blanks in a file
        assert not [cell for row in csv.reader(io.StringIO(text)) for cell in row if cell.startswith(("=", "@", "+"))]


def test_names_make_no_files_where_they_point(bmoe, tmp_path):
    bmoe("export", "--dataset", tmp_path / "set")
    names = {path.name for path in tmp_path.rglob("*")}
    assert not [name for name in names if name == "x" or "etc" in name or "script" in name]
    assert all(path.resolve().is_relative_to(tmp_path) for path in tmp_path.rglob("*"))


def test_watch_and_the_log_show_text_that_does_not_act(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")  # room for every column
    line = {
        "phone": "ab" * 16,
        "name": "[bold]",
        "where": r"\[red]",
        "state": "ready",
        "cell": "\x1b[2J",
        "doing": "\u202e",
    }
    _print([line])
    shown = capsys.readouterr().out
    assert not acts(shown)
    assert "[bold]" in shown
    assert r"\[red]" in shown
    error = (ValueError, ValueError(TERMINAL), None)
    for form in (Words(), JsonLines()):
        record = logging.LogRecord("bmoe", logging.INFO, "f", 1, f"lost {TERMINAL}", (), error)
        record.detail = record.phone = NASTY
        assert not acts(form.format(record))


TYPED = [SQL, "x' OR '1'='1", "%", "_" * 8, "a" * 4 + "%", NASTY, "\\", "../" * 8 + "etc/passwd"]


def test_what_people_type_is_never_sql_nor_a_path(bmoe):
    for text in TYPED:
        # a part of a name, to the letter: no wildcard, no escape
        found = json.loads(bmoe("runs", "--model", text, "--json")[0])
        assert len(found) == (2 if text.lower() in NASTY.lower() else 0), text
        for option in ("--cell", "--plan", "--label"):
            bmoe("runs", option, text, "--json", codes=(0, 2))
        bmoe("runs", "--where", f"model_name = '{text}'", codes=(0, 2))
        bmoe("show", text, codes=(2, 3))
        bmoe("compare", text, f"label:{text}={text}", codes=(1, 2, 3))
    bmoe("sql", "select 1; drop table runs; --", codes=(2, 3))
    assert [len(json.loads(bmoe("runs", "--device", text, "--json")[0])) for text in ("____", "ab%", "%%%%")] == [
        0,
        0,
        0,
    ]
    assert len(json.loads(bmoe("runs", "--json")[0])) == 2


def test_an_imports_labels_and_names_are_only_text(bmoe, tmp_path):
    folder = tmp_path / "import"
    folder.mkdir()
    (folder / "stdout").write_bytes(records.oneshot())
    told = {"argv": ["bmoe-cli", NASTY, "-m", "/x/" + NASTY], "exit": 0, "labels": {NASTY: NASTY, SQL: "x"}}
    (folder / "run.json").write_text(json.dumps(told))
    run = json.loads(bmoe("import", folder, "--json")[0])["run"]
    out, err = bmoe("show", run)
    assert not acts(out + err)
    found = json.loads(bmoe("runs", "--label", f"{SQL}=x", "--json")[0])
    assert [row["run_id"] for row in found] == [run]
