"""Which comparisons are refused and with which words, and what an answer says."""

from __future__ import annotations

import json
import math
import random

import pytest
from bmoe_collector.common import UserError
from bmoe_collector.compare.answer import compare
from bmoe_collector.compare.question import corrected, keep_rule, read_question
from bmoe_collector.compare.sandwich import blocks_of, compare_by, sandwiches
from bmoe_collector.compare.sides import ComparedRun, Side
from bmoe_collector.compare.statistics import paired

RATES = [10.0, 10.2, 9.9, 10.1, 10.05, 9.95, 10.15, 9.85]


def run(at, tok_s=10.0, *, codes=(), severity="info", plan=None, block=None, facts=None, start=None, **row):
    facts = {
        "tok_s": tok_s,
        "n_tokens": 256,
        "text_sha256": "t",
        "overlap": False,
        "stall_meaning": "union of intervals",
        "read_bytes": 1000,
        "cache_hit_pct": 80.0,
        "n_expert_used": 8,
        **(facts or {}),
    }
    base = {
        "run_id": f"{at:032x}",
        "outcome": "ok",
        "cause": None,
        "simulated": False,
        "agent_uuid": "p",
        "engine_version": "0.24.0",
        "model_name": "m.gguf",
        "model_identity": "i",
        "prompt_sha256": "q",
        "plan_id": plan,
        "block": block,
        "session": False,
        "unmeasured": False,
        "n_tokens": 256,
        "boot_id": "b",
        "started_wall_ns": (at if start is None else start) * 1_000_000_000,
    }
    return ComparedRun({**base, **row}, facts, [(code, severity, "because") for code in codes])


def sides(factor=1.0, n=8, **options):
    a = [run(2 * at, RATES[at], plan="p", block=at, **options) for at in range(n)]
    b = [run(2 * at + 1, RATES[at] * factor * (1 + 0.003 * at), plan="p", block=at, **options) for at in range(n)]
    return Side("A", tuple(a)), Side("B", tuple(b))


def no_tokens(_run_id):
    return []


def changed(side, **row):
    """The side with one field of every run changed; `facts` and `codes` merge."""
    facts, codes, severity = row.pop("facts", {}), row.pop("codes", ()), row.pop("severity", "info")
    runs = tuple(
        ComparedRun(
            {**one.run, **row}, {**one.facts, **facts}, [*one.verdicts, *((code, severity, "why") for code in codes)]
        )
        for one in side.runs
    )
    return Side(side.text, runs, side.named)


def test_a_plain_difference_is_resolved_paired_and_says_which_way():
    answer = compare(*sides(1.2), no_tokens)
    assert answer.comparable
    assert (answer.design, answer.n) == ("paired", (8, 8))
    assert answer.metrics[0].metric == "tok_s"
    assert answer.metrics[0].resolved
    assert answer.metrics[0].low > 1.1
    assert "better" in answer.verdict
    assert answer.label == "exploration"
    json.dumps(answer.to_json(), allow_nan=False)


def test_equal_counters_are_equal_to_the_last_digit_and_others_are_not():
    a, b = sides()
    b = changed(b, facts={"read_bytes": 1001})
    counters = {row["counter"]: row for row in compare(a, b, no_tokens).counters}
    assert counters["cache_hit_pct"]["equal"] is True
    assert (counters["read_bytes"]["a"], counters["read_bytes"]["b"], counters["read_bytes"]["equal"]) == (
        1000,
        1001,
        False,
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"codes": ["not_streaming"]}, "mmap"),
        ({"codes": ["speculative"]}, "speculative"),
        ({"codes": ["lossy"]}, "lossy"),
        ({"codes": ["stochastic"]}, "temperature"),
        ({"model_identity": "other"}, "different model files"),
        ({"prompt_sha256": "other"}, "different prompts"),
        ({"n_tokens": 128}, "different token counts"),
        ({"facts": {"drop_rate": 0.1}}, None),
        ({"session": True}, "session"),
        ({"codes": ["instrumented"], "severity": "fail"}, "none of its 8 runs"),
        ({"outcome": "partial"}, "none of its 8 runs"),
    ],
)
def test_each_rule_refuses_what_it_is_for_and_force_answers_all_the_same(change, words):
    a, b = sides()
    other = changed(b, **change)
    if words is None:
        a = changed(a, facts={"drop_rate": 0.02})
        words = "different drop rates"
    answer = compare(a, other, no_tokens)
    assert answer.comparable is False
    assert answer.answered is False
    assert answer.metrics == ()
    assert any(words in reason for reason in answer.reasons), answer.reasons
    forced = compare(a, other, no_tokens, force=True)
    assert forced.answered
    assert forced.comparable is False or change.get("severity") == "fail" or "outcome" in change


