"""Each verdict from each source that can show it; without its rule every case here fails. A clean run has none."""

from __future__ import annotations

from dataclasses import replace

import pytest
from bmoe_collector.record import ArtifactRecord, NoteRecord, ReportLine, Rows, RunRecord
from bmoe_collector.verdicts import CODES, judge
from support.run_records import (
    ARGV,
    ENTRY,
    TOKENS,
    clean,
    gate,
    rows,
    run,
    sample,
    summary,
    turn,
    with_argv,
    with_preamble,
)


def codes(record: RunRecord) -> dict[str, str]:
    return {verdict.code: verdict.severity for verdict in judge(record)}


def evidence(record: RunRecord, code: str) -> str:
    return next(verdict.evidence for verdict in judge(record) if verdict.code == code)


def test_a_run_that_should_have_none_has_none():
    assert judge(clean()) == []


def ended(**keys):
    return clean(turns=(turn(summary=summary(**keys)),))


def entry(**values):
    return clean(samples=(sample("entry", 1, **{**ENTRY, **values}), sample("exit", 60, **ENTRY)))


def host(*samples):
    return clean(samples=(*clean().samples, *samples))


def session(*turns, ready=None, **fields):
    ready = {"load_s": 3.0, "think_ctl": "template"} if ready is None else ready
    base = {"run": run(argv=[*ARGV, "--session"]), "ready": ready, "turns": turns, "csv": Rows({})}
    return clean(**{**base, **fields})


def short(n=100):
    return clean(csv=rows(n), turns=(turn(tokens=n, summary=summary(tokens=n)),))


FAILED_ROWS = ReportLine("moe-rows", {}, "moe-rows: 3 FAILED reads - this run's output is not trustworthy")
MTP_END = {"mtp_drafted": 10, "mtp_accepted": 5, "mtp_decodes": 200, "drafted_steps": 200}
BARE = {"preamble": {}, "run": run(argv=[]), "csv": Rows({}), "turns": ()}
DROPPED = ReportLine("moe-drop", {"experts_dropped": 15, "experts_routed": 100, "threshold": 0.8}, "moe-drop: ...")
EARLY = ReportLine(
    "moe-route-ahead", {"route_ahead": 2, "ra_committed": 9, "ra_agree_pct": 94.0}, "moe-route-ahead: ..."
)
MOVED = ReportLine("moe-substitute", {"experts_substituted": 5, "experts_reranked": 50}, "moe-substitute: ...")
MMAP = ReportLine("mode", {"moe_stream": 0}, "mode: mmap")

