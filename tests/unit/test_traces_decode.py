"""Views of compute and I/O traces against a plain reference, on random traces; and every view over a trace in portions.

Random traces have several turns, ties, reads that touch, overlap or stand apart, and faults in few rows or none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
from bmoe_collector.traces import read
from bmoe_collector.traces.read import Selection, open_trace
from bmoe_collector.traces.views import VIEWS
from hypothesis import given, settings
from hypothesis import strategies as st
from support import plain_decode, plain_route, trace_files

OPS = (("MUL_MAT_ID", "ffn_moe_up-{}"), ("MUL_MAT", "Qcur-{}"), ("RMS_NORM", "ffn_norm-{}"), ("ADD", "l_out-{}"))


@st.composite
def compute_rows(draw):
    """Lines of a compute trace with a row a node."""
    lines = []
    for turn in range(draw(st.integers(1, 2))):
        for phase, step in draw(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 5)), max_size=6, unique=True)):
            for seq in range(draw(st.integers(1, 5))):
                layer = draw(st.integers(-1, 2))
                op, name = draw(st.sampled_from(OPS))
                wall, faults = draw(st.integers(1, 9)), draw(st.sampled_from([0, 0, 1, 5]))
                lines.append(f"{turn},{phase},{step},{seq},{layer},{op},{name.format(layer)},{wall},{faults}")
    return lines


@st.composite
def io_rows(draw):
    """Lines of an I/O trace."""
    row = st.tuples(
        st.integers(0, 1),
        st.integers(0, 1),
        st.integers(0, 2),
        st.integers(0, 2),
        st.integers(0, 2),
        st.integers(0, 2),
        st.sampled_from([0, 0, 1]),
        st.integers(0, 40),
        st.integers(1, 9),
        st.integers(1, 1000),
    )
    return [
        f"{turn},{phase},{step},{layer},7,{proj},{lane},{spec},{offset},{asked},{asked + 3},{ns}"
        for turn, phase, step, layer, proj, lane, spec, offset, asked, ns in draw(
            st.lists(row, min_size=1, max_size=40)
        )
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("decode")


def written(folder, kind, lines):
    path = folder / f"{kind}.csv"
    header = ",".join(read.COLUMNS[kind])
    path.write_text(f"# {kind}_trace v1\n# model=/m.gguf arch=x n_layer=3\n{header}\n" + "\n".join(lines) + "\n")
    return path


def same(expected, found, where):
    for name, value in expected.items():
        if isinstance(value, Mapping):
            same(value, found[name], f"{where}.{name}")
        elif isinstance(value, float):
            assert math.isclose(value, found[name], rel_tol=1e-9), (where, name)
        else:
            assert value == found[name], (where, name)


def agrees(path, kind, view, plain):
    rows, facts = plain(path)
    found = VIEWS[kind][view](open_trace(path, kind), Selection())
    assert len(found.rows) == len(rows), view
    for expected, row in zip(rows, found.rows, strict=True):
        same(expected, row, view)
    same(facts, found.facts, view)


@given(lines=compute_rows())
@settings(max_examples=40, deadline=None)
@pytest.mark.parametrize("view", ["ops", "layers", "faults"])
def test_compute_views_add_up_what_a_loop_adds_up(folder, view, lines):
    agrees(written(folder, "compute", lines), "compute", view, getattr(plain_decode, view))


@given(lines=io_rows())
@settings(max_examples=40, deadline=None)
@pytest.mark.parametrize("view", ["latency", "size", "lanes", "adjacency"])
def test_io_views_find_what_a_loop_finds(folder, view, lines):
    agrees(written(folder, "io", lines), "io", view, getattr(plain_decode, view))


@pytest.mark.parametrize("kind", ["route", "compute", "io"])
def test_a_trace_too_large_to_hold_has_the_same_views(tmp_path, monkeypatch, kind):
    path = tmp_path / "trace.csv"
    getattr(trace_files, kind)(path, 1, (12, 5))
    with path.open("a") as out:
        out.write("0,1,rubbish,0\n0,1,7,0")  # a damaged row and a torn one
    held = {
        name: view(open_trace(path), Selection()).to_json() for name, view in VIEWS[kind].items() if name != "curve"
    }
    monkeypatch.setattr(read, "HELD_BYTES", path.stat().st_size // 5)
    for name, expected in held.items():
        found = VIEWS[kind][name](open_trace(path), Selection()).to_json()
        assert any("torn" in note for note in found["notes"])
        assert any("did not parse" in note for note in found["notes"])
        assert len(found["rows"]) == len(expected["rows"]), name
        for before, after in zip(expected["rows"], found["rows"], strict=True):
            same(before, after, name)
        same(expected["facts"], found["facts"], name)


def test_every_route_view_agrees_with_loops_on_a_whole_trace(tmp_path):
    path = tmp_path / "route.csv"
    trace_files.route(path, 12_000, (12, 5))
    for view in VIEWS["route"]:
        if view != "curve":
            agrees(path, "route", view, getattr(plain_route, {"bytes": "bytes_read"}.get(view, view)))
