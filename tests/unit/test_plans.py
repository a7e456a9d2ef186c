"""Plan files: what they say, what is refused and with which words, and the order things run in."""

from __future__ import annotations

import re
import tomllib
from collections import Counter, defaultdict

import pytest
from bmoe_collector.commands.planning import _conditions
from bmoe_collector.common import UserError
from bmoe_collector.plans import document as module
from bmoe_collector.plans import load_plan
from bmoe_collector.plans.check import check
from bmoe_collector.plans.document import parse_plan, read_plan, shipped, shipped_text
from bmoe_collector.plans.expand import expand, merged, split_n_predict
from bmoe_collector.plans.order import places
from bmoe_proto.gates import GATES
from bmoe_proto.v1 import telemetry_pb2 as pb
from hypothesis import given, settings
from hypothesis import strategies as st

GOOD = """
name = "p"
model = "m.gguf"
prompt = "hello"
flags = ["--moe-stream"]
repeats = 6
order = "interleaved"
[matrix]
"--cache-mb" = [2000, 4000]
"--overlap" = [true, false]
"""


def plan_of(text, folder=None):
    document = parse_plan(text, "plan.toml", folder)
    return document, expand(document)


def errors_of(text):
    return check(*plan_of(text)).errors


def test_a_matrix_is_every_combination_in_its_written_order():
    _, plan = plan_of(GOOD)
    assert len(plan.cells) == 24
    assert [cell.name for cell in plan.cells[:4]] == [
        "cache-mb=2000 overlap",
        "cache-mb=2000 no-overlap",
        "cache-mb=4000 overlap",
        "cache-mb=4000 no-overlap",
    ]
    assert list(plan.cells[0].flags) == ["--moe-stream", "--cache-mb", "2000", "--overlap"]
    assert list(plan.cells[1].flags) == ["--moe-stream", "--cache-mb", "2000"]
    assert dict(plan.cells[1].labels) == {"cache-mb": "2000", "overlap": "false"}
    assert [cell.index for cell in plan.cells] == list(range(24))
    assert plan.text == GOOD
    assert plan.cells[0].prompt == b"hello"
    assert list(plan.cells[0].artifacts) == ["metrics"]


def test_models_and_prompts_multiply_cells_and_name_them(tmp_path):
    (tmp_path / "two.txt").write_text("zweiter Prompt ü\n", encoding="utf-8")
    text = 'name="p"\nmodels=["a.gguf","b.gguf"]\nprompts=["one",{file="two.txt"}]\n'
    _, plan = plan_of(text, tmp_path)
    assert [cell.name for cell in plan.cells] == ["p @a.gguf #1", "p @b.gguf #1", "p @a.gguf #2", "p @b.gguf #2"]
    assert plan.cells[2].prompt.decode() == "zweiter Prompt ü"


@given(
    st.lists(st.integers(1, 8), min_size=1, max_size=6),
    st.sampled_from(["listed", "interleaved", "abba", "reversed", "random"]),
    st.integers(1, 99),
)
@settings(deadline=None)
def test_every_order_runs_each_repeat_once_and_blocks_hold_neighbours(repeats, order, seed):
    made = places(repeats, order, seed)
    assert Counter((place.cell, place.repeat) for place in made) == Counter(
        (cell, repeat) for cell, count in enumerate(repeats) for repeat in range(count)
    )
    assert made == places(repeats, order, seed)
    by_block = defaultdict(list)
    for at, place in enumerate(made):
        by_block[place.block].append(at)
    for block in by_block.values():
        assert block == list(range(block[0], block[0] + len(block)))
    if order == "listed":
        assert all(len(block) == 1 for block in by_block.values())


def test_reversed_and_abba_turn_every_second_round():
    assert [place.cell for place in places([4, 4], "reversed")] == [0, 1, 1, 0, 0, 1, 1, 0]
    assert [place.block for place in places([4, 4], "reversed")] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [place.block for place in places([4, 4], "abba")] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_a_cell_may_run_more_or_less_often_than_the_plan_says():
    text = """
model = "m.gguf"
prompt = "hi"
repeats = 6
order = "abba"
[[cells]]
name = "a"
flags = ["--moe-stream"]
[[cells]]
name = "b"
repeats = 2
"""
    document, plan = plan_of(text)
    assert Counter(cell.name for cell in plan.cells) == {"a": 6, "b": 2}
    assert {cell.block for cell in plan.cells if cell.name == "b"} == {0}
    found = check(document, plan)
    assert found.errors == ()
    assert any("1 pairs a contrast cannot resolve" in warning for warning in found.warnings)
    odd = plan_of(text.replace("repeats = 2", "repeats = 3"))
    assert any("even number of repeats, not 3" in error for error in check(*odd).errors)
    with pytest.raises(UserError, match="repeats"):
        plan_of(text.replace("repeats = 2", "repeats = 0"))