def test_two_draft_sources_are_not_one_kind_and_neither_is_a_run_beside_itself():
    a, b = (
        changed(side, codes=["speculative"], facts={"spec": spec})
        for side, spec in zip(sides(), ("mtp", "ngram"), strict=True)
    )
    assert compare(a, b, no_tokens).reasons == ("different draft sources: mtp, ngram",)
    one, other = sides()
    shared = compare(one, Side("B", (*other.runs, one.runs[0])), no_tokens)
    assert "both sides have a run in common" in shared.reasons


def test_models_without_an_identity_are_told_apart_by_name_and_size():
    a, b = (changed(side, model_identity=None, model_size=5) for side in sides())
    assert compare(a, b, no_tokens).comparable
    assert compare(changed(a, model_name="/x/m.gguf"), b, no_tokens).comparable
    assert "different models: m.gguf, n.gguf" in compare(a, changed(b, model_name="n.gguf"), no_tokens).reasons
    assert "model files of different size: 5, 6" in compare(a, changed(b, model_size=6), no_tokens).reasons


def test_other_phones_days_and_boots_are_told():
    a, b = sides()
    assert compare(a, b, no_tokens).notes == ()
    assert "the runs are from more than one phone" in compare(a, changed(b, agent_uuid="q"), no_tokens).notes
    for other in ({"boot_id": "c"}, {"started_wall_ns": 3 * 86_400 * 10**9}):
        late = Side("B", (*b.runs[:-1], *changed(Side("", b.runs[-1:]), **other).runs))
        assert any("more than one day or boot" in note for note in compare(a, late, no_tokens).notes)


def test_stall_of_another_meaning_is_refused_only_where_reads_overlap():
    a, b = sides()
    old = changed(b, facts={"stall_meaning": "per-thread mean"}, engine_version="0.19.0")
    assert compare(a, old, no_tokens).comparable
    a, old = changed(a, facts={"overlap": True}), changed(old, facts={"overlap": True})
    assert "stall_ms" in compare(a, old, no_tokens).reasons[0]
    unknown = changed(old, facts={"stall_meaning": None}, engine_version="0.21.0")
    assert "not known" in compare(a, unknown, no_tokens).reasons[0]


def test_terms_of_a_stall_nobody_can_explain_compare_with_nothing_while_speed_does():
    terms = {"overlap": True, "stall_meaning": None, "stall_s_tok": 0.02, "bar_flash_s_tok": 0.02, "io_s_tok": 0.1}
    a, b = (changed(side, facts=terms, engine_version="0.21.0") for side in sides(1.2))
    answer = compare(a, b, no_tokens)
    rows = {row.metric: row for row in answer.metrics}
    assert answer.comparable
    assert rows["tok_s"].resolved
    assert rows["io_s_tok"].ratio == pytest.approx(1.0)
    assert rows["stall_s_tok"].ratio is rows["bar_flash_s_tok"].ratio is None
    assert "compares with nothing" in rows["stall_s_tok"].why
    same = compare(changed(a, engine_sha256="e"), changed(b, engine_sha256="e"), no_tokens)
    assert next(row for row in same.metrics if row.metric == "stall_s_tok").ratio == pytest.approx(1.0)


def test_another_top_k_is_another_computation_even_where_nobody_knows_the_models_own():
    a, b = sides()
    answer = compare(a, changed(b, facts={"n_expert_used": 6}), no_tokens)
    assert answer.reasons == ("different top-k: 6, 8 (at most one of them is the model's own)",)


