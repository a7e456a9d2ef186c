"""The filter language: what it reads, what it refuses, and that it and SQL say the same."""

from __future__ import annotations

import pytest
from bmoe_collector.common import UserError
from bmoe_collector.query.fields import canonical, compile_where
from bmoe_collector.query.where import holds, names_of, parse
from hypothesis import given
from hypothesis import strategies as st

ROW = {
    "cache_mb": 2000,
    "overlap": True,
    "model_name": "Qwen3 30B.gguf",
    "tok_s": None,
    "verdict": {"lossy", "short_run"},
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cache_mb>=2000 and overlap=1", True),
        ("cache_mb>2000", False),
        ("cache_mb != 2000 or overlap = true", True),
        ("model_name ~ 'qwen3 30'", True),
        ('model_name = "Qwen3 30B.gguf"', True),
        ("tok_s > 3", None),
        ("not tok_s > 3", None),
        ("tok_s is null", True),
        ("tok_s = null", True),
        ("tok_s is not null", False),
        ("verdict = lossy", True),
        ("verdict != lossy", False),
        ("not verdict=simulated and (cache_mb in (1000, 2000))", True),
        ("tok_s > 3 and cache_mb = 1", False),
        ("tok_s > 3 or cache_mb = 2000", True),
    ],
)
def test_expressions_have_three_values(text, expected):
    assert holds(parse(text), ROW.get) is expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "   ",
        "cache_mb",
        "cache_mb >=",
        "cache_mb >= 2 and",
        "(cache_mb = 1",
        "cache_mb = 1)",
        "= 3",
        "a in (1",
        "a is 3",
        "a > null",
        "a ! b",
        "a = 'b",
    ],
)
def test_what_cannot_be_read_is_refused_with_one_message(text):
    with pytest.raises(UserError, match="where:"):
        parse(text)


def test_an_unknown_name_is_answered_with_a_near_one():
    with pytest.raises(UserError, match="cache_mb"):
        canonical("cache_mbb")
    with pytest.raises(UserError, match="is a number"):
        compile_where(parse("cache_mb = big"))


def test_values_never_reach_the_statement_as_text():
    statement = str(compile_where(parse("model_name = \"x'; drop table runs; --\" and label.a = 'b'")))
    assert "drop" not in statement


@given(st.text(max_size=40))
def test_any_text_is_read_or_refused(text):
    try:
        tree = parse(text)
    except UserError:
        return
    assert names_of(tree)
    holds(tree, lambda _name: None)