def test_a_session_cell_carries_its_turns():
    text = """
model = "m.gguf"
[[cells]]
name = "chat"
flags = ["--decide"]
turns = [
  { prompt = "hi", n_predict = 8, think = false },
  { prompt = "more", idle_s = 1.5, clear_kv = false, cancel_after_tokens = 3 },
  { kind = "decide", prefix = "x", suffix = "y", choices = ["a", "b"], reuse_prefix = false },
]
"""
    document, plan = plan_of(text)
    assert check(document, plan).errors == ()
    turns = plan.cells[0].turns
    assert turns[0].HasField("think")
    assert turns[0].think is False
    assert not turns[0].HasField("clear_kv")
    assert (turns[1].idle_before_ms, turns[1].cancel_after_tokens, turns[1].clear_kv) == (1500, 3, False)
    assert list(turns[2].choices) == ["a", "b"]
    assert plan.cells[0].prompt == b""


CONDITIONS = """
name = "p"
model = "m"
prompt = "hello"
repeats = 6
[[gates]]
gate = "cpu_temp_c"
at_most = 45
[watchdog]
load_s = 100
total_s = 900
[[cells]]
name = "plain"
[[cells]]
name = "own"
gates = [{ gate = "speed_probe_ratio", at_least = 0.9, policy = "skip" }, { gate = "screen", equals = 0 }]
watchdog = { total_s = 1800, max_cpu_temp_c = 90 }
[[cells]]
name = "warms up"
unmeasured = true
gates = []
"""


def test_a_cells_own_gates_take_the_place_of_the_plans_and_its_watchdog_stands_over_it():
    document, plan = plan_of(CONDITIONS)
    assert check(document, plan).errors == ()
    plain, own, warm = plan.cells[:3]
    assert [gate.gate for gate in plain.gates] == ["cpu_temp_c"]
    assert [(gate.gate, gate.policy) for gate in own.gates] == [
        ("speed_probe_ratio", "skip"),
        ("screen", "run-flagged"),
    ]
    assert not warm.gates
    assert (plain.watchdog.load_s, plain.watchdog.total_s, plain.watchdog.HasField("max_cpu_temp_c")) == (
        100,
        900,
        False,
    )
    assert (own.watchdog.load_s, own.watchdog.total_s, own.watchdog.max_cpu_temp_c) == (100, 1800, 90)
    assert _conditions(plan)[:3] == [
        "plain: gates: cpu_temp_c <= 45, 900 s at most, else run-flagged",
        "plain: watchdog: load_s 100, total_s 900",
        "plain: retries: 1",
    ]
    assert "warms up: gates: none" in _conditions(plan)
    asked = CONDITIONS + '[question]\ncompare = [["plain", "own"]]\n'
    assert any("wait for different gates" in warning for warning in check(*plan_of(asked)).warnings)
    with pytest.raises(UserError, match="cell own: gate 2: needs `gate`"):
        plan_of(CONDITIONS.replace("equals = 0", "timeout_s = 1"))
    with pytest.raises(UserError, match="cell own: watchdog: no such key `totals`"):
        plan_of(CONDITIONS.replace("total_s = 1800", "totals = 1"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ('flags = ["--mtp", "--ngram"]', "--mtp and --ngram"),
        ('flags = ["--moe-streem"]', "did you mean --moe-stream"),
        ('flags = ["--csv", "x.csv"]', "only the phone chooses"),
        ('flags = ["--route-trace", "/sdcard/x"]', 'artifacts = \\["route"\\]'),
        ('flags = ["-m", "x"]', "--model is set"),
        ('flags = ["--session"]', "--session is set"),
        ('flags = ["--version"]', "nothing would run"),
        ('flags = ["--threads", "many"]', "whole number"),
        ('flags = ["--dense-weights", "warmish"]', "one of mmap"),
        ('flags = ["--io-threads"]', "needs a value"),
        ('flags = ["--moe-stream", "--cache-mb", "900"]', "--force-cache"),
        ('flags = ["stray"]', "unknown argument"),
        ('allow_unknown_flags = true\nflags = ["--log", "/sdcard/log"]', "names no paths"),
        ('environment = { LD_PRELOAD = "x.so" }', "not a plan's to set"),
        ('environment = { BMOE_CACHE_MB = "a/b" }', "names no paths"),
        ('artifacts = ["metrics", "route"]', "traced = true"),
        ('order = "abba"\nrepeats = 3', "even number"),
        ('order = "random"', "needs a seed"),
        ('[[gates]]\ngate = "cpu_tmp_c"\nat_most = 1', "did you mean `cpu_temp_c`"),
        ('[question]\ncompare = [["p", "q"]]', "no cell is called `q`"),
        ('[question]\ncompare = [["p", "p"]]', "with itself"),
        ('[question]\ncompare = [["p", "p"]]\nmetric = "speed"', "no number is called"),
        ('[question]\ncompare = [["p", "p"]]\nkeep = ["nonsense ="]', "where:"),
        ('[question]\nmetric = "tok_s"', "needs `compare`"),
        ('[[cells]]\nname = "a"\n[[cells]]\nname = "a"', "both called"),
    ],
)
def test_contradictions_are_refused_with_the_reason(change, says):
    found = errors_of(f'name = "p"\nmodel = "m"\nprompt = "x"\n{change}\n')
    assert any(re.search(says, error) for error in found), found


