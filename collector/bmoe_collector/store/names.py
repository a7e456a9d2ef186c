"""Which names have a column of their own, and of which type: SQL name to "int", "float", "str" or "bool".

In: the contract's one table of columns and keys. Out: ordered dicts for `schema`. Whatever is not here goes into the
`extra` JSON of its row. A name added to the contract's table needs a migration; a test says so.
"""

from __future__ import annotations

from bmoe_proto.contract import columns


def _all(kind: str, words: str) -> dict[str, str]:
    return dict.fromkeys(words.split(), kind)


def _types(table: columns.Table, leave_out: str = "") -> dict[str, str]:
    out = set(leave_out.split())
    return {column.name: column.type for column in table.values() if column.name not in out}


CSV_COLUMNS: dict[str, str] = _types(columns.METRICS)
"""Columns of the metrics CSV."""

PROGRESS_COLUMNS: dict[str, str] = _types(columns.PROGRESS, "reset delta_reasoning delta_text reasoning text")
"""Keys of BMOE_PROGRESS that are values."""

PREAMBLE_COLUMNS: dict[str, str] = _types(columns.PREAMBLE)
"""Keys of the metrics preamble."""

SUMMARY_COLUMNS: dict[str, str] = {
    **_types(columns.DONE, "id cancelled tokens reasoning text"),
    **{column.done: column.type for column in columns.TRAILER.values() if column.done != "tokens"},
}
"""Keys of BMOE_DONE and of the trailer, in the spelling of BMOE_DONE."""

SAMPLE_COLUMNS: dict[str, str] = {
    **_all(
        "int",
        "rss_kib rss_anon_kib rss_file_kib swap_kib minflt majflt utime_ticks stime_ticks last_cpu io_read_bytes"
        " run_ns run_wait_ns mem_available_kib mem_free_kib mem_swap_free_kib",
    ),
    **_all("float", "cpu_temp_c clock_cap_ratio battery_pct"),
}
"""Values of samples that lists and charts ask for; names of `bmoe_proto.kernel`."""

FACT_COLUMNS: dict[str, str] = {
    **_all(
        "int",
        "n_tokens n_turns n_prompt warmup_tokens experts_routed experts_dropped experts_substituted evictions rereads"
        " read_bytes prefetched_experts prefetched_useful n_predict",
    ),
    **_all(
        "float",
        "tok_s effective_tok_s drafting_tok_s s_tok loop_overhead_s_tok ttft_s load_s prefill_s prefill_tps"
        " token_ms_median token_ms_p5 token_ms_p95 steady_tok_s bar_cpu_s_tok bar_flash_s_tok bar_mgmt_s_tok"
        " bar_unattributed_s_tok prefill_bar_cpu_s prefill_bar_flash_s prefill_bar_mgmt_s cpu_s_tok io_s_tok stall_s_tok"
        " mgmt_s_tok compute_residual_s_tok drain_s_tok adopt_s_tok occupancy cpu_busy cache_hit_pct drop_rate"
        " substitution_rate reroute_rate active_experts read_mib_tok faulted_mib_tok majflt_tok cache_budget_mib"
        " cache_resident_mib token_demand_mib acceptance amortisation coverage rss_peak_mib rss_anon_peak_mib"
        " swap_peak_mib mem_available_min_mib dense_resident_frac resident_fraction resident_fraction_error"
        " resident_dense_fraction resident_expert_fraction entry_cpu_temp_c entry_clock_cap entry_mem_available_mib"
        " entry_swap_used_mib entry_battery_pct exit_cpu_temp_c exit_clock_cap swapped_in_pages",
    ),
    **_all("str", "text_sha256 stall_meaning"),
}
"""Derived numbers that lists filter and sort by; every other one is in `run_facts.facts`."""
