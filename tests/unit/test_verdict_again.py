"""The plan that runs contaminated cells again is one the plan reader takes, with the cells as they were asked."""

from __future__ import annotations

import tomllib

import pytest
from bmoe_collector.plans.document import parse_plan
from bmoe_collector.plans.expand import expand
from bmoe_collector.verdicts.again import plan_again
from hypothesis import given, settings
from hypothesis import strategies as st

TEXT = """
name = "night"
engine = "bmoe-0.23"
model = "qwen.gguf"
prompt = "hello"
repeats = 3
[matrix]
"--cache-mb" = [1000, 2000]
[[gates]]
gate = "cpu_temp_c"
at_most = 45
timeout_s = 600
policy = "run-flagged"
[watchdog]
total_s = 900
[limits]
min_battery_pct = 20
"""


def asked(number: int, name="cache-mb=1000", **more):
    cell = {"name": name, "model": "qwen.gguf", "flags": ["--moe-stream", "--cache-mb", "1000"], "n_predict": 256,
            "artifacts": ["metrics"], "labels": {"why": '50 % "quoted"\x7f'}, **more}  # fmt: skip
    return {
        "run_id": f"{number:032x}",
        "plan_id": "p",
        "plan_name": "night",
        "cell": name,
        "asked": cell,
        "prompt": b"hello",
    }


def test_cells_come_from_the_record_and_the_rest_from_their_plan():
    text = plan_again([asked(1), asked(2), asked(3, "other")], {"p": TEXT}, {f"{1:032x}": "slow\nand hot"})
    plan = expand(parse_plan(text, "again.toml", None))
    assert [cell.name for cell in plan.cells].count("cache-mb=1000") == 2
    assert [cell.name for cell in plan.cells].count("other") == 1
    first = plan.cells[0]
    assert first.prompt == b"hello"
    assert list(first.flags) == ["--moe-stream", "--cache-mb", "1000"]
    assert first.n_predict == 256
    assert first.gates[0].gate == "cpu_temp_c"
    assert first.watchdog.total_s == 900
    assert first.labels["why"] == '50 % "quoted"\x7f'
    assert plan.limits.min_battery_pct == 20
    assert plan.order == "interleaved"
    assert not plan.question_json
    assert "# slow and hot" in text


def test_cells_of_several_plans_keep_what_each_plan_asked():
    other = 'name = "day"\nmodel = "qwen.gguf"\nprompt = "hello"\n[watchdog]\ntotal_s = 60\n'
    runs = [
        asked(1),
        asked(2, "second"),
        {**asked(3, "plain"), "plan_id": "q", "plan_name": "day"},
        {**asked(4, "alone"), "plan_id": None},
    ]
    runs[0]["asked"]["engine"] = "bmoe-0.23"
    plan = expand(parse_plan(plan_again(runs, {"p": TEXT, "q": other}, {}), "again.toml", None))
    cells = {cell.name: cell for cell in plan.cells}
    assert {name: cell.engine for name, cell in cells.items()} == {
        "cache-mb=1000": "bmoe-0.23", "second": "bmoe-0.23", "plain": "", "alone": "",
    }  # fmt: skip
    assert {name: [gate.gate for gate in cell.gates] for name, cell in cells.items()} == {
        "cache-mb=1000": ["cpu_temp_c"], "second": ["cpu_temp_c"], "plain": [], "alone": [],
    }  # fmt: skip
    assert (cells["second"].watchdog.total_s, cells["plain"].watchdog.total_s) == (900, 60)
    assert plan.limits.min_battery_pct == 20


def test_a_sessions_turns_keep_their_gaps():
    turns = [
        {"kind": "generate", "prompt": "one", "n_predict": 20},
        {"kind": "generate", "prompt": "zwei ö", "idle_before_ms": 2500},
    ]
    text = plan_again([asked(1, turns=turns)], {}, {})
    cell = expand(parse_plan(text, "again.toml", None)).cells[0]
    assert [turn.prompt for turn in cell.turns] == ["one", "zwei ö"]
    assert cell.turns[1].idle_before_ms == 2500


def test_a_run_without_a_plan_becomes_a_cell_from_its_argv():
    argv = [
        "bmoe-cli",
        "-m",
        "/sdcard/a b.gguf",
        "-p",
        "--load-all",
        "-n",
        "300",
        "--overlap",
        "--csv",
        "/tmp/m.csv",
        "--temp",
        "0.5",
    ]
    text = plan_again([{"run_id": "1" * 32, "source": "import", "argv": argv}], {}, {})
    cell = tomllib.loads(text)["cells"][0]
    assert (cell["model"], cell["prompt"], cell["n_predict"]) == ("a b.gguf", "--load-all", 300)
    assert cell["flags"] == ["--overlap", "--temp", "0.5"]
    assert cell["artifacts"] == ["metrics"]


def test_what_cannot_be_run_again_says_why():
    with pytest.raises(ValueError, match="nothing to run again"):
        plan_again([], {}, {})
    with pytest.raises(ValueError, match="does not tell its argv"):
        plan_again([{"run_id": "1" * 32, "source": "import", "argv": None}], {}, {})
    with pytest.raises(ValueError, match="session"):
        plan_again([{"run_id": "1" * 32, "source": "import", "argv": ["bmoe-cli", "--session"]}], {}, {})


@settings(max_examples=80, deadline=None)
@given(st.text(max_size=40), st.text(max_size=20))
def test_any_prompt_and_label_survives_the_file(prompt, label):
    prompt = prompt.encode("utf-8", "replace").decode()
    label = label.encode("utf-8", "replace").decode()
    run = asked(1, labels={label: prompt})
    run["prompt"] = prompt.encode()
    cell = tomllib.loads(plan_again([run], {}, {"0": prompt}))["cells"][0]
    assert cell.get("prompt", "") == prompt
    assert cell["labels"] == {label: prompt}


def test_a_cells_own_conditions_come_along() -> None:
    text = TEXT + '[[cells]]\nname = "own"\ngates = [{ gate = "screen", equals = 0 }]\nwatchdog = { total_s = 5 }\n'
    again = plan_again([asked(1), asked(2, "own #2")], {"p": text}, {})
    first, second = expand(parse_plan(again, "again.toml", None)).cells[:2]
    assert ([gate.gate for gate in first.gates], first.watchdog.total_s) == (["cpu_temp_c"], 900)
    assert ([gate.gate for gate in second.gates], second.watchdog.total_s) == (["screen"], 5)
