"""The data frame of a metrics CSV equals what the contract's own reader makes of it, whatever the file."""

from pathlib import Path

import pytest
from bmoe_collector.metrics_frame import metrics_frame
from bmoe_proto.contract.metrics import NotOursError, parse_metrics
from hypothesis import given, settings
from hypothesis import strategies as st

HEAD = "step,steps,wall_ms,io_ms,compute_ms,read_bytes,cache_hit_pct"
TURNS = f"{HEAD},dense_resident_frac,turn"


def same(data: bytes) -> None:
    expected = parse_metrics(data)
    frame = metrics_frame(data)
    assert frame["turn"].to_list() == list(expected.turns)
    for name in expected.names:
        if name != "turn":
            assert frame[name].to_list() == expected.columns[name], name


@pytest.mark.parametrize(
    "rows",
    [
        [
            "1,2,0.5,0.0,0.5,4096,-1.00,-1.000,0",
            "2,2,0.5,0.0,0.5,0,50.00,0.000,0",
            "# summary tokens=2",
            "1,2,1,1,1,1,1,1,1",
        ],
        [],
        ["1,2,nan,inf,-nan,0,1.0,0.1,0"],
        ["1,2,,0.0,0.5,0,1.0,0.1,0"],
        ["1,2,0.5,0.0,0.5,0,1.0,0.1"],
        ["1,2,0.5,0.0,0.5,0,1.0,0.1,0,9", "1,2,0.5,0.0,0.5,0,1.0,0.1,0"],
        ["1,2,fast,0.0,0.5,1.5,1.0,0.1,0"],
        ["1,2,0.5,0.0,0.5,99999999999999999999,1.0,0.1,0"],
        ['1,2,"0.5",0.0,0.5,0,1.0,0.1,0'],
        ["1,2, 0.5,0.0,0.5,0,1.0,0.1,0"],
    ],
)
def test_equal_to_the_contracts_reader(rows):
    text = "\n".join([TURNS, *rows]) + "\n"
    same(text.encode())
    same(text[:-3].encode())
    same(text.replace("\n", "\r\n").encode("utf-16"))
    same((text + f"{HEAD},arm\n1,2,1,1,1,1,1,A\n").encode())


def test_of_real_files(captures: Path):
    paths = sorted(captures.glob("*/metrics.csv"))
    assert paths
    for path in paths:
        same(path.read_bytes())


def test_chosen_columns():
    frame = metrics_frame(f"{TURNS}\n1,2,0.5,0.0,0.5,0,-1,0.1,3\n".encode(), ["cache_hit_pct", "drain_ms"])
    assert {name: frame[name].to_list() for name in frame.columns} == {
        "cache_hit_pct": [None],
        "turn": [3],
        "drain_ms": [None],
    }
    old = metrics_frame(f"{HEAD}\n1,2,0.5,0.0,0.5,0,-1\n".encode(), ["wall_ms"])
    assert {name: old[name].to_list() for name in old.columns} == {"wall_ms": [0.5], "turn": [0]}


def test_what_is_not_ours_is_refused():
    with pytest.raises(NotOursError):
        metrics_frame(b'"step","steps"\n')


_CELL = (
    st.integers(-1, 10**6).map(str)
    | st.floats(-10, 1e6).map("{:.3f}".format)
    | st.sampled_from(["nan", "", "-1.00", "x", "1e3"])
)


@given(st.lists(st.lists(_CELL, min_size=8, max_size=10), max_size=5))
@settings(max_examples=100, deadline=None)
def test_any_cells(rows):
    same("\n".join([TURNS, *(",".join(["1", *row]) for row in rows), ""]).encode())
