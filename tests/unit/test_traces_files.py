"""Trace files as they are found: torn, damaged, of the wrong kind, kept as Parquet, joined to metrics."""

from __future__ import annotations

import json

import pytest
from bmoe_collector.cli import main
from bmoe_collector.common import UserError
from bmoe_collector.traces.join import with_metrics
from bmoe_collector.traces.keep import keep
from bmoe_collector.traces.read import Selection, open_trace
from bmoe_collector.traces.views import ABOUT, VIEWS

ROUTE = """# route_trace v1
# model=/models/My Model.gguf arch=qwen3moe n_layer=2 n_expert=8 n_expert_used=2
# layer=0 expert_bytes=100 dense_bytes=10
# layer=1 expert_bytes=100 dense_bytes=10
turn,phase,step,layer,slot,expert,weight,residency,expert_bytes,dropped
0,0,0,0,0,1,0.6,0,100,0
0,0,0,0,1,2,0.4,0,100,0
0,1,1,0,0,1,nan,1,0,0
0,1,1,0,1,3,-nan,0,100,0
1,1,5,0,0,1,0.9,1,0,0
1,1,6,0,0,3,0.9,1,0,0
"""
COMPUTE = """# compute_trace v1
# model=m arch=qwen3moe n_layer=2 n_threads=4 io_threads=4 o_direct=1 overlap=0
turn,phase,step,seq,layer,op,name,wall_ns,majflt
0,1,29,0,-1,GET_ROWS,embd,400,0
0,1,29,1,0,MUL_MAT_ID,ffn_moe_up-0,600,2
0,1,30,0,-1,GET_ROWS,embd,400,0
0,1,30,1,1,MUL_MAT_ID,ffn_moe_up-1,600,6
"""
LAYERS = """# compute_trace v1
# model=m arch=x n_layer=2 n_threads=4
turn,phase,step,seq,layer,op,name,wall_ns,majflt
0,1,29,0,-1,LAYER,pre,100,0
0,1,29,1,0,LAYER,blk.0,300,1
0,1,29,2,0,LAYER,blk.0,200,0
0,1,29,3,1,LAYER,blk.1,300,0
0,1,29,4,-1,LAYER,post,100,1
"""
IO = """# io_trace v1
turn,phase,step,layer,expert,proj,lane,spec,offset,req_bytes,read_bytes,latency_ns
0,1,29,0,1,0,0,0,0,100,128,1000
0,1,29,0,2,0,1,0,100,100,128,3000
0,1,29,0,5,0,1,1,900,300,384,2000
0,1,30,0,5,0,1,0,200,100,128,2000
"""


def write(folder, text, name="trace.csv"):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_preamble_facts_survive_a_space_in_the_model_path(tmp_path):
    trace = open_trace(write(tmp_path, ROUTE))
    assert trace.facts["model"] == "/models/My Model.gguf"
    assert trace.fact("n_expert") == 8
    assert trace.layers[1].expert_bytes == 100


@pytest.mark.parametrize("change", [lambda b: b.replace(b"\n", b"\r\n"), lambda b: b"\xef\xbb\xbf" + b])
def test_line_ends_and_a_byte_order_mark_change_nothing(tmp_path, change):
    plain = VIEWS["route"]["cache"](open_trace(write(tmp_path, ROUTE)), Selection())
    other = VIEWS["route"]["cache"](open_trace(write(tmp_path, change(ROUTE.encode()), "other.csv")), Selection())
    assert other.rows == plain.rows


def test_unknown_weights_are_unknown_and_never_nan(tmp_path):
    view = VIEWS["route"]["sanity"](open_trace(write(tmp_path, ROUTE)), Selection())
    assert sum(row["unknown_weights"] for row in view.rows) == 2
    assert view.facts["cells_of_another_width"] == 2
    json.dumps(VIEWS["route"]["matrix"](open_trace(write(tmp_path, ROUTE)), Selection()).to_json(), allow_nan=False)


def test_a_torn_last_line_is_told_and_left_out(tmp_path):
    trace = open_trace(write(tmp_path, ROUTE + "1,1,7,0,0,2,0.9,0,10"))
    view = VIEWS["route"]["sanity"](trace, Selection())
    assert view.facts["routings"] == 6
    assert view.facts["torn"] is True
    assert any("torn" in note for note in view.notes)


def test_a_damaged_row_is_counted_and_the_rest_read(tmp_path):
    broken = ROUTE.replace("0,1,1,0,1,3,-nan,0,100,0", "0,1,1,0,\x00rubbish")
    view = VIEWS["route"]["sanity"](open_trace(write(tmp_path, broken)), Selection())
    assert view.facts["malformed"] == 1
    assert view.facts["routings"] == 5


def test_duplicates_and_unattributed_rows_are_found(tmp_path):
    text = ROUTE + "0,1,1,0,0,4,0.1,1,0,0\n0,1,-1,0,0,4,0.1,1,0,0\n"
    facts = VIEWS["route"]["sanity"](open_trace(write(tmp_path, text)), Selection()).facts
    assert facts["duplicates"] == 1
    assert facts["unattributed"] == 1


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [
        ("hello\nworld\n", None, "not a decode trace"),
        ("", None, "not a decode trace"),
        (IO, "route", "is an I/O trace, not a route trace"),
        ("# bmoe_metrics v2\nstep,steps,wall_ms\n1,2,3\n", None, "not a decode trace"),
        (ROUTE.encode("utf-16"), None, "UTF-16"),
    ],
)
def test_what_is_no_such_trace_is_refused_with_the_reason(tmp_path, text, kind, says):
    with pytest.raises(UserError, match=says):
        open_trace(write(tmp_path, text), kind)


