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
    **_all("int", "n_tokens n_turns read_bytes evictions rereads experts_routed experts_dropped"),
    **_all(
        "float",
        "tok_s effective_tok_s s_tok ttft_s prefill_tps load_s prefill_s cache_hit_pct read_mib_tok majflt_tok"
        " cpu_s_tok stall_s_tok mgmt_s_tok rss_peak_mib",
    ),
    **_all("str", "text_sha256 stall_meaning"),
}
"""Derived numbers that lists filter and sort by; every other one is in `run_facts.facts`."""