def test_warnings_of_the_runs_that_were_used_are_told():
    a, b = sides()
    hot = changed(Side("", b.runs[:2]), codes=["throttled_entry"], severity="warn").runs
    answer = compare(a, Side("B", (*hot, *b.runs[2:])), no_tokens)
    assert "B: throttled_entry in 2 of 8 runs: why" in answer.notes
    assert not any(note.startswith("A:") for note in answer.notes)


def test_settings_that_differ_between_the_sides_are_told():
    a, b = (
        changed(side, facts={"cache_mb": size, "threads": 4, "dense_weights": None})
        for side, size in zip(sides(), (2000.0, 4000.0), strict=True)
    )
    crept = changed(b, facts={"overlap": True, "engine": "0.24.0"})
    assert compare(a, b, no_tokens).notes == ("settings that differ: cache_mb 2000 in A, 4000 in B",)
    assert (
        "settings that differ: overlap 0 in A, 1 in B; cache_mb 2000 in A, 4000 in B"
        in compare(a, crept, no_tokens).notes
    )
    auto = [changed(side, facts={"cache_auto": True}) for side in (a, b)]
    assert compare(*auto, no_tokens).notes == ()


def test_a_prompt_that_is_not_recorded_is_said_so():
    a, b = sides()
    assert not any("prompt" in note for note in compare(a, b, no_tokens).notes)
    blind = compare(a, changed(b, prompt_sha256=None), no_tokens)
    assert blind.comparable
    assert any("the prompt of 8 of 16 runs is not recorded" in note for note in blind.notes)


def test_pairs_are_of_one_phone_where_a_plan_ran_on_several():
    one, other = sides(), sides(1.2)
    a = Side("A", (*one[0].runs, *changed(other[0], agent_uuid="q").runs))
    b = Side("B", (*one[1].runs, *changed(other[1], agent_uuid="q").runs))
    assert compare(a, b, no_tokens).n == (16, 16)


def test_a_term_that_is_zero_in_some_run_has_its_row_and_the_reason():
    a, b = sides()
    none = changed(Side("", b.runs[:1]), facts={"bar_mgmt_s_tok": 0.0}).runs
    a, b = changed(a, facts={"bar_mgmt_s_tok": 0.1}), changed(Side("B", b.runs[1:]), facts={"bar_mgmt_s_tok": 0.1})
    answer = compare(a, Side("B", (*none, *b.runs)), no_tokens)
    row = next(row for row in answer.metrics if row.metric == "bar_mgmt_s_tok")
    assert row.ratio is None
    assert "zero in a run of B" in row.why


def test_a_simulated_run_is_never_compared_with_a_real_one_not_even_by_force():
    a, b = sides()
    answer = compare(a, changed(b, simulated=True), no_tokens, force=True)
    assert answer.answered is False
    assert "simulated" in answer.verdict


def test_a_traced_run_among_others_is_left_out_aloud_and_named_alone_refused():
    a, b = sides()
    traced = changed(Side("", b.runs[:1]), codes=["instrumented"], severity="fail").runs
    mixed = Side("where:x", (*traced, *b.runs[1:]))
    answer = compare(a, mixed, no_tokens)
    assert answer.comparable
    assert answer.n == (7, 7)
    assert any("instrumented" in note for note in answer.notes)
    named = compare(a, Side("ids", (*traced, *b.runs[1:]), named=True), no_tokens)
    assert named.comparable is False


def listed(drifting):
    values = (
        [10 * 0.97**at for at in range(12)]
        if drifting
        else [RATES[at % 8] for at in (3, 0, 5, 2, 7, 1, 4, 6, 0, 5, 3, 2)]
    )
    runs = [run(at, value, plan="p", block=None) for at, value in enumerate(values)]
    return Side("A", tuple(runs[:6])), Side("B", tuple(runs[6:]))


def test_listed_order_is_flagged_and_under_visible_drift_refused():
    flagged = compare(*listed(drifting=False), no_tokens)
    assert flagged.comparable
    assert any("order and setting cannot be told apart" in note for note in flagged.notes)
    refused = compare(*listed(drifting=True), no_tokens)
    assert refused.comparable is False
    assert "drifting" in refused.reasons[0]


