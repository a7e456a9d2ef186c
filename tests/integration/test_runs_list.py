"""`bmoe runs` on both databases: every filter, every column, every format, and text that must not act."""

from __future__ import annotations

import contextlib
import csv
import io
import json

import pytest
from bmoe_collector.cli import main
from bmoe_collector.common import UserError
from bmoe_collector.query.fields import aliases, fields
from bmoe_collector.query.runs import Selection, list_runs
from bmoe_collector.store.engine import open_store
from support import stored

ALPHA = [stored.MERGED, "a1" + "0" * 30, "a2" + "0" * 30, "a3" + "0" * 30]
IMPORTED = "b1" + "0" * 30


@pytest.fixture
def store(store_url):
    with contextlib.closing(open_store(store_url)) as opened:
        stored.fill(opened)
        yield opened


FILTERS = {
    "model": (Selection(model="ALPHA"), ALPHA),
    "device by the name people gave it": (Selection(device="SHELF"), [*ALPHA, stored.STARTED]),
    "device by its model": (Selection(device="model a"), [*ALPHA, stored.NASTY, stored.STARTED]),
    "device by tag": (Selection(device="lab"), [stored.NASTY]),
    "device by uuid": (Selection(device="cdcd"), [stored.NASTY]),
    "three digits are no uuid": (Selection(device="cdc"), []),
    "engine": (Selection(engine="0.19"), [stored.NASTY]),
    "engine by sha256": (Selection(engine="eeee"), [*ALPHA, stored.NASTY, IMPORTED, stored.STARTED]),
    "plan": (Selection(plan="SIZ", cell="large"), ALPHA[2:]),
    "plan by id": (Selection(plan="1212", outcomes=["partial"]), [ALPHA[3]]),
    "a cell is its whole name": (Selection(cell="larg"), []),
    "outcomes": (Selection(outcomes=["started", "partial"]), [ALPHA[3], stored.STARTED]),
    "since and until": (Selection(since="2026-05-01T11:00:00+00:00", until="2026-05-01T13:00:00+00:00"), ALPHA[1:3]),
    "label": (Selection(labels=["size=small", "room"]), [stored.MERGED]),
    "label with an umlaut": (Selection(where="label.room ~ 'SÜD'"), []),  # ASCII letters alone have two cases
    "label with part of an umlaut's word": (Selection(where="label.room ~ 'üD'"), [stored.MERGED]),
    "verdicts": (Selection(verdicts=["short_run"], without=["incomplete"]), ALPHA[1:3]),
    "where": (Selection(where="cache_mb>=2000 and overlap=1 and o_direct=0"), [stored.MERGED]),
    "where over a fact": (Selection(where="token_ms_p95 > 85 and streaming = true"), ALPHA[:3]),
    "unmeasured is neither": (Selection(where="not token_ms_p95 > 85"), [ALPHA[3]]),
    "text is ordered by bytes": (Selection(where="model_name < 'a'"), ALPHA),
    "text holds other alphabets": (Selection(where="model_arch = 'Ärch'"), [stored.NASTY]),
    "the phone's name in where": (Selection(where="device = 'shelf one' and n_tokens = 0"), [stored.STARTED]),
}


def test_filters_choose_exactly_these(store):
    for what, (selection, expected) in FILTERS.items():
        found = [row[0] for row in list_runs(store, selection, ["run_id"]).rows]
        assert sorted(found) == sorted(expected), what
    for wrong in (Selection(outcomes=["good"]), Selection(verdicts=["bad"]), Selection(since="yesterday"),
                  Selection(where="nothing = 1"), Selection(labels=["=x"]), Selection(sort=["verdicts"])):  # fmt: skip
        with pytest.raises(UserError):
            list_runs(store, wrong)


def test_order_limit_and_every_column(store):
    newest = list_runs(store, Selection(limit=3), ["run_id"])
    assert [row[0] for row in newest.rows] == [IMPORTED, stored.NASTY, ALPHA[3]]
    assert newest.more
    assert list_runs(store).rows[-1][0] == stored.STARTED  # no start is known: last
    up = [row[0] for row in list_runs(store, Selection(sort=["tok_s"]), ["tok_s"]).rows]
    down = [row[0] for row in list_runs(store, Selection(sort=["-tok_s"]), ["tok_s"]).rows]
    assert up == [10.0, 11.0, 12.0, 13.0, 20.5, 29.5, None]
    assert down == [29.5, 20.5, 13.0, 12.0, 11.0, 10.0, None]
    names = [row[0] for row in list_runs(store, Selection(sort=["model", "-started"]), ["model"]).rows]
    assert names == ["Alpha.gguf"] * 4 + ["beta.gguf"] * 3
    everything = list_runs(store, Selection(), [*fields(), *aliases(), "label.size"])
    assert set(everything.columns) == {*fields(), "label.size"}
    row = next(one for one in everything.dicts() if one["run_id"] == stored.MERGED)
    assert row["simulated"] is False
    assert row["labels"] == {"room": "Süd", "size": "small"}
    assert row["verdicts"] == ["incomplete", "short_run"]
    assert (row["started"], row["device"], row["label.size"]) == ("2026-05-01T10:00:00Z", "shelf one", "small")


def test_the_command_in_every_format(store, store_url, capsys):
    def asked(*arguments, code=0):
        assert main(["runs", *arguments, "--db", store_url]) == code
        return capsys.readouterr()

    rows = json.loads(asked("--json").out)
    assert len(rows) == stored.RUNS_STORED
    assert list(rows[0])[:3] == ["run_id", "started", "device"]
    # text that a terminal, a spreadsheet or Markdown would act on comes out harmless, and JSON has it exactly
    nasty = ("--device", "cdcd", "--columns", "run_id,device,cell,tok_s,labels")
    assert json.loads(asked(*nasty, "--json").out)[0]["cell"] == stored.BAD
    text = asked(*nasty, "--csv").out
    assert "\x1b" not in text
    cells = list(csv.reader(io.StringIO(text)))[1]
    assert cells[1].startswith("'=")
    assert cells[2].startswith("'=")
    assert cells[3] == "20.5"
    marked = asked(*nasty, "--markdown").out.splitlines()
    assert len(marked) == 3
    for raw in ("<b>", "\x1b", "*c*", " |a"):
        assert raw not in marked[2].replace("\\*", "").replace("\\|", "")
    shown = asked(*nasty).out
    assert "\x1b" not in shown
    assert "\r" not in shown
    assert stored.NASTY[:12] in shown
    assert "the first 2" in asked("--limit", "2").err
    assert "no stored run matches" in asked("--model", "nothing").err
    assert json.loads(asked("--model", "nothing", "--json").out) == []
    listed = json.loads(asked("--fields", "--json").out)
    assert {"tok_s", "cache_mb", "label.KEY", "verdict"} <= {one["name"] for one in listed}
    assert all(one["meaning"] for one in listed if one["from"] in {"run", "made"})
    added = asked("--columns", "+p_none", code=2)
    assert "no such name" in added.err
    assert "token_ms_p95" in asked("--columns", "+token_ms_p95", "--csv").out.splitlines()[0]
    for wrong in (["--json", "--csv"], ["--limit", "-1"], ["--columns", "tok_s,+hit"], ["--where", "tok_s >"]):
        asked(*wrong, code=2)
