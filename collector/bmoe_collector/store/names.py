"""Which contract names have a column of their own, and of which type: SQL name to "int", "float", "str" or "bool".

In: the contract's table. Out: ordered dicts for `schema`. Whatever is not here goes into the row's `extra` JSON.
"""

from __future__ import annotations


def _all(kind: str, words: str) -> dict[str, str]:
    return dict.fromkeys(words.split(), kind)


_CSV_FLOATS = (
    "wall_ms io_ms compute_ms cache_hit_pct stall_ms mgmt_ms cpu_ms dense_resident_frac majflt_mib cache_budget_mib"
    " rss_mib rss_anon_mib rss_file_mib swap_mib mem_available_mib mem_free_mib swap_free_mib loop_overhead_ms"
    " mtp_draft_ms drain_ms adopt_ms ra_issue_ms ra_wd_ms resident_frac"
)
CSV_COLUMNS: dict[str, str] = {
    **_all("int", "turn step steps read_bytes majflt mtp_batch"),
    **_all("float", _CSV_FLOATS),
}

PROGRESS_COLUMNS: dict[str, str] = {
    **_all("int", "step steps majflt"),
    **_all("float", "wall_ms io_ms compute_ms mgmt_ms stall_ms read_mb cache_hit_pct cpu_ms dense_resident_frac"),
}

PREAMBLE_COLUMNS: dict[str, str] = {
    **_all("str", "engine model arch dense_weights spec"),
    **_all(
        "int",
        "n_layer n_expert n_expert_used threads n_ctx n_ubatch chatml moe_stream cache_mb cache_auto cache_floor_mb"
        " cache_ceil_mb cache_cycle_mb force_cache load_all io_threads o_direct overlap io_two_wave prefetch"
        " route_ahead predict_prefetch predict_log predict_spec_max prefetch_sync drop_renorm drop_prefill top_k seed"
        " compute_trace_layers spec_draft_max ngram_min_match mtp",
    ),
    **_all("float", "drop_cold_frac substitute_lambda temp top_p mtp_p_min"),
}

SUMMARY_COLUMNS: dict[str, str] = {
    **_all(
        "int",
        "n_prompt n_past mtp_drafted mtp_accepted mtp_decodes drafted_steps prefill_dev_tokens prefill_dev_nodes"
        " cache_resizes spec_experts spec_useful experts_routed experts_dropped experts_reranked experts_substituted"
        " evictions rereads row_rows row_reads row_evictions row_io_errors ra_committed ra_passthrough",
    ),
    **_all(
        "float",
        "tok_s s_tok prefill_s prefill_tps load_s cache_hit_pct compute_s_tok io_s_tok io_s cache_resident_mib"
        " cache_budget_mib read_mib stall_s_tok mgmt_s_tok majflt_tok cpu_s_tok prefill_cpu_s prefill_read_mib"
        " prefill_io_s prefill_stall_s prefill_mgmt_s prefill_dev_read_mib prefill_dev_stall_s token_demand_mib"
        " layer_demand_mib spec_read_mib mtp_draft_s_tok loop_overhead_s_tok row_table_mib row_resident_mib"
        " row_read_mib ra_agree_pct ra_gemv_ms_tok ra_issue_ms_tok ra_wd_ms_tok drain_s_tok adopt_s_tok",
    ),
}

SAMPLE_COLUMNS: dict[str, str] = _all(
    "int",
    "rss_kib rss_anon_kib rss_file_kib swap_kib minflt majflt utime_ticks stime_ticks last_cpu io_read_bytes run_ns"
    " run_wait_ns mem_available_kib mem_free_kib mem_swap_free_kib",
)

FACT_COLUMNS: dict[str, str] = {
    **_all("int", "n_tokens n_turns read_bytes evictions rereads experts_routed experts_dropped"),
    **_all(
        "float",
        "tok_s effective_tok_s s_tok ttft_s prefill_tps load_s prefill_s cache_hit_pct read_mib_tok majflt_tok"
        " cpu_s_tok stall_s_tok mgmt_s_tok rss_peak_mib",
    ),
    **_all("str", "text_sha256 stall_meaning"),
}
