"""The Python API on both databases: frames with documented types and known values, and the examples of API.md as they are."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import bmoe_collector
import polars as pl
import pytest
from bmoe_collector import api
from bmoe_collector.common import UserError
from bmoe_collector.store.engine import open_store
from support import stored

PAGE = Path(bmoe_collector.__file__).parent / "API.md"


@pytest.fixture
def url(store_url):
    with contextlib.closing(open_store(store_url)) as store:
        stored.fill(store)
    return store_url


def test_frames_have_their_types_and_values(url, monkeypatch):
    with api.open(url) as fleet:
        runs = fleet.runs(["run_id", "simulated", "n_tokens", "tok_s", "streaming", "labels", "verdicts", "overlap"],
                          sort=["tok_s"])  # fmt: skip
        assert dict(runs.schema) == {
            "run_id": pl.String, "simulated": pl.Boolean, "n_tokens": pl.Int64, "tok_s": pl.Float64,
            "streaming": pl.Boolean, "labels": pl.String, "verdicts": pl.List(pl.String), "overlap": pl.Int64,
        }  # fmt: skip
        assert runs["tok_s"].to_list() == [10.0, 11.0, 12.0, 13.0, 20.5, 29.5, None]
        assert runs.row(0, named=True) == {
            "run_id": stored.MERGED, "simulated": False, "n_tokens": 3, "tok_s": 10.0, "streaming": True,
            "labels": '{"room": "Süd", "size": "small"}', "verdicts": ["incomplete", "short_run"], "overlap": 1,
        }  # fmt: skip
        tokens = fleet.tokens(stored.MERGED[:6], ["source", "turn", "step", "wall_ms", "cpu_ms"])
        assert tokens.rows() == [("both", 0, 1, 10.5, 7.0), ("both", 0, 2, 11.5, 8.0), ("csv", 0, 3, 12.5, None),
                                 ("stdout", 1, 1, 14.0, 9.0)]  # fmt: skip
        assert fleet.tokens(stored.STARTED).is_empty()
        assert fleet.tokens(model="beta", limit=1, sort=["-tok_s"])["wall_ms"].to_list() == [100.0, 101.0, 102.0]
        assert fleet.samples(stored.MERGED)["source"].to_list() == ["agent", "host"]
        turns = fleet.turns(stored.MERGED)
        assert (turns["cancelled"].dtype, turns["text"].to_list()) == (pl.Boolean, ["a\u2400b"])
        for wrong in (
            fleet.tokens,
            lambda: fleet.tokens("eeee"),
            lambda: fleet.tokens(stored.MERGED, ["nothing"]),
            lambda: fleet.runs(["nothing"]),
            lambda: fleet.runs(where="tok_s >"),
            lambda: fleet.sql("DELETE FROM runs"),
        ):
            with pytest.raises(UserError):
                wrong()
    namespace: dict[str, Any] = {}
    monkeypatch.setenv("BMOE_DB", url)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert len(blocks) > 5
    try:
        for block in blocks:
            exec(compile(block, str(PAGE), "exec"), namespace)
    finally:
        if "fleet" in namespace:
            namespace["fleet"].close()


def test_nothing_public_is_missing_from_all():
    named = set(api.__all__)
    assert list(api.__all__) == sorted(api.__all__)
    made_here = {
        name for name, value in vars(api).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == api.__name__
    }  # fmt: skip
    assert made_here == named
    page = PAGE.read_text("utf-8")
    for name in ("runs", "tokens", "samples", "turns", "compare", "sql", "open"):
        assert re.search(rf"\b(api|fleet)\.{name}\(", page), name