def test_a_plan_without_prompt_or_model_is_refused_and_an_unknown_flag_allowed_when_said():
    assert any("no prompt" in error for error in errors_of('model = "m"'))
    assert any("no model" in error for error in errors_of('prompt = "m"'))
    assert errors_of('model="m"\nprompt="x"\nallow_unknown_flags=true\nflags=["--from-a-fork","3"]') == ()
    assert errors_of('model="m"\nprompt="x"\nartifacts=["route"]\ntraced=true') == ()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name = ", "not TOML"),
        ("repeets = 3", "did you mean `repeats`"),
        ("repeats = 0", "above 0"),
        ('repeats = "3"', "int is wanted"),
        ("repeats = true", "int is wanted"),
        ('order = "interleave"', "did you mean interleaved"),
        ('artifacts = ["csv"]', "not one of metrics"),
        ("[watchdog]\nload = 3", "did you mean `load_s`"),
        ("[watchdog]\nload_s = nan", "finite"),
        ('[[gates]]\ngate = "cpu_temp_c"', "exactly one of"),
        ('[[gates]]\ngate = "cpu_temp_c"\nat_most = 1\npolicy = "wait"', "not one of skip"),
        ("[[cells]]\nflags = []", "needs a name"),
        ('[[cells]]\nname = "a/b"', "no slash"),
        ('[[cells]]\nname = "a"\nprompt = "x"\nturns = [{prompt = "y"}]', "both a prompt and turns"),
        ('[[cells]]\nname = "a"\nturns = [{n_predict = 3}]', "needs a prompt"),
        ('[[cells]]\nname = "a"\nturns = [{kind = "decide", prefix = "x"}]', "choices"),
        ('[[cells]]\nname = "a"\nturns = [{prompt = "x", cancel_after_s = 1, cancel_after_tokens = 1}]', "not both"),
        ('prompt = "a"\nprompts = ["b"]', "give one of them"),
        ("prompts = []", "empty"),
        ('prompt_file = "nowhere.txt"', "cannot be read"),
        ('[matrix]\n"cache-mb" = [1]', "with their dashes"),
        ('[matrix]\n"--cache-mb" = []', "list of values"),
        ('[matrix]\n"--cache-mb" = [1, 1]', "twice"),
        ("cells = [1]", "table is wanted"),
        ("flags = [true]", "words and numbers"),
    ],
)
def test_what_is_no_plan_says_where(text, says, tmp_path):
    with pytest.raises(UserError, match=says):
        parse_plan(text, "plan.toml", tmp_path)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
        max_leaves=12,
    ),
    st.sampled_from(
        ["name", "cells", "gates", "matrix", "turns", "question", "limits", "prompts", "flags", "sampling", "labels"]
    ),
)
@settings(max_examples=150, deadline=None)
def test_any_value_in_any_place_is_taken_or_refused_with_one_error(value, key):
    original = tomllib.loads
    try:
        module.tomllib.loads = lambda _text: {"model": "m", "prompt": "x", key: value}
        parsed = parse_plan("", "plan.toml", None)
        check(parsed, expand(parsed))
    except UserError:
        pass
    finally:
        module.tomllib.loads = original


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_plan_is_accepted_and_can_resolve_what_it_asks(name):
    document = read_plan(name)
    found = check(document, expand(document))
    assert found.errors == ()
    assert not any("cannot resolve" in warning or "fewer than 8" in warning for warning in found.warnings)
    assert shipped_text(name).startswith("# ")


