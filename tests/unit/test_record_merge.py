"""Tokens of two sources become one row each: the first one's value where it has any, in the order of generation."""

from typing import Any

import pytest
from bmoe_collector.record import Rows, RunRecord
from hypothesis import given
from hypothesis import strategies as st

VALUE = st.one_of(st.none(), st.integers(0, 3))
CELLS = st.lists(st.tuples(st.one_of(st.none(), st.integers(0, 2)), st.integers(1, 6), VALUE, VALUE), max_size=8)


def rows(cells, *names: str) -> Rows:
    return (
        Rows(dict(zip(("turn", "step", *names), map(list, zip(*cells, strict=True)), strict=True))) if cells else Rows()
    )


def plain(first, second) -> list[dict[str, Any]]:
    """The same in other words: tokens of the first, then those that only the second has, sorted."""
    by_key = {cell[:2]: cell for cell in second}
    found = []
    for turn, step, a, b in first:
        theirs = by_key.get((turn, step), (None,) * 4)
        found.append({"turn": turn, "step": step, "a": a, "b": b if b is not None else theirs[2], "c": theirs[3]})
    seen = {cell[:2] for cell in first}
    for key, (_, _, b, c) in by_key.items():
        if key not in seen:
            found.append({"turn": key[0], "step": key[1], "a": None, "b": b, "c": c})
    return sorted(found, key=lambda row: (-1 if row["turn"] is None else row["turn"], row["step"]))


@given(CELLS, CELLS)
def test_any_two_sources(first, second):
    check(first, second)


@given(CELLS)
def test_two_that_tell_of_the_same_tokens(first):
    first = list({cell[:2]: cell for cell in first}.values())
    check(first, [(turn, step, b, a) for turn, step, a, b in first])


@pytest.mark.parametrize("first", [[(0, 1, None, None)], [(0, 2, 1, None), (0, 1, None, 2)], [(0, 1, 1, 1)] * 2])
def test_holes_disorder_and_repeats(first):
    check(first, [(0, 1, 5, 6), (0, 2, None, 7)])
    check(first, [(turn, step, 5, None) for turn, step, _, _ in first])


def check(first, second) -> None:
    if not first or not second:
        return
    record = RunRecord(run={"run_id": "0" * 32}, csv=rows(first, "a", "b"), stdout=rows(second, "b", "c"))
    merged = record.tokens()
    found = [dict(zip(merged.columns, row, strict=True)) for row in zip(*merged.columns.values(), strict=True)]
    assert found == plain(first, second)