def test_a_trace_with_a_header_and_no_row_has_empty_views(tmp_path):
    trace = open_trace(write(tmp_path, ROUTE.split("0,0,0", 1)[0]))
    for name, view in VIEWS["route"].items():
        assert not view(trace, Selection()).rows, name


def test_compute_views_share_time_and_faults(tmp_path):
    trace = open_trace(write(tmp_path, COMPUTE))
    rows = VIEWS["compute"]["ops"](trace, Selection()).rows
    assert [(row["op"], row["part"], row["wall_ns"]) for row in rows] == [
        ("MUL_MAT_ID", "experts", 1200),
        ("GET_ROWS", "embedding", 800),
    ]
    assert rows[0]["share"] == pytest.approx(0.6)
    faults = VIEWS["compute"]["faults"](trace, Selection())
    assert [(row["layer"], row["majflt"], row["fault_share"]) for row in faults.rows] == [(1, 6, 0.75), (0, 2, 0.25)]
    assert faults.facts["wall_share_of_faulting_nodes"] == pytest.approx(0.6)


def test_layer_granularity_is_seen_and_segments_sum_into_their_layer(tmp_path):
    view = VIEWS["compute"]["layers"](open_trace(write(tmp_path, LAYERS)), Selection())
    assert view.facts["granularity"] == "layer"
    assert [(row["segment"], row["wall_ns"]) for row in view.rows] == [
        ("pre", 100),
        ("blk.0", 500),
        ("blk.1", 300),
        ("post", 100),
    ]


def test_io_views_count_waste_lanes_and_what_could_be_one_read(tmp_path):
    trace = open_trace(write(tmp_path, IO))
    assert VIEWS["io"]["size"](trace, Selection()).facts["waste"] == pytest.approx((768 - 600) / 768)
    lanes = VIEWS["io"]["lanes"](trace, Selection()).rows
    assert [(row["lane"], row["reads"], row["speculative"]) for row in lanes] == [(0, 1, 0), (1, 3, 1)]
    adjacency = VIEWS["io"]["adjacency"](trace, Selection()).facts
    assert (adjacency["reads"], adjacency["joinable"]) == (4, 1)
    latency = VIEWS["io"]["latency"](trace, Selection()).rows[0]
    assert (latency["p50_us"], latency["max_us"]) == (2.0, 3.0)


def test_parquet_answers_as_the_csv_it_was_made_from(tmp_path):
    path = write(tmp_path, ROUTE + "garbage,row\n1,1,8,0")
    kept = keep(path, tmp_path / "kept" / "route.parquet")
    csv, parquet = open_trace(path), open_trace(kept)
    for name, view in VIEWS["route"].items():
        assert view(parquet, Selection()).to_json() == view(csv, Selection()).to_json(), name
    assert [entry.name for entry in kept.parent.iterdir()] == ["route.parquet"]


def test_metrics_meet_a_turn_at_its_first_decode_step(tmp_path):
    rows = {"turn": [0, 1, 1, 1], "step": [1, 1, 2, 3], "wall_ms": [10.0, 20.0, 21.0, 22.0], "read_bytes": [1, 2, 3, 4]}
    view = with_metrics(open_trace(write(tmp_path, ROUTE)), Selection(), rows)
    assert [(row["turn"], row["step"], row["token"], row["wall_ms"]) for row in view.rows] == [
        (0, 1, 1, 10.0),
        (1, 5, 1, 20.0),
        (1, 6, 2, 21.0),
    ]
    assert view.facts == {"steps": 3, "steps_without_metrics": 0, "metrics_without_steps": 1}


def test_every_view_says_what_it_shows():
    assert {kind: list(told) for kind, told in ABOUT.items()} == {kind: list(views) for kind, views in VIEWS.items()}


def bmoe(capsys, *words, code=0):
    assert main(["trace", *map(str, words)]) == code
    return capsys.readouterr()


def test_the_terminal_says_what_the_numbers_are_and_when_there_are_none(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    file = write(tmp_path, ROUTE)
    for view, about in ABOUT["route"].items():
        assert bmoe(capsys, "route", file, "--view", view).out.startswith(about)
    outside = "nothing of the trace is in this selection; it has turn 0 to 1, layer"
    assert outside in bmoe(capsys, "route", file, "--layers", "90-99").err
    assert outside in json.loads(bmoe(capsys, "route", file, "--turn", "7", "--json").out)["notes"][-1]
    assert "selection" not in bmoe(capsys, "route", file).err


def test_a_folder_names_the_traces_in_it(tmp_path, capsys):
    file = write(tmp_path, ROUTE)
    assert f"is a folder; name the trace in it: {file.name}" in bmoe(capsys, "route", tmp_path, code=2).err