def test_too_few_runs_cannot_resolve_and_say_how_many_would():
    answer = compare(*sides(1.5, n=3), no_tokens)
    assert answer.metrics[0].resolved is False
    assert answer.verdict.startswith("cannot resolve")
    assert answer.metrics[0].runs_needed >= 6


def test_too_few_runs_give_an_interval_within_them_marked_as_such():
    a, b = sides(1.25, n=3)
    fast = {run.run_id for run in b.runs}
    answer = compare(a, b, lambda run_id: [80.0, 81.0, 79.0] * 20 if run_id in fast else [100.0, 101.0, 99.0] * 20)
    within = answer.to_json()["within_run"]
    assert within["low"] < 1.25 < within["high"]
    assert "no replicates" in within["method"]
    assert "within these runs" in answer.verdict
    enough = compare(*sides(1.25), lambda _run_id: [100.0] * 60)
    assert "within_run" not in enough.to_json()


def test_an_unresolved_effect_says_how_many_more_it_would_take():
    a, _ = sides(1.0, n=7)
    noisy = Side(
        "B", tuple(run(2 * at + 1, RATES[at] * (1.05 if at % 2 else 0.97), plan="p", block=at) for at in range(7))
    )
    answer = compare(a, noisy, no_tokens, wanted=0.03)
    needed = answer.metrics[0].runs_needed
    assert not answer.metrics[0].resolved
    assert f"about {needed} pairs would resolve it, {needed - 7} more" in answer.verdict


def test_one_run_a_side_has_an_interval_within_the_run_and_never_a_resolved_effect():
    a = Side("A", (run(0, 10.0),), named=True)
    b = Side("B", (run(1, 12.5),), named=True)
    answer = compare(
        a, b, lambda run_id: [100.0, 101.0, 99.0] * 40 if run_id == a.runs[0].run_id else [80.0, 81.0, 79.0] * 40
    )
    assert answer.design == "within-run"
    assert answer.n == (1, 1)
    metric = answer.metrics[0]
    assert metric.ratio == pytest.approx(1.25)
    assert metric.low < 1.25 < metric.high
    assert metric.resolved is False
    assert "cannot resolve" in answer.verdict


def test_texts_that_should_be_equal_and_are_not_are_said_so():
    a, b = sides()
    assert compare(a, b, no_tokens).texts_equal is True
    answer = compare(a, changed(b, facts={"text_sha256": "u"}), no_tokens)
    assert answer.texts_equal is False
    assert any("same greedy text" in note for note in answer.notes)
    sampled = compare(changed(a, codes=["stochastic"]), changed(b, codes=["stochastic"]), no_tokens)
    assert sampled.texts_equal is None


def test_the_sentence_is_about_the_metric_that_was_asked_for():
    a, b = (changed(side, facts={"ttft_s": 5.0 if at else 2.0}) for at, side in enumerate(sides(1.2)))
    answer = compare(a, b, no_tokens, primary="ttft_s", label="as asked")
    assert [row.metric for row in answer.metrics[:2]] == ["tok_s", "ttft_s"]
    assert answer.verdict.startswith("resolved (worse): ttft_s of B is +150.0%")
    assert answer.to_json()["primary"] == "ttft_s"
    one = compare(*(Side(side.text, side.runs[:1]) for side in (a, b)), no_tokens, primary="ttft_s")
    assert "ttft_s of B is +150.0%" in one.verdict
    assert "cannot resolve" in one.verdict
    blind = compare(a, b, no_tokens, primary="acceptance")
    assert blind.verdict == "cannot say: acceptance is unmeasured or zero in a run of A"


