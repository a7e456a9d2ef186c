"""Metrics CSVs of every generation, written from their description: headers, preambles, trailers."""

from __future__ import annotations

from dataclasses import dataclass

_7 = "step,steps,wall_ms,io_ms,compute_ms,read_bytes,cache_hit_pct"
_8 = _7 + ",stall_ms"
_9 = _8 + ",mgmt_ms"
_11 = _9 + ",majflt,cpu_ms"
_22 = (
    _11 + ",dense_resident_frac,turn,majflt_mib,cache_budget_mib,rss_mib,rss_anon_mib,rss_file_mib,swap_mib,"
    "mem_available_mib,mem_free_mib,swap_free_mib"
)
_V1 = (
    "# bmoe_metrics v1\n# model=a model b.gguf arch=qwen3moe n_layer=48 n_expert=128 n_expert_used=8 threads=4 n_ctx=2048\n"
    "# moe_stream=1 cache_mb=2000 cache_auto=0 cache_ceil_mb=0 force_cache=0 io_threads=4 o_direct=1 overlap=1 prefetch=0"
    " dense_weights=anon{more}\n"
)
_V2 = (
    "# bmoe_metrics v2\n# engine={engine}\n# model=a model b.gguf arch=qwen3moe n_layer=48 n_expert=128 n_expert_used=8"
    " threads=4 n_ctx=2048 n_ubatch=512 chatml=1\n# moe_stream=1 cache_mb=2000 cache_auto=1 cache_floor_mb=1536"
    " cache_ceil_mb=0 force_cache=0 load_all=0 io_threads=4 o_direct=1 overlap=1 io_two_wave=0 prefetch=0\n"
    "  route_ahead=0 predict_prefetch=0 predict_log=0 dense_weights=anon drop_cold_frac=0.5 drop_renorm=1{more}\n"
    "# temp=0 top_k=40 top_p=0.95 seed=4294967295 compute_trace_layers=0 spec=off\n"
)
_FIRST = (
    "# summary tokens=3 s/tok=0.5 tok/s=2.0 read_MiB=38.4 io_s=1.5 compute_s/tok=0.1 io_s/tok=0.4 cache_hit_pct=-1 n_prompt=9"
    " load_s=2.5 prefill_s=3.5 prefill_tps=2.6 stall_s/tok=0.2"
)
_LATER = (
    _FIRST + " mgmt_s/tok=0.01 cache_resident_MiB=1999.5 cache_budget_MiB=2000.0 cache_resizes=0 spec_read_MiB=0.0"
    " spec_experts=0 spec_useful=0 majflt/tok=0.00 cpu_s/tok=0.9 token_demand_MiB=801.5 layer_demand_MiB=17.2"
    " experts_routed=384 experts_dropped=0"
)


@dataclass(frozen=True)
class Generation:
    """One layout in circulation."""

    name: str
    header: str
    preamble: str
    trailer: str
    engine: str | None

    def file(self, rows: int = 3, *, end: bool = True) -> bytes:
        """A file of so many tokens; values are told apart by column and row, cache hits unmeasured in the first."""
        names = self.header.split(",")
        lines = [self.header]
        lines += [",".join(self.cell(name, row) for name in names) for row in range(1, rows + 1)]
        if end:
            lines.append(self.trailer)
        return (self.preamble + "\n".join(lines) + "\n").encode()

    @staticmethod
    def cell(name: str, row: int) -> str:
        """The text of a cell."""
        fixed = {
            "step": str(row),
            "steps": "9",
            "turn": "0",
            "majflt": "0",
            "mtp_batch": "1",
            "read_bytes": str(row << 20),
        }
        if name in fixed:
            return fixed[name]
        if name in ("cache_hit_pct", "dense_resident_frac", "resident_frac"):
            return "-1" if row == 1 else f"0.{row}"
        return f"{len(name)}.{row}"

    def value(self, name: str, row: int) -> float | int | None:
        """What the cell means."""
        text = self.cell(name, row)
        if text == "-1":
            return None
        return float(text) if "." in text else int(text)


GENERATIONS = (
    Generation("0.1.0", _7, "", _FIRST, None),
    Generation("0.1.1", _8, "", _FIRST, None),
    Generation("0.3", _9, "", _FIRST + " mgmt_s/tok=0.01", None),
    Generation("0.7", _11, "", _LATER, None),
    Generation("0.8", _22, _V1.format(more=""), _LATER, None),
    Generation("0.16", _22, _V1.format(more=" cache_policy=lru drop_cold_frac=0.25"), _LATER, None),
    Generation("dev-resident", _22 + ",resident_frac", _V1.format(more=""), _LATER, None),
    Generation("0.17", _22 + ",loop_overhead_ms", _V2.format(engine="0.17.0", more=" mtp=1"), _LATER, "0.17.0"),
    Generation(
        "dev-mtp",
        _22 + ",loop_overhead_ms,mtp_batch,mtp_draft_ms",
        _V2.format(engine="unknown", more=" cache_cycle_mb=800"),
        _LATER,
        "unknown",
    ),
    Generation(
        "0.19",
        _22 + ",loop_overhead_ms,mtp_batch,mtp_draft_ms,drain_ms,adopt_ms,ra_issue_ms,ra_wd_ms",
        _V2.format(engine="0.19.0", more=" substitute_lambda=0.1 dry_multiplier=0.8"),
        _LATER + " evictions=82 rereads=75 ra_agree_pct=0.0",
        "0.19.0",
    ),
    Generation(
        "fork",
        _22 + ",loop_overhead_ms,mtp_batch,mtp_draft_ms,drain_ms,adopt_ms,ra_issue_ms,ra_wd_ms,arm,tokens_since_switch",
        _V2.format(engine="0.19.0", more=""),
        _LATER + " row_io_errors=0 new_thing/tok=1.5",
        "0.19.0",
    ),
)
