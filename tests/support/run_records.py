"""Hand-made RunRecords: a clean run that deserves no verdict, and the means to spoil one thing at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bmoe_collector.record import GateRecord, Rows, RunRecord, SampleRecord, TurnRecord

TOKENS = 256
MIB = 1 << 20

PREAMBLE = {
    "format": "bmoe_metrics v2", "engine": "0.23.0", "model": "qwen3-30b.gguf", "arch": "qwen3moe", "n_layer": 48,
    "n_expert": 128, "n_expert_used": 8, "threads": 4, "n_ctx": 2048, "n_ubatch": 512, "chatml": 1, "moe_stream": 1,
    "cache_mb": 2000, "cache_auto": 0, "cache_floor_mb": 1536, "cache_ceil_mb": 0, "cache_cycle_mb": 900,
    "force_cache": 0, "load_all": 0, "io_threads": 4, "o_direct": 1, "overlap": 0, "prefetch": 0, "route_ahead": 0,
    "predict_log": 0, "prefetch_sync": 0, "dense_weights": "anon", "drop_cold_frac": 0.0, "substitute_lambda": 0.0,
    "temp": 0.0, "seed": 4294967295, "compute_trace_layers": 0, "spec": "off",
}  # fmt: skip

ARGV = ["bmoe-cli", "-m", "qwen3-30b.gguf", "-p", "hello", "-n", str(TOKENS), "-t", "4", "--moe-stream",
        "--cache-mb", "2000", "--csv", "metrics.csv", "--progress"]  # fmt: skip


def rows(n: int = TOKENS, turn: int = 0, **columns: Any) -> Rows:
    """`n` equal tokens of 100 ms: 40 ms flash, 10 ms management, 120 ms CPU on 4 threads; a column may be replaced."""
    base: dict[str, Any] = {
        "turn": turn, "steps": n, "wall_ms": 100.0, "io_ms": 40.0, "compute_ms": 50.0, "read_bytes": 50 * MIB,
        "cache_hit_pct": 80.0, "stall_ms": 0.0, "mgmt_ms": 10.0, "majflt": 1, "cpu_ms": 120.0,
        "dense_resident_frac": 0.99, "majflt_mib": 0.004, "cache_budget_mib": 2000.0, "rss_mib": 4000.0,
        "rss_anon_mib": 3500.0, "rss_file_mib": 500.0, "swap_mib": 10.0, "mem_available_mib": 3000.0,
        "mem_free_mib": 400.0, "swap_free_mib": 2000.0, "loop_overhead_ms": 5.0, "mtp_batch": 1, "mtp_draft_ms": 0.0,
        "drain_ms": 0.0, "adopt_ms": 0.0, "ra_issue_ms": 0.0, "ra_wd_ms": 0.0,
    }  # fmt: skip
    base.update(columns)
    spread = {name: list(value) if isinstance(value, (list, tuple)) else [value] * n for name, value in base.items()}
    return Rows(
        {"step": list(range(1, n + 1)), **{name: value for name, value in spread.items() if value != [None] * n}}
    )


def summary(**keys: Any) -> dict[str, Any]:
    """The end record of those tokens, in the BMOE_DONE spellings."""
    base: dict[str, Any] = {
        "tokens": TOKENS, "tok_s": 10.0, "load_s": 3.0, "prefill_s": 2.0, "prefill_tps": 25.0, "n_prompt": 50,
        "cache_hit_pct": 80.0, "compute_s_tok": 0.05, "io_s_tok": 0.04, "stall_s_tok": 0.0, "mgmt_s_tok": 0.01,
        "cpu_s_tok": 0.12, "majflt_tok": 1.0, "read_mib": 50.0 * TOKENS, "cache_resident_mib": 1990.0,
        "cache_budget_mib": 2000.0, "token_demand_mib": 700.0, "loop_overhead_s_tok": 0.005, "experts_routed": 0,
        "experts_dropped": 0, "evictions": 1000, "rereads": 900, "row_io_errors": 0, "mtp_drafted": 0,
        "mtp_accepted": 0, "mtp_decodes": TOKENS, "drafted_steps": 0, "prefill_cpu_s": 4.0, "prefill_io_s": 0.6,
        "prefill_stall_s": 0.0, "prefill_mgmt_s": 0.1,
    }  # fmt: skip
    return {**base, **keys}


def sample(kind: str = "fast", at_s: float = 1.0, source: str = "agent", **values: Any) -> SampleRecord:
    """One reading; values by the names of bmoe_proto.kernel."""
    return SampleRecord(boot_ns=int(at_s * 1e9), source=source, kind=kind, values=values, took_ms=0.2)


ENTRY = {
    "cpu_temp_c": 35.0, "clock_cap_ratio": 1.0, "mem_available_kib": 3500 * 1024, "mem_swap_total_kib": 4 * MIB,
    "mem_swap_free_kib": 3 * MIB, "battery_pct": 80, "awake": True, "wakefulness": "Awake", "cpus_allowed": "0-7",
    "policy0_max_khz": 2_000_000, "policy0_cpus": "0-3", "policy4_max_khz": 3_000_000, "policy4_cpus": "4-7",
}  # fmt: skip


def gate(name: str, bound: float, last: float | None, state: str = "held", **more: Any) -> GateRecord:
    """A gate's report."""
    sign = "<=" if name == "cpu_temp_c" else ">="
    return GateRecord(name, f"{name} {sign} {bound:g}", bound, last, "", state, 12.0, "run-flagged", **more)


