"""Derived numbers against values worked out by hand from the contract's formulas."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from bmoe_collector.meaning import FACTS, derive, facts
from bmoe_collector.meaning.argv import flags_of
from bmoe_collector.meaning.groups import groups
from bmoe_collector.meaning.numbers import distribution, quantile
from bmoe_collector.meaning.semantics import STALL_MEAN, STALL_UNION, default_cache_mb, stall_meaning, version_of
from bmoe_collector.meaning.steady import steady_state
from bmoe_collector.record import ReportLine, Rows, RunRecord
from hypothesis import given, settings
from hypothesis import strategies as st
from support.run_records import ARGV, MIB, TOKENS, clean, rows, run, sample, summary, turn, with_argv, with_preamble


def test_headline_is_the_engines_and_the_effective_rate_adds_what_lies_between_decodes():
    speed = derive(clean()).speed
    assert speed.tok_s == 10.0
    assert speed.source == "engine"
    assert speed.s_tok == pytest.approx(0.1)
    assert speed.effective_tok_s == pytest.approx(1 / (1 / 10.0 + 0.005))


def test_without_an_end_record_the_rows_give_the_rate():
    record = clean(turns=(turn(tokens=None, summary={}),), csv=rows(100, wall_ms=[50.0] * 50 + [150.0] * 50))
    derived = derive(record)
    assert derived.speed.tok_s == pytest.approx(10.0)
    assert derived.speed.source == "rows"
    assert derived.speed.loop_overhead_s_tok == pytest.approx(0.005)
    assert derived.tokens == 100


def test_time_to_first_token_of_a_one_shot_holds_the_load_and_of_a_session_turn_does_not():
    assert facts(clean())["ttft_s"] == pytest.approx(5.0)
    session = clean(run=run(argv=["bmoe-cli", "--session", "-m", "x"]), ready={"load_s": 3.0, "think_ctl": "template"})
    found = facts(session)
    assert found["ttft_s"] == pytest.approx(2.0)
    assert found["load_s"] == pytest.approx(3.0)


def test_a_one_shots_report_stands_where_there_is_no_trailer():
    report = (
        ReportLine("generation", {"tokens": 48, "s_tok": 0.001, "tok_s": 833.68}, "generation: ..."),
        ReportLine("prefill", {"n_prompt": 55, "prefill_s": 0.007, "load_s": 0.008, "ttft_s": 0.015}, "prefill: ..."),
        ReportLine("moe-cache", {"cache_hit_pct": 35.8, "cache_resident_mib": 3.9}, "moe-cache: ..."),
        ReportLine("moe-cache", {"evictions": 210, "rereads": 199}, "moe-cache: ..."),
    )
    found = facts(RunRecord(run=run(), turns=(turn(tokens=48, summary={}),), report=report))
    assert (found["tok_s"], found["cache_hit_pct"], found["evictions"]) == (833.68, 35.8, 210)
    assert found["ttft_s"] == pytest.approx(0.015)
    assert found["n_tokens"] == 48


def test_four_bars_serial():
    bars = derive(clean()).bars
    assert bars.cpu_s == pytest.approx(0.12 / 4)
    assert bars.flash_s == pytest.approx(0.04)
    assert bars.mgmt_s == pytest.approx(0.01)
    assert bars.unattributed_s == pytest.approx(0.1 - 0.03 - 0.04 - 0.01)


def test_four_bars_overlap_take_the_stall_and_never_go_below_zero_or_get_rescaled():
    record = with_preamble(overlap=1)
    record = replace(record, csv=rows(io_ms=350.0, stall_ms=70.0, cpu_ms=390.0))
    bars = derive(record).bars
    assert bars.flash_s == pytest.approx(0.07)
    assert bars.unattributed_s == 0.0
    assert bars.cpu_s + bars.flash_s + bars.mgmt_s > bars.wall_s


def test_flash_wait_is_not_known_when_the_mode_is_not_known():
    record = RunRecord(run=run(argv=[]), csv=rows(io_ms=0.0, stall_ms=None))
    assert derive(record).config.overlap is None
    assert derive(record).bars.flash_s is None
    assert derive(record).bars.unattributed_s is None


def test_occupancy_and_cpu_busy_have_different_denominators():
    serial = derive(clean())
    assert serial.occupancy == serial.cpu_busy == pytest.approx(0.12 / (0.1 * 4))
    overlap = derive(with_preamble(overlap=1, io_threads=4))
    assert overlap.occupancy == pytest.approx(0.3)
    assert overlap.cpu_busy == pytest.approx(0.12 / (0.1 * 8))


def test_prefill_is_attributed_by_the_same_rules():
    bars = derive(clean()).turns[0].prefill_bars
    assert (bars.wall_s, bars.cpu_s, bars.flash_s) == (2.0, 1.0, 0.6)
    assert bars.unattributed_s == pytest.approx(2.0 - 1.0 - 0.6 - 0.1)
    old = {key: value for key, value in summary().items() if not key.startswith("prefill_") or key == "prefill_s"}
    assert derive(clean(turns=(turn(summary=old),))).turns[0].prefill_bars.flash_s is None


GROUP_WALL = [300.0, 0.0, 0.0, 100.0, 200.0, 0.0]


def test_a_speculative_group_costs_its_first_row_by_mtp_batch():
    table = rows(6, wall_ms=GROUP_WALL, mtp_batch=[3, 3, 3, 1, 2, 2])
    found = groups(table, speculative=True)
    assert [(group.tokens, group.token_ms) for group in found] == [(3, 100.0), (1, 100.0), (2, 100.0)]
    record = replace(with_preamble(spec="mtp"), csv=table, turns=(turn(tokens=6, summary={}),))
    derived = derive(record)
    assert derived.token_costs_ms == [100.0] * 6
    assert derived.speed.tok_s == pytest.approx(10.0)
    assert derived.speed.token_ms.min == 100.0


def test_groups_on_stdout_are_a_row_and_the_zeros_after_it():
    table = rows(6, wall_ms=GROUP_WALL, mtp_batch=None)
    assert [group.tokens for group in groups(table, speculative=True)] == [3, 1, 2]
    assert len(groups(table, speculative=False)) == 6


def test_a_group_whose_charged_row_is_lost_is_not_free():
    table = rows(3, wall_ms=[0.0, 0.0, 120.0], mtp_batch=[3, 3, 1])
    found = groups(table, speculative=True)
    assert found[0].token_ms is None
    assert found[-1].token_ms == 120.0


def test_acceptance_amortisation_coverage():
    end = summary(mtp_drafted=40, mtp_accepted=30, mtp_decodes=64, drafted_steps=16)
    record = replace(with_preamble(spec="ngram"), turns=(turn(summary=end),))
    drawn = derive(record).speculation
    assert (drawn.acceptance, drawn.amortisation, drawn.coverage) == (0.75, 4.0, 0.25)
    assert derive(clean()).speculation.amortisation is None


def test_hit_rate_goes_with_drop_and_substitution_rates():
    end = summary(experts_routed=1000, experts_dropped=125, experts_reranked=400, experts_substituted=100)
    record = replace(with_preamble(drop_cold_frac=0.5, substitute_lambda=1.0), turns=(turn(summary=end),))
    found = facts(record)
    assert (found["cache_hit_pct"], found["drop_rate"], found["substitution_rate"]) == (80.0, 0.125, 0.25)
    assert found["active_experts"] == pytest.approx(8 * 0.875)
    off = facts(clean())
    assert (off["drop_rate"], off["substitution_rate"], off["active_experts"]) == (0.0, 0.0, 8.0)
    unknown = facts(clean(preamble={"n_expert_used": 8}, run=run(argv=[])))
    assert unknown["drop_rate"] is None


def test_bytes_chosen_against_bytes_faulted_and_read_mb_is_no_read_bytes():
    found = facts(clean())
    assert found["read_bytes"] == TOKENS * 50 * MIB
    assert found["read_mib_tok"] == pytest.approx(50.0)
    assert found["faulted_mib_tok"] == pytest.approx(0.004)
    stdout = Rows({"turn": [0] * 3, "step": [1, 2, 3], "wall_ms": [1.0] * 3, "read_mb": [2.0, 4.0, 6.0]})
    only = facts(RunRecord(run=run(), stdout=stdout))
    assert only["read_bytes"] is None
    assert only["read_mib_tok"] == pytest.approx(4.0)


def test_a_zero_of_a_platform_that_cannot_report_is_unmeasured_for_the_whole_run_and_by_group():
    blind = clean(
        csv=rows(cpu_ms=0.0, majflt=0, majflt_mib=0.0, rss_mib=0.0, rss_anon_mib=0.0, rss_file_mib=0.0, swap_mib=0.0),
        turns=(turn(summary=summary(cpu_s_tok=0.0, majflt_tok=0.0, prefill_cpu_s=0.0)),),
        samples=(),
    )
    derived = derive(blind)
    assert derived.unmeasured == ("cpu", "process memory")
    found = facts(blind)
    assert found["cpu_s_tok"] is found["majflt_tok"] is found["rss_peak_mib"] is found["occupancy"] is None
    assert found["bar_cpu_s_tok"] is None
    assert found["mem_available_min_mib"] == 3000.0
    assert derived.turns[0].prefill_bars.cpu_s is None


def test_a_true_zero_stays_zero():
    found = facts(clean(csv=rows(majflt=0, majflt_mib=0.0, swap_mib=0.0)))
    assert (found["majflt_tok"], found["faulted_mib_tok"], found["swap_peak_mib"]) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("text", "meaning", "cache"),
    [
        ("0.19.0", STALL_MEAN, 0),
        ("bmoe-cli 0.9.2 (android)", STALL_MEAN, 0),
        ("0.20.1", None, 0),
        ("0.22", None, 0),
        ("0.23.0", STALL_UNION, 0),
        ("0.24.0-sim", STALL_UNION, None),
        ("unknown", None, None),
        ("", None, None),
    ],
)
def test_semantics_follow_the_build(text, meaning, cache):
    version = version_of(text)
    assert stall_meaning(version) == meaning
    assert default_cache_mb(version) == cache


def test_files_that_do_not_name_their_engine_are_dated_by_their_layout():
    old = Rows({"turn": [0], "step": [1], "wall_ms": [1.0], "stall_ms": [0.5]})
    assert derive(RunRecord(run=run(argv=[], engine_version=None), csv=old)).stall_meaning == STALL_MEAN
    v1 = {"format": "bmoe_metrics v1", "threads": 4}
    assert derive(RunRecord(run=run(argv=[], engine_version=None), csv=rows(), preamble=v1)).stall_meaning == STALL_MEAN
    v2 = {"format": "bmoe_metrics v2", "threads": 4}
    assert derive(RunRecord(run=run(argv=[], engine_version=None), csv=rows(), preamble=v2)).stall_meaning is None


def test_left_out_cache_flag_means_zero_only_where_the_build_says_so():
    bare = ["bmoe-cli", "-m", "x", "--moe-stream"]
    old = RunRecord(run=run(argv=bare, engine_version="0.19.0"))
    new = RunRecord(run=run(argv=bare, engine_version="0.24.0"))
    assert derive(old).config.cache_mb == 0
    assert derive(new).config.cache_mb is None
    assert derive(replace(new, preamble={"cache_mb": 1800, "cache_auto": 1})).config.cache_mb == 1800


def test_the_preamble_is_believed_over_the_argv():
    config = derive(clean(preamble={**clean().preamble, "threads": 6, "cache_mb": 1777})).config
    assert (config.threads, config.cache_mb) == (6, 1777)


def test_a_prompt_cannot_pass_for_a_flag():
    flags = flags_of(["bmoe-cli", "-m", "x.gguf", "-p", "--load-all", "--overlap"])
    assert "--load-all" not in flags
    assert flags["--overlap"] is True
    assert flags_of([], {"BMOE_OVERLAP": "1", "BMOE_CACHE_MB": "auto"}) == {"--overlap": True, "--cache-mb": "auto"}
    assert "--overlap" not in flags_of([], {"BMOE_OVERLAP": "0"})


def test_session_rates_are_sums_over_turns_not_means_of_rates():
    fast, slow = summary(tokens=100, tok_s=20.0), summary(tokens=100, tok_s=5.0)
    record = clean(
        run=run(argv=[*ARGV, "--session"]),
        ready={"load_s": 1.0},
        turns=(turn(0, tokens=100, summary=fast), turn(1, tokens=100, summary=slow)),
        csv=Rows({}),
    )
    derived = derive(record)
    assert derived.speed.tok_s == pytest.approx(200 / (5 + 20))
    assert [meaning.speed.tok_s for meaning in derived.turns] == [20.0, 5.0]
    assert derived.tokens == 200


def test_decisions_and_rejected_requests_are_no_generations():
    record = clean(
        ready={"load_s": 1.0},
        turns=(
            turn(0),
            turn(1, tokens=None, text=b"", summary={}, decide={"best": 1}),
            turn(None, tokens=None, summary={}, error={"fatal": False, "msg": "too long"}),
        ),
    )
    assert len(derive(record).turns) == 1


def test_warm_up_is_found_where_there_is_one_and_only_there():
    noise = random.Random(7)
    steady = [100 + noise.gauss(0, 5) for _ in range(200)]
    head = [100 + 300 * math.exp(-at / 10) + noise.gauss(0, 5) for at in range(200)]
    flat = steady_state(groups(rows(200, wall_ms=steady), speculative=False))
    assert (flat.found, flat.warmup_tokens) == (True, 0)
    warm = steady_state(groups(rows(200, wall_ms=head), speculative=False))
    assert warm.found
    assert 15 <= warm.warmup_tokens <= 60
    assert warm.steady_tok_s == pytest.approx(10.0, rel=0.03)
    rising = steady_state(groups(rows(200, wall_ms=[float(at + 1) for at in range(200)]), speculative=False))
    assert not rising.found or rising.warmup_tokens == 0
    assert not steady_state(groups(rows(10), speculative=False)).found


def test_distribution_survives_nan_and_none():
    found = distribution([1.0, None, float("nan"), 3.0, float("inf"), 2.0])
    assert (found.n, found.mean, found.median, found.min, found.max) == (3, 2.0, 2.0, 1.0, 3.0)
    assert distribution([None, float("nan")]) is None


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(allow_nan=True, allow_infinity=True) | st.none(), max_size=40), st.floats(0, 1))
def test_quantiles_stay_inside_what_is_known(values, share):
    known = [value for value in values if value is not None and math.isfinite(value)]
    found = quantile(values, share)
    if not known:
        assert found is None
    else:
        assert min(known) <= found <= max(known)


def test_memory_curves_come_from_the_rows_and_else_from_the_samples():
    assert derive(clean()).curves["rss_anon_mib"].source == "metrics"
    record = clean(csv=Rows({}), samples=tuple(sample(at_s=at, rss_kib=at * 1024) for at in range(1, 5)))
    curve = derive(record).curves["rss_mib"]
    assert (curve.source, curve.values) == ("samples", (1.0, 2.0, 3.0, 4.0))


SIDECAR = {"peak_rss_kb": 4_194_304, "mem_avail_before_kb": 3_145_728, "mem_avail_floor_kb": 1_048_576,
           "mem_avail_after_kb": 2_097_152, "batt_temp_before_dC": 305, "batt_temp_after_dC": None,
           "cpu_temp_before_mC": 41500, "cpu_temp_max_mC": 78000}  # fmt: skip


def test_a_sidecar_stands_where_no_sample_and_no_row_does():
    found = facts(RunRecord(run=run(), sidecar=SIDECAR))
    assert (found["entry_cpu_temp_c"], found["cpu_temp_max_c"]) == (41.5, 78.0)
    assert (found["entry_mem_available_mib"], found["mem_available_min_mib"], found["rss_peak_mib"]) == (
        3072,
        1024,
        4096,
    )
    assert found["exit_cpu_temp_c"] is None
    state = derive(RunRecord(run=run(), sidecar=SIDECAR))
    assert (state.entry.battery_temp_c, state.exit.battery_temp_c) == (30.5, None)
    assert state.exit.mem_available_mib == 2048
    sampled = facts(clean(sidecar=SIDECAR))
    assert (sampled["entry_cpu_temp_c"], sampled["cpu_temp_max_c"], sampled["rss_peak_mib"]) == (35.0, 60.0, 4000.0)


def test_named_parts_and_the_prompts_own_reads_are_facts():
    end = summary(prefill_read_mib=812.5, prefill_dev_tokens=50, prefill_dev_read_mib=96.0, prefill_dev_stall_s=0.25)
    found = facts(clean(csv=rows(ra_issue_ms=2.0, ra_wd_ms=1.0), turns=(turn(summary=end),)))
    assert (found["ra_issue_s_tok"], found["ra_wd_s_tok"]) == pytest.approx((0.002, 0.001))
    assert (found["prefill_read_mib"], found["prefill_dev_stall_s"], found["prefill_dev_tokens"]) == (812.5, 0.25, 50)
    assert found["prefill_bar_unattributed_s"] == pytest.approx(2.0 - 1.0 - 0.6 - 0.1)
    assert facts(clean())["prefill_read_mib"] is None


def test_what_only_the_report_says_of_the_configuration():
    bare = run(argv=[], engine_version=None)
    lines = (
        ReportLine(
            "mode", {"moe_stream": 1, "cache": "1500 MiB", "cache_mb": 1500, "overlap": 0}, "mode: expert streaming"
        ),
        ReportLine("compute", {"threads": 6, "cpu_s_tok": 0.1}, "compute: ..."),
        ReportLine("moe-drop", {"experts_dropped": 25, "experts_routed": 100, "threshold": 0.8}, "moe-drop: ..."),
        ReportLine(
            "moe-route-ahead", {"route_ahead": 2, "ra_committed": 90, "ra_agree_pct": 94.0}, "moe-route-ahead: ..."
        ),
        ReportLine("moe-substitute", {"experts_substituted": 5, "experts_reranked": 50, "margin": 0.5}, "..."),
    )
    config = derive(RunRecord(run=bare, report=lines)).config
    assert (config.cache_mb, config.cache_auto, config.threads) == (1500, False, 6)
    assert (config.drop_cold_frac, config.route_ahead, config.substitute_lambda) == (0.8, 2, 0.5)
    for said, meant in (("auto", (None, True)), ("off", (0, False))):
        mode = ReportLine("mode", {"moe_stream": 1, "cache": said}, "mode: expert streaming")
        told = derive(RunRecord(run=bare, report=(mode,))).config
        assert (told.cache_mb, told.cache_auto) == meant


def test_text_hash_tells_the_turns_apart():
    one = derive(clean(turns=(turn(0, text=b"ab"), turn(1, text=b"c")))).text_sha256
    other = derive(clean(turns=(turn(0, text=b"a"), turn(1, text=b"bc")))).text_sha256
    assert one != other
    assert derive(clean(turns=(turn(text=b""),))).text_sha256 is None


def test_every_fact_is_documented_once_and_given_in_its_type():
    names = [fact.name for fact in FACTS]
    assert len(names) == len(set(names))
    kinds = {"float": float, "int": int, "str": str, "bool": bool}
    record = clean()
    for fact in FACTS:
        value = facts(record)[fact.name] if fact.name in {"tok_s", "read_bytes"} else None
        assert value is None or type(value) is kinds[fact.kind]
        assert fact.section
    found = facts(record)
    assert list(found) == names
    for fact in FACTS:
        assert found[fact.name] is None or type(found[fact.name]) is kinds[fact.kind], fact.name


def test_an_empty_record_has_no_numbers_and_no_errors():
    found = facts(RunRecord(run=run(argv=[], n_tokens=0)))
    assert found["tok_s"] is None
    assert found["n_tokens"] == 0
    assert {value for name, value in found.items() if name.startswith("bar_")} == {None}


def test_report_mode_line_tells_streaming_without_argv_or_preamble():
    streamed = ReportLine(
        "mode", {"moe_stream": 1, "overlap": 1}, "mode: expert streaming, cache auto, dense anon, overlap"
    )
    mapped = ReportLine("mode", {"moe_stream": 0}, "mode: mmap")
    bare = run(argv=[])
    assert derive(RunRecord(run=bare, report=(streamed,))).config.streaming is True
    assert derive(RunRecord(run=bare, report=(streamed,))).config.overlap is True
    assert derive(RunRecord(run=bare, report=(mapped,))).config.streaming is False


def test_old_alias_of_the_dense_policy():
    assert derive(replace(with_argv("--no-warm-dense"), preamble={})).config.dense_weights == "mmap"


def test_a_session_is_known_by_its_turns_where_there_is_only_the_csv():
    two = Rows({"turn": [0, 0, 1, 1], "step": [1, 2, 1, 2], "wall_ms": [10.0] * 4})
    ends = tuple(
        turn(at, tokens=2, text=b"", summary={"s_tok": 0.01, "load_s": 1.0, "prefill_s": 0.5}) for at in range(2)
    )
    record = RunRecord(run=run(argv=[]), csv=two, turns=ends)
    found = facts(record)
    assert found["session"] is True
    assert found["ttft_s"] == 0.5
    assert found["tok_s"] == pytest.approx(100.0)


def test_session_counters_since_the_load_are_not_added_up():
    rising = tuple(turn(at, summary=summary(evictions=count)) for at, count in enumerate((13, 36, 59)))
    falling = tuple(turn(at, summary=summary(evictions=count)) for at, count in enumerate((13, 36, 5)))
    assert facts(clean(turns=rising))["evictions"] == 59
    assert facts(clean(turns=falling))["evictions"] == 54


def test_counts_beyond_64_bits_are_damage():
    assert facts(clean(csv=rows(2, read_bytes=[2**63, 1])))["read_bytes"] is None
