"""Report lines: every one the contract or the field notes name, its numbers by name, and what a cut does to it."""

import pytest
from bmoe_proto.contract.report import NAMES, REPORT, read_line

pytestmark = pytest.mark.agent

LINES = [
    ("generation: 256 tokens, 0.112 s/token (8.901 tok/s)", {"tokens": 256, "s_tok": 0.112, "tok_s": 8.901}),
    (
        "compute: 51.8% CPU occupancy (0.0002 cpu-s/token over 4 threads), 1.25 major faults/token",
        {"cpu_occupancy_pct": 51.8, "cpu_s_tok": 0.0002, "threads": 4, "majflt_tok": 1.25},
    ),
    (
        "prefill: 55 tokens, 0.023 s (2428.5 tok/s) | model load 0.033 s | TTFT 0.055 s",
        {"n_prompt": 55, "prefill_s": 0.023, "prefill_tps": 2428.5, "load_s": 0.033, "ttft_s": 0.055},
    ),
    (
        "mode: expert streaming, cache 4000 MiB, dense anon, overlap",
        {"mode": "expert streaming", "moe_stream": 1, "cache": "4000 MiB", "cache_mb": 4000, "dense_weights": "anon", "overlap": 1},
    ),
    (
        "mode: expert streaming, cache auto, dense ahwb",
        {"mode": "expert streaming", "moe_stream": 1, "cache": "auto", "dense_weights": "ahwb", "overlap": 0},
    ),
    (
        "mode: expert streaming, cache off, dense mmap",
        {"mode": "expert streaming", "moe_stream": 1, "cache": "off", "dense_weights": "mmap", "overlap": 0},
    ),
    (
        "mode: mmap. Expert streaming is OFF on a MoE model (qwen3moe), so this run is a baseline, not this engine",
        {"mode": "mmap", "moe_stream": 0},
    ),
    ("mode: mmap (llama is not a MoE architecture this build streams)", {"mode": "mmap", "moe_stream": 0}),
    (
        ("moe-stream: read 40.8 MiB (0.85 MiB/token), decode 0.005 s/token (compute 0.001 + cache mgmt 0.002 + flash I/O "
        "0.003 s/token, 963 MiB/s)"),
        {
            "read_mib": 40.8, "read_mib_tok": 0.85, "s_tok": 0.005, "compute_s_tok": 0.001, "mgmt_s_tok": 0.002,
            "io_s_tok": 0.003, "read_mib_s": 963.0,
        },
    ),
    (
        ("moe-stream: read 1.0 MiB (0.50 MiB/token), decode 0.005 s/token (compute 0.001 + cache mgmt 0.002 + flash I/O "
        "0.003 s/token, nan MiB/s), stall_s/tok=0.004"),
        {
            "read_mib": 1.0, "read_mib_tok": 0.5, "s_tok": 0.005, "compute_s_tok": 0.001, "mgmt_s_tok": 0.002,
            "io_s_tok": 0.003, "read_mib_s": None, "stall_s_tok": 0.004,
        },
    ),
    ("moe-cache: 92.0% hit, resident 3.9 MiB", {"cache_hit_pct": 92.0, "cache_resident_mib": 3.9}),
    (
        "moe-cache: 92.0% hit, resident 3.9 MiB, budget 4000 MiB (auto, resized 3×)",
        {"cache_hit_pct": 92.0, "cache_resident_mib": 3.9, "cache_budget_mib": 4000.0, "cache_resizes": 3},
    ),
    (
        "moe-cache: 210 evictions, 199 re-reads (4.1/token) — bytes the cache had already paid for once",
        {"evictions": 210, "rereads": 199, "rereads_tok": 4.1},
    ),
    ("moe-overlap: stall 0.012 s/token (flash reads overlapped with FFN compute)", {"stall_s_tok": 0.012}),
    (
        "moe-waits: drain 0.003 s/token (inside compute), adopt 0.001 s/token (inside mgmt)",
        {"drain_s_tok": 0.003, "adopt_s_tok": 0.001},
    ),
    (
        "moe-prefetch: 12.5 MiB speculative, 30/40 experts useful (75%)",
        {"spec_read_mib": 12.5, "spec_useful": 30, "spec_experts": 40, "spec_useful_pct": 75.0},
    ),
    (
        "moe-prefetch: 12.5 MiB speculative, 30/40 experts useful (75%) [stale-gate]",
        {"spec_read_mib": 12.5, "spec_useful": 30, "spec_experts": 40, "spec_useful_pct": 75.0, "tag": "stale-gate"},
    ),
    (
        "moe-prefetch: 12.5 MiB speculative, 40/40 experts useful (100%) [route-ahead]",
        {"spec_read_mib": 12.5, "spec_useful": 40, "spec_experts": 40, "spec_useful_pct": 100.0, "tag": "route-ahead"},
    ),
    (
        "moe-rows: 512 MiB of row-gathered table(s) off the resident set, 8.0 MiB resident, 300 rows gathered, 20 reads (5.5 MiB)",
        {"row_table_mib": 512.0, "row_resident_mib": 8.0, "row_rows": 300, "row_reads": 20, "row_read_mib": 5.5},
    ),
    ("moe-rows: 2 FAILED reads - this run's output is not trustworthy", {"row_io_errors": 2}),
    ("moe-rows: 2 FAILED reads — this run's output is not trustworthy", {"row_io_errors": 2}),
    (
        ("moe-route-ahead: 2 layers early — 900 routings committed, 46 passed through; committed selection agreed with the "
        "router on 93.5% of slots"),
        {"route_ahead": 2, "ra_committed": 900, "ra_passthrough": 46, "ra_agree_pct": 93.5},
    ),
    (
        ("moe-route-ahead: prediction 1.5 ms/token of worker CPU (96 GEMVs, 0.750 ms each) + 0.3 ms/token issuing the reads + "
        "0.1 ms/token watchdog, both on the eval thread"),
        {"ra_gemv_ms_tok": 1.5, "ra_gemv_jobs": 96, "ra_gemv_ms": 0.75, "ra_issue_ms_tok": 0.3, "ra_wd_ms_tok": 0.1},
    ),
    (
        "mtp: 10/40 drafts accepted (25.0%), 1.25 tokens per verify decode (38 decodes for 48 tokens)",
        {"mtp_accepted": 10, "mtp_drafted": 40, "accepted_pct": 25.0, "tokens_per_decode": 1.25, "mtp_decodes": 38, "tokens": 48},
    ),
    (
        "mtp: drafting costs 0.0100 s/token on top of decode → 8.10 tok/s effective (vs 8.90 reported)",
        {"mtp_draft_s_tok": 0.01, "effective_tok_s": 8.1, "tok_s": 8.9},
    ),
    (
        "mtp: of 40.0 MiB streamed, 3.0 MiB (7.5%) was the head's own routing, 37.0 MiB the widened verify batch",
        {"read_mib": 40.0, "draft_read_mib": 3.0, "draft_read_pct": 7.5, "verify_read_mib": 37.0},
    ),
    (
        "ngram: drafted on 8 of 26 steps (30.8%); the rest decoded plainly",
        {"drafted_steps": 8, "mtp_decodes": 26, "drafted_steps_pct": 30.8},
    ),
    (
        "moe-drop: 30/400 routed experts dropped (7.5%), threshold 0.50 x uniform",
        {"experts_dropped": 30, "experts_routed": 400, "dropped_pct": 7.5, "threshold": 0.5},
    ),
    (
        "moe-substitute: 30/400 reranked slots went to a resident expert (7.5%), margin 0.10 x score range",
        {"experts_substituted": 30, "experts_reranked": 400, "substituted_pct": 7.5, "margin": 0.1},
    ),
    (
        ("moe-predict: stale-gate 81.0% of routed slots (40.0% whole routings) | prev-token 35.0% (5.0%) | fresh-gate control "
        "100.0% (99.0%)"),
        {
            "stale_pct": 81.0, "stale_whole_pct": 40.0, "prev_pct": 35.0, "prev_whole_pct": 5.0, "ctrl_pct": 100.0,
            "ctrl_whole_pct": 99.0,
        },
    ),
    (
        "moe-predict: stale-2 (two layers early) 70.0% of routed slots (30.0% whole routings)",
        {"stale2_pct": 70.0, "stale2_whole_pct": 30.0},
    ),
    (
        ("moe-predict: scored — stale-gate 10 routings/20 slots, prev-token 30/40, control 50/60; 7 routings the stale-gate "
        "could not rank"),
        {
            "stale_routings": 10, "stale_slots": 20, "prev_routings": 30, "prev_slots": 40, "ctrl_routings": 50,
            "ctrl_slots": 60, "unranked": 7,
        },
    ),
    ("moe-predict: the control is below 100%, so this model's expert selection is not raw-logit", {}),
    (
        "plan: predicted 0.100 s/token, measured 0.200 (-50%); cache hits credited 80%, measured 70.5%",
        {"predicted_s_tok": 0.1, "s_tok": 0.2, "predicted_error_pct": -50.0, "predicted_hit_pct": 80.0, "cache_hit_pct": 70.5},
    ),
    ("moe-spec-gate: 81% router prediction recall", {"recall_pct": 81.0}),
]  # fmt: skip