CASES = [
    # code, severity, record
    ("untrustworthy_output", "fail", ended(row_io_errors=3)),
    ("untrustworthy_output", "fail", clean(trailers=({"row_io_errors": 2},))),
    ("untrustworthy_output", "fail", clean(report=(FAILED_ROWS,))),
    ("untrustworthy_output", "fail", clean(others=("4 FAILED reads - this run's output is not trustworthy",))),
    ("instrumented", "fail", with_preamble(predict_log=1)),
    ("instrumented", "fail", with_preamble(prefetch_sync=1)),
    ("instrumented", "fail", with_preamble(compute_trace_layers=1)),
    ("instrumented", "fail", with_argv("--route-trace", "r.csv")),
    ("instrumented", "fail", with_argv("--io-trace", "i.csv")),
    ("instrumented", "fail", with_argv("--compute-trace", "c.csv")),
    ("instrumented", "fail", with_argv("--compute-trace-layers", "c.csv")),
    ("instrumented", "fail", with_argv("--predict-log")),
    ("instrumented", "fail", with_argv("--prefetch-sync")),
    ("instrumented", "fail", with_argv(environment={"BMOE_PREDICT_LOG": "1"})),
    ("instrumented", "fail", clean(artifacts=(ArtifactRecord("route.csv", "route", 10, "0" * 64),))),
    ("instrumented", "fail", clean(report=(ReportLine("moe-predict", {"stale_pct": 80.0}, "moe-predict: ..."),))),
    ("load_all", "fail", with_preamble(load_all=1)),
    ("load_all", "fail", with_argv("--load-all")),
    ("incomplete", "fail", clean(turns=(turn(tokens=None, summary={}),))),
    ("incomplete", "fail", clean(run=run(outcome="lost"), turns=(), csv=Rows({}))),
    ("incomplete", "fail", clean(run=run(outcome="started"))),
    ("incomplete", "fail", clean(run=run(outcome="skipped"), turns=(), csv=Rows({}))),
    ("incomplete", "fail", clean(turns=(turn(cancelled=True, state="cancelled"),))),
    ("incomplete", "fail", clean(csv=rows(TOKENS - 5))),
    ("incomplete", "fail", clean(completeness={"complete": False, "reasons": ["segment 2 is missing"]})),
    ("incomplete", "fail", session(turn(0), turn(1, state="not_run", tokens=None, summary={}))),
    ("incomplete", "fail", session(turn(0), turn(None, summary={}, error={"fatal": True, "msg": "out of memory"}))),
    ("incomplete", "fail", session(turn(0), turn(1, state="began", tokens=None, summary={}))),
    ("gate_gave_up", "warn", clean(gates=(gate("mem_available_mib", 4000, 3000, "gave_up"),))),
    ("gate_gave_up", "warn", clean(gates=(gate("battery_pct", 50, None, "unreadable"),))),
    ("throttled_entry", "warn", clean(gates=(gate("clock_cap_ratio", 0.95, 0.8, "gave_up"),))),
    ("throttled_entry", "warn", clean(gates=(gate("speed_probe_ratio", 0.9, 0.5, "gave_up"),))),
    ("throttled_entry", "warn", clean(gates=(gate("speed_probe_ratio", 0.0, 0.6, "not_asked"),))),
    ("throttled_entry", "warn", replace(entry(cpu_temp_c=52.0), gates=(gate("cpu_temp_c", 45, 44.0),))),
    ("throttled_entry", "warn", entry(clock_cap_ratio=0.7)),
    ("throttled_entry", "warn", clean(notes=(NoteRecord(0, "baseline", "", {"cpu_temp_c": 24.0}),))),
    ("big_cores_excluded", "warn", entry(cpus_allowed="0-3")),
    ("foreign_load", "warn", host(sample("fast", 5, "host", foreign_cpu_share=0.4, foreign_process="chrome"))),
    ("foreign_load", "warn", clean(notes=(NoteRecord(5, "foreign_load", "", {"share": 0.2, "process": "x"}),))),
    ("foreign_load", "warn", clean(notes=(NoteRecord(0, "foreign_engine", "", {"pid": 4711, "cwd": "/"}),))),
    ("not_awake", "warn", host(sample("fast", 1, "host", wakefulness="Dozing", awake=False))),
    ("not_awake", "warn", host(sample("exit", 61, "host", doze="IDLE", awake=True))),
    ("not_awake", "warn", clean(observer={"max_timer_slip_ms": 4000.0})),
    ("dense_refaulting", "warn", clean(csv=rows(majflt=300))),
    ("dense_refaulting", "warn", clean(csv=Rows({}), turns=(turn(summary=summary(majflt_tok=150.0)),))),
    ("reclaimed", "warn", clean(csv=rows(rss_anon_mib=[3500.0] * 128 + [3000.0] * 128))),
    ("cache_below_cycle", "warn", with_preamble(cache_cycle_mb=2500)),
    ("cache_below_cycle", "warn", ended(token_demand_mib=2100.0)),
    ("o_direct_not_achieved", "warn", with_preamble(o_direct=0)),
    ("device_idle", "warn", replace(with_argv("--prefill-device", "gpu"), turns=ended(prefill_dev_nodes=0).turns)),
    ("think_ignored", "warn", session(turn(0, request={"think": False}), ready={"think_ctl": "none"})),
    ("think_ignored", "warn", replace(with_argv("--no-think"), ready={"think_ctl": "none"})),
    ("short_run", "warn", short()),
    ("not_streaming", "info", clean(preamble={}, run=run(argv=["bmoe-cli", "-m", "x"]), report=(MMAP,))),
    ("not_streaming", "warn", with_preamble(moe_stream=0)),
    ("not_streaming", "info", replace(with_preamble(moe_stream=0), run=run(argv=["bmoe-cli", "-m", "x"]))),
    ("stochastic", "info", with_preamble(temp=0.8, seed=42)),
    ("stochastic", "warn", with_preamble(temp=0.8)),
    ("stochastic", "warn", clean(preamble={}, run=run(argv=[*ARGV, "--temp", "0.7"]))),
    ("lossy", "info", replace(with_preamble(drop_cold_frac=0.5), turns=ended(experts_routed=9, experts_dropped=3).turns)),
    ("lossy", "info", with_preamble(substitute_lambda=0.5)),
    ("lossy", "info", with_preamble(route_ahead=2)),
    ("lossy", "info", replace(with_preamble(n_expert_used=4), run=run(model={"metadata": {"q.expert_used_count": "8"}}))),
    ("lossy", "info", clean(preamble={}, run=run(argv=[*ARGV, "--drop-cold-experts", "0.5"]))),
    ("lossy", "info", clean(**{**BARE, "report": (DROPPED,)})),
    ("lossy", "info", clean(**{**BARE, "report": (EARLY,)})),
    ("lossy", "info", clean(**{**BARE, "report": (MOVED,)})),
    ("lossy", "info", clean(preamble={}, run=run(argv=[]), turns=ended(ra_committed=9, ra_agree_pct=94.0).turns)),
    ("speculative", "info", clean(**{**BARE, "report": (ReportLine("ngram", {"mtp_drafted": 4}, "ngram: ..."),)})),
    ("speculative", "info", replace(with_preamble(spec="mtp"), turns=ended(**MTP_END).turns)),
    ("speculative", "info", clean(preamble={"mtp": 1})),
    ("speculative", "info", clean(preamble={}, run=run(argv=[*ARGV, "--ngram"]))),
    ("simulated", "info", clean(run=run(simulated=True, engine_version="0.24.0-sim"))),
]  # fmt: skip