def test_gates_are_asked_for_in_the_units_a_phone_reads_them_in():
    """One table for both sides: a phone refuses a gate in a unit of another."""
    text = GOOD + "".join(f'[[gates]]\ngate = "{name}"\nequals = 1\n' for name in GATES)
    assert [(gate.gate, gate.unit) for gate in plan_of(text)[1].cells[0].gates] == [
        (name, kind.unit) for name, kind in GATES.items()
    ]


def test_every_key_and_every_gate_is_in_the_readers_page():
    from importlib import resources

    page = (resources.files("bmoe_collector.plans") / "README.md").read_text("utf-8")
    words = set(re.findall(r"`\[*([a-z_]+)\]*[`. =]", page))
    tables = (module._TOP, module._CELL, module._TURN, module._GATE, module._WATCHDOG, module._LIMITS, module._SAMPLING)
    keys = {key for table in (*tables, module._PREPARE, module._QUESTION) for key in table}
    assert keys - words == set()
    assert {*GATES, *module.ORDERS, *module.ARTIFACTS} - words == set()


def test_the_starting_plan_is_accepted():
    from importlib import resources

    text = (resources.files("bmoe_collector.plans") / "start.toml").read_text("utf-8")
    assert errors_of(text) == ()


def test_few_pairs_and_listed_order_are_said():
    warnings = check(*plan_of(GOOD.replace("repeats = 6", "repeats = 4"))).warnings
    assert any("cannot resolve any difference" in warning for warning in warnings)
    warnings = check(*plan_of(GOOD.replace("interleaved", "listed"))).warnings
    assert any("order and setting" in warning for warning in warnings)
    community = read_plan("community")
    assert check(community, expand(community)).warnings == ()  # the same thing twice has no setting


def test_a_phone_is_asked_for_engine_model_flags_and_gates():
    text = (
        GOOD
        + '\n[watchdog]\nmax_cpu_temp_c = 90\n[limits]\nmin_battery_pct = 20\n[[gates]]\ngate = "cpu_temp_c"\nat_most = 45\npolicy = "abort"\n[[gates]]\ngate = "screen"\nequals = 0\n'
    )
    phone = pb.StatusReply(
        device=pb.DeviceFacts(name="pixel"),
        engines=["bmoe"],
        models=["other.gguf"],
        unreadable={"cpu_temp_c": "permission denied", "screen": "only a host can tell", "battery_pct": "no app"},
        engine_facts=[pb.EngineFacts(name="bmoe", help_text="--moe-stream\n--cache-mb N\n")],
    )
    found = check(*plan_of(text), phone)
    assert any("no model `m.gguf`" in error for error in found.errors)
    assert any("does not know --overlap" in error for error in found.errors)
    assert not any("--cache-mb" in error for error in found.errors)
    assert any("cpu_temp_c cannot be read" in error for error in found.errors)
    assert any("screen cannot be read" in warning for warning in found.warnings)
    assert "pixel: watchdog: max_cpu_temp_c cannot be watched there: permission denied" in found.warnings
    assert "pixel: limits: min_battery_pct cannot be watched there: no app" in found.warnings


def test_time_is_estimated_from_what_was_seen_and_unknown_without():
    _, plan = plan_of(GOOD)
    from bmoe_collector.plans.check import estimate

    assert estimate(plan, {}) == (None, "no earlier run of m.gguf is stored")
    seconds, _ = estimate(plan, {"m.gguf": {"tok_s": 10.0, "load_s": 5.0, "prefill_s": 2.0}})
    assert seconds == pytest.approx(24 * (5 + 2 + 25.6 + 20))


def test_a_later_flag_stands_for_an_earlier_one():
    assert merged(["--cache-mb", "1", "--overlap", "-t", "4", "--threads", "8"]) == [
        "--cache-mb",
        "1",
        "--overlap",
        "--threads",
        "8",
    ]


def test_tokens_asked_among_the_flags_are_the_cells_own_where_a_cell_can_hold_them():
    assert split_n_predict(["-n", "7", "--overlap", "--n-predict", "9"]) == (["--overlap"], 9)
    for other in ("0", "-1", "²", str(1 << 31), "9" * 5000, "many"):
        assert split_n_predict(["-n", other, "--overlap"]) == (["-n", other, "--overlap"], None)


def test_load_plan_refuses_with_every_reason(tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text('model="m"\nflags=["--mtp","--ngram","--nonsense"]\n')
    with pytest.raises(UserError) as caught:
        load_plan(path)
    assert "no prompt" in str(caught.value)
    assert "--nonsense" in str(caught.value)