@pytest.mark.parametrize(("text", "facts"), LINES)
def test_a_line_and_its_numbers(text, facts):
    found = read_line(text)
    assert found is not None
    assert (found.name, found.facts) == (text.split(":")[0], facts)
    assert {key: type(value) for key, value in found.facts.items()} == {k: type(v) for k, v in facts.items()}


def test_every_shape_of_the_table_is_tested():
    seen = {(shape.name, shape.template) for shape in REPORT for text, _ in LINES if shape.pattern.match(text)}
    untested = {(s.name, s.template) for s in REPORT} - seen
    # mtp and ngram share their shapes; only mtp has a share of the bytes
    assert {name for name, _ in untested} <= {"mtp", "ngram"}
    assert {template for name, template in untested} <= {template for _, template in seen}
    assert {text.split(":")[0] for text, _ in LINES} == NAMES


@pytest.mark.parametrize("text", [text for text, _ in LINES if ", stall_s/tok=" not in text])
def test_a_cut_line_never_gives_a_number_the_whole_line_does_not(text):
    whole = read_line(text)
    assert whole is not None
    for cut in range(len(text)):
        found = read_line(text[:cut])
        if found is not None and found.whole:
            assert found.facts.items() <= whole.facts.items(), text[:cut]


def test_the_layer_table_says_none_where_a_predictor_had_no_routings():
    head = read_line("  layer   stale    prev   ctrl   routings", "moe-predict")
    row = read_line("      0       -    50.0  100.0         47", "moe-predict")
    note = read_line(
        "             ranking (an added selection bias, or group-limited routing). The stale-gate", "moe-predict"
    )
    assert head is not None
    assert note is not None
    assert row is not None
    assert row.facts == {"layer": 0, "stale_pct": None, "prev_pct": 50.0, "ctrl_pct": 100.0, "routings": 47}
    assert read_line("      0       -    50.0  100.0         47", "moe-drop") is None


def test_lines_wrapped_as_the_contract_shows_them():
    rows = read_line("300 rows gathered, 20 reads (5.5 MiB)", "moe-rows")
    agreed = read_line("committed selection agreed with the router on 93.5% of slots", "moe-route-ahead")
    assert rows is not None
    assert agreed is not None
    assert (rows.name, rows.facts["row_reads"]) == ("moe-rows", 20)
    assert (agreed.name, agreed.facts) == ("moe-route-ahead", {"ra_agree_pct": 93.5})


@pytest.mark.parametrize(
    "text", ["", "generation: many tokens", "moe-future: 3 things", "mode: warp", "moe-cache:", ": x"]
)
def test_what_is_no_report_line(text):
    assert read_line(text) is None


def test_more_behind_a_known_line_is_no_hindrance():
    found = read_line("generation: 2 tokens, 0.100 s/token (10.000 tok/s), 5 wishes")
    assert found is not None
    assert (found.facts["tokens"], found.whole) == (2, False)