@pytest.mark.parametrize(
    ("code", "severity", "record"), CASES, ids=[f"{at}-{case[0]}" for at, case in enumerate(CASES)]
)
def test_the_rule_finds_it(code, severity, record):
    assert codes(record).get(code) == severity
    assert evidence(record, code)


def test_every_code_of_the_table_has_a_case():
    assert {case[0] for case in CASES} | {"contaminated"} == set(CODES)


GAPPED = {"complete": False, "reasons": ["1 gaps in the record"]}
GAP = NoteRecord(5, "gap", "the disk is full", {"what": "samples", "declared": True, "frames": 9})
LOST_OUTPUT = NoteRecord(5, "gap", "the disk is full", {"what": "output", "declared": True, "frames": 9})
CLEAR = [
    # what must not be taken for it
    ("instrumented", with_argv("-p", "--route-trace")),
    ("incomplete", clean(csv=rows(200), turns=(turn(tokens=200, summary=summary(tokens=200)),))),  # ended by itself
    ("incomplete", session(turn(0), turn(None, summary={}, error={"fatal": False, "msg": "prompt too long"}))),
    ("incomplete", session(turn(0, cancelled=True, request={"cancel_after_tokens": 20}))),
    ("incomplete", session(turn(0, cancelled=True, tokens=0, summary={}, request={"cancel_after_ms": 0}))),
    (
        "incomplete",
        session(
            turn(0),
            turn(1, cancelled=True),
            run=run(argv=[*ARGV, "--session"], asked={"turns": [{"kind": "generate"}, {"cancel_after_tokens": 9}]}),
        ),
    ),
    ("gate_gave_up", clean(run=run(outcome="skipped"), gates=(gate("battery_pct", 50, 20, "gave_up"),))),
    ("throttled_entry", clean(gates=(gate("cpu_temp_c", 36, 35.9),))),
    ("big_cores_excluded", entry(cpus_allowed="4-7")),
    ("big_cores_excluded", clean(samples=(sample("entry", 1, **{**ENTRY, "cpus_allowed": "0-3", "policy0_max_khz": 3_000_000}),))),
    ("foreign_load", host(sample("fast", 5, "host", foreign_cpu_share=0.05, foreign_process="system_server"))),
    ("not_awake", host(sample("fast", 5, "host", wakefulness="Awake", awake=True, doze="ACTIVE"))),
    ("dense_refaulting", clean(csv=rows(majflt=[2000] * 30 + [1] * 226, wall_ms=[900.0] * 30 + [100.0] * 226))),
    ("dense_refaulting", clean(csv=rows(majflt=9))),
    ("dense_refaulting", clean(csv=rows(16, majflt=[900] * 6 + [1] * 10), turns=(turn(tokens=16, summary=summary(tokens=16)),))),
    ("incomplete", clean(completeness=GAPPED, notes=(GAP,))),
    (
        "reclaimed",
        clean(
            csv=rows(
                rss_anon_mib=[3500.0] * 128 + [3000.0] * 128, cache_budget_mib=[2000.0] * 128 + [1500.0] * 128
            )
        ),
    ),
    ("cache_below_cycle", with_preamble(cache_mb=0, cache_cycle_mb=900)),
    ("o_direct_not_achieved", replace(with_argv("--no-odirect"), preamble={**clean().preamble, "o_direct": 0})),
    ("o_direct_not_achieved", replace(with_preamble(o_direct=0), run=run(argv=[]))),
    ("device_idle", replace(with_argv("--prefill-device", "gpu"), turns=ended(prefill_dev_nodes=7).turns)),
    ("think_ignored", session(turn(0, request={"think": True}), ready={"think_ctl": "none"})),
    ("short_run", session(turn(0, tokens=None, text=b"", summary={}, decide={"best": 0}))),
    ("lossy", ended(ra_committed=0, ra_agree_pct=0.0, experts_dropped=0, experts_substituted=0)),
    ("lossy", with_argv("--n-expert-used", "8", model={"metadata": {"qwen3moe.expert_used_count": 8}})),
]  # fmt: skip