def turn(number: int | None = 0, **fields: Any) -> TurnRecord:
    """One finished generation."""
    base: dict[str, Any] = {"request_id": None, "tokens": TOKENS, "cancelled": False, "text": b"Once upon a time",
                            "reasoning": b"", "summary": summary()}  # fmt: skip
    return TurnRecord(turn=number, **{**base, **fields})


def run(**columns: Any) -> dict[str, Any]:
    """The columns of the `runs` table."""
    base: dict[str, Any] = {
        "run_id": "ab" * 16, "source": "agent", "outcome": "ok", "cause": "exit", "evidence": [], "exit_code": 0,
        "signal": None, "exit_observed": True, "simulated": False, "agent_uuid": "cd" * 16, "device_name": "shelf-1",
        "device_model": "Phone", "engine_name": "bmoe", "engine_version": "bmoe-cli 0.23.0", "engine_sha256": "e" * 64,
        "model_name": "qwen3-30b.gguf", "model_size": 18 << 30, "model_identity": "f" * 64, "argv": ARGV,
        "environment": {}, "prompt": b"hello", "prompt_sha256": "1" * 64, "labels": {}, "plan_id": None,
        "plan_name": None, "cell": None, "cell_index": None, "repeat": 0, "block": 0, "attempt": 1,
        "started_wall_ns": 1_700_000_000 * 10**9, "started_boot_ns": 10**9, "ended_boot_ns": 60 * 10**9,
        "n_tokens": TOKENS, "n_turns": 1, "unmeasured": False, "question": None,
    }  # fmt: skip
    return {**base, **columns}


def clean(**fields: Any) -> RunRecord:
    """A complete serial run of 256 tokens on a cool phone: no verdict. Fields of RunRecord may be replaced."""
    record = RunRecord(
        run=run(),
        preamble=dict(PREAMBLE),
        csv=rows(),
        turns=(turn(),),
        samples=(
            sample("entry", 1, **ENTRY),
            sample("fast", 10, rss_anon_kib=3500 * 1024, majflt=100),
            sample("exit", 60, **{**ENTRY, "cpu_temp_c": 60.0}),
        ),
        observer={"cpu_ms": 40.0, "max_timer_slip_ms": 3.0, "samples": 30},
        completeness={"complete": True, "reasons": [], "frames": 120, "gaps": 0},
    )
    return replace(record, **fields)


def with_preamble(**keys: Any) -> RunRecord:
    """The clean run with other preamble keys; None takes a key out."""
    merged = {**PREAMBLE, **keys}
    return clean(preamble={key: value for key, value in merged.items() if value is not None})


def with_argv(*flags: str, **columns: Any) -> RunRecord:
    """The clean run with flags added to its argv."""
    return clean(run=run(argv=[*ARGV, *flags], **columns))