def test_terms_that_move_together_are_not_corrected_for_as_if_they_were_apart():
    a, b = sides(1.2, n=6)
    terms = ("bar_cpu_s_tok", "bar_flash_s_tok", "io_s_tok", "cpu_s_tok", "read_mib_tok", "loop_overhead_s_tok")
    spread = [
        Side(
            side.text,
            tuple(
                changed(Side("", (one,)), facts=dict.fromkeys(terms, 1 / one.facts["tok_s"])).runs[0]
                for one in side.runs
            ),
        )
        for side in (a, b)
    ]
    rows = {row.metric: row for row in compare(*spread, no_tokens).metrics}
    assert all(rows[term].p == pytest.approx(2 / 64) and rows[term].resolved for term in terms)


def test_keep_rules_leave_runs_out_with_the_rule_that_did():
    question = read_question({"compare": [["A", "B"]], "keep": ["read_bytes >= 1000 and verdict != foreign_load"]})
    a, b = sides()
    foreign = changed(Side("", b.runs[:1]), codes=["foreign_load"], severity="warn").runs
    answer = compare(a, Side("B", (*foreign, *b.runs[1:])), no_tokens, keep=keep_rule(question), label="as asked")
    assert answer.n == (7, 7)
    assert any("keep rule" in note for note in answer.notes)
    assert answer.label == "as asked"


@pytest.mark.parametrize(
    "table", [{"compare": ["A"]}, {"compare": [["A", "B", "C"]]}, {"keep": ["nonsense >"]}, {"keep": ["no_such=1"]}]
)
def test_a_question_that_cannot_be_read_says_what_is_wrong(table):
    with pytest.raises(UserError):
        read_question(table)


def test_a_matrix_is_corrected_for_its_size():
    answers = corrected([compare(*sides(factor), no_tokens) for factor in (1.2, 1.0, 1.01)])
    assert [answer.extra["comparisons"] for answer in answers] == [3, 3, 3]
    assert answers[0].extra["p_corrected"] >= answers[0].metrics[0].p


def alternating(factor, blocks=14, length=24):
    arms, costs = [], []
    for block in range(blocks):
        for token in range(length):
            arms.append("ab"[block % 2])
            carry = 2.0 if token < 6 and block else 1.0
            costs.append(100.0 * (1 + 0.01 * block) * carry * (factor if block % 2 else 1.0) + (token % 3) * 0.1)
    return arms, costs


def test_sandwiches_see_the_setting_through_drift_and_carry_over():
    arms, costs = alternating(0.8)
    result = compare_by({"arm": arms}, "arm", costs, cold=0, carry=8)
    pair = result["pairs"][0]
    assert (pair["a"], pair["b"]) == ("a", "b")
    assert pair["ratio"] == pytest.approx(1.25, rel=0.01)
    assert pair["resolved"] is True
    without_carry = next(row for row in pair["at_other_windows"] if row["carry"] == 0)
    assert without_carry["ratio"] != pytest.approx(pair["ratio"], rel=1e-6)
    json.dumps(result, allow_nan=False)


def test_neighbouring_sandwiches_share_a_block_and_the_error_knows_it():
    noise = random.Random(5)
    arms = ["ab"[at // 12 % 2] for at in range(492)]
    levels = [noise.gauss(0, 0.02) for _ in range(41)]
    costs = [100 * math.exp(levels[at // 12]) for at in range(492)]
    pair = compare_by({"arm": arms}, "arm", costs, cold=0, carry=0)["pairs"][0]
    around, own, shared = sandwiches(blocks_of(arms, costs, 0, 0), "a", "b")
    assert (len(own), shared) == (20, 19)
    as_if_apart = paired(own, around)
    widths = [
        math.log(one) - math.log(other)
        for one, other in ((pair["high"], pair["low"]), (as_if_apart.high, as_if_apart.low))
    ]
    assert widths[0] == pytest.approx(widths[1] * math.sqrt(1 + 2 / 6 * 19 / 20))
    assert pair["p"] > as_if_apart.p


@pytest.mark.parametrize(
    ("columns", "column"), [({"arm": ["a"] * 9}, "arm"), ({"arm": ["a"] * 9}, "other"), ({"x": list(range(99))}, "x")]
)
def test_a_column_that_is_no_setting_is_refused(columns, column):
    with pytest.raises(UserError):
        compare_by(columns, column, [1.0] * len(next(iter(columns.values()))))