@pytest.mark.parametrize(("code", "record"), CLEAR, ids=[f"{at}-{case[0]}" for at, case in enumerate(CLEAR)])
def test_the_rule_leaves_it_alone(code, record):
    assert code not in codes(record)


@pytest.mark.parametrize(
    ("completeness", "notes"),
    [
        (GAPPED, ()),
        (GAPPED, (GAP, replace(GAP, facts={**GAP.facts, "declared": False}))),
        (GAPPED, (GAP, LOST_OUTPUT)),
        ({**GAPPED, "reasons": ["1 gaps in the record", "stdout: 10 bytes are here, the engine wrote 20"]}, (GAP,)),
    ],
)
def test_a_gap_nobody_declared_and_lost_output_leave_a_run_incomplete(completeness, notes):
    assert codes(clean(completeness=completeness, notes=notes))["incomplete"] == "fail"


def test_faults_of_a_first_turns_head_are_not_those_of_the_session():
    turns = [rows(12, 0, majflt=[900] * 5 + [2] * 7), *(rows(12, at, majflt=2) for at in range(1, 4))]
    columns = {name: [value for each in turns for value in each.columns[name]] for name in turns[0].columns}
    ends = tuple(turn(at, tokens=12, summary=summary(tokens=12)) for at in range(4))
    assert "dense_refaulting" not in codes(session(*ends, csv=Rows(columns)))
    columns["majflt"] = [2] * 12 + [300] * 36
    assert codes(session(*ends, csv=Rows(columns)))["dense_refaulting"] == "warn"


def test_evidence_has_the_numbers():
    heated = replace(entry(cpu_temp_c=60.0), gates=(gate("cpu_temp_c", 45, 44.0),), run=run(asked={"preheat_s": 300}))
    assert "cpu_temp_c 60 against the gate's 45 (the plan asked for a pre-heat of 300 s)" in evidence(
        heated, "throttled_entry"
    )
    assert "85.0%" not in evidence(short(), "short_run")
    assert "100 generated tokens" in evidence(short(), "short_run")
    lossy = replace(with_preamble(drop_cold_frac=0.5), turns=ended(experts_routed=100, experts_dropped=25).turns)
    assert "25.0% of routed experts dropped" in evidence(lossy, "lossy")
    told = clean(**{**BARE, "report": (DROPPED, EARLY, MOVED)})
    assert "drop threshold 0.8 × uniform, 15.0% of routed experts dropped" in evidence(told, "lossy")
    assert "(layers: 2), 6.0% of slots rerouted" in evidence(told, "lossy")
    assert "substitution not recorded, 10.0% of slots moved" in evidence(told, "lossy")
    drafted = replace(with_preamble(spec="ngram"), turns=ended(**MTP_END).turns)
    assert "50.0% of 10 drafts accepted" in evidence(drafted, "speculative")
    assert "drafted on 100.0% of 200 decodes" in evidence(drafted, "speculative")
    idle = replace(with_preamble(spec="ngram"), turns=ended(mtp_decodes=256).turns)
    assert "nothing was drafted" in evidence(idle, "speculative")
    assert "4-7" in evidence(entry(cpus_allowed="0-3"), "big_cores_excluded")


def test_faults_and_reclaim_are_seen_in_the_agents_samples_when_there_is_no_metrics_file():
    stdout = Rows({"turn": [0] * 300, "step": list(range(1, 301)), "wall_ms": [100.0] * 300,
                   "boot_ns": [int((10 + at / 10) * 1e9) for at in range(300)]})  # fmt: skip
    samples = tuple(
        sample("fast", 5 + second, majflt=second * 5000, rss_anon_kib=(4000 - 20 * second) * 1024)
        for second in range(36)
    )
    record = RunRecord(run=run(), stdout=stdout, samples=samples, turns=(turn(tokens=300, summary={"tok_s": 10.0}),))
    found = codes(record)
    assert found["dense_refaulting"] == "warn"
    assert found["reclaimed"] == "warn"


def test_verdicts_come_in_the_order_of_the_table():
    record = clean(run=run(simulated=True), csv=rows(majflt=300), completeness={"complete": False, "reasons": ["x"]})
    found = [verdict.code for verdict in judge(record)]
    assert found == sorted(found, key=CODES.index)
    assert found[0] == "incomplete"
