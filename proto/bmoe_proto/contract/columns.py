"""The one table of everything the engine names: columns, keys, their type, unit, sentinel, age and meaning.

In: nothing. Out: tables of `Column` by source (`METRICS`, `TRAILER`, `PREAMBLE`, `PROGRESS`, `LOAD`, `READY`, `BEGIN`,
`DONE`, `DECIDE`, `ERROR`, `ROUTE`, `COMPUTE`, `IO`, `SIDECAR`), each a mapping from the engine's spelling to its column
in the order the engine writes them. Schema, parsers, export and documentation are made from these tables. Docs cite
the section of the telemetry contract the meaning comes from.

Keys are matched by name, never by position or count (contract, "Per-token rows").
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Type = Literal["int", "float", "str", "bool", "list"]


@dataclass(frozen=True, slots=True)
class Column:
    """One named value of the contract.

    `minus_one`: the contract gives -1 the meaning "unmeasured", so -1 is None here and nowhere else (law 5).
    `zero_group`: a 0 may mean "this platform cannot report"; decided for a run as a whole, never at the parser.
    `since`: the first engine that wrote it, as far as files show; empty when it was always there.
    `done`: the `BMOE_DONE` spelling of a trailer key.
    """

    name: str
    type: Type
    unit: str = ""
    doc: str = ""
    since: str = ""
    minus_one: bool = False
    zero_group: str = ""
    done: str = ""


Table = Mapping[str, Column]


def _table(rows: Iterable[Column]) -> Table:
    return {row.name: row for row in rows}


def done_spelling(trailer_key: str) -> str:
    """The `BMOE_DONE` spelling of a trailer key: `s/tok` is `s_tok`, `read_MiB` is `read_mib`; others keep their name."""
    return trailer_key.replace("/", "_").replace("MiB", "mib")


_C = Column

METRICS: Table = _table(
    [
        _C("step", "int", "", "1-based index of the token in its turn (Per-token rows)"),
        _C("steps", "int", "", "tokens asked for; a target, not a count"),
        _C("wall_ms", "float", "ms", "time of llama_decode; excludes what lies between two decodes"),
        _C(
            "io_ms",
            "float",
            "ms",
            "serial: wall time blocked on reads; overlap: summed lane busy time, may exceed wall_ms",
        ),
        _C("compute_ms", "float", "ms", "residual clamped at 0, not a measurement of compute"),
        _C("read_bytes", "int", "B", "flash bytes read this token"),
        _C("cache_hit_pct", "float", "%", "cumulative cache hit rate; -1 without a cache", minus_one=True),
        _C("stall_ms", "float", "ms", "overlap: wall time lost to reads; 0 in serial mode", "0.1.1"),
        _C("mgmt_ms", "float", "ms", "cache management: commit, eviction, bookkeeping", "0.3"),
        _C("majflt", "int", "", "major page faults served", "0.7", zero_group="cpu"),
        _C("cpu_ms", "float", "ms", "CPU time over all threads", "0.7", zero_group="cpu"),
        _C("dense_resident_frac", "float", "1", "sampled share of dense weights in RAM", "0.8", minus_one=True),
        _C("turn", "int", "", "which generation the token belongs to, from 0", "0.8"),
        _C("majflt_mib", "float", "MiB", "majflt x page size", "0.8", zero_group="cpu"),
        _C("cache_budget_mib", "float", "MiB", "expert-cache budget in effect", "0.8"),
        _C("rss_mib", "float", "MiB", "VmRSS", "0.8", zero_group="process"),
        _C(
            "rss_anon_mib",
            "float",
            "MiB",
            "resident anonymous memory: the expert cache lives here",
            "0.8",
            zero_group="process",
        ),
        _C(
            "rss_file_mib", "float", "MiB", "resident file-backed memory: the mapped model", "0.8", zero_group="process"
        ),
        _C("swap_mib", "float", "MiB", "VmSwap", "0.8", zero_group="process"),
        _C("mem_available_mib", "float", "MiB", "MemAvailable", "0.8", zero_group="device"),
        _C("mem_free_mib", "float", "MiB", "MemFree", "0.8", zero_group="device"),
        _C("swap_free_mib", "float", "MiB", "SwapFree", "0.8", zero_group="device"),
        _C("loop_overhead_ms", "float", "ms", "wall between the previous decode and this one", "0.17"),
        _C("mtp_batch", "int", "", "tokens this row's decode confirmed; its cost is on the group's first row", "0.18"),
        _C("mtp_draft_ms", "float", "ms", "drafting time of the group; a slice of loop_overhead_ms", "0.18"),
        _C("drain_ms", "float", "ms", "waiting for the previous layer's reads; part of compute_ms", "0.19"),
        _C("adopt_ms", "float", "ms", "waiting for committed speculative reads; part of mgmt_ms", "0.19"),
        _C("ra_issue_ms", "float", "ms", "issuing route-ahead's early reads; part of compute_ms", "0.19"),
        _C("ra_wd_ms", "float", "ms", "route-ahead watchdog; part of compute_ms", "0.19"),
        _C("resident_frac", "float", "1", "development builds only", "0.8", minus_one=True),
    ]
)
"""Columns of the metrics CSV (contract "CSV sink", generations "Metrics CSV headers")."""

OLDEST_METRICS = ("step", "steps", "wall_ms", "io_ms", "compute_ms", "read_bytes", "cache_hit_pct")
"""The columns every generation of the file has."""

PROGRESS: Table = _table(
    [
        METRICS["step"],
        METRICS["steps"],
        METRICS["wall_ms"],
        METRICS["io_ms"],
        METRICS["compute_ms"],
        METRICS["mgmt_ms"],
        METRICS["stall_ms"],
        _C("read_mb", "float", "MiB", "flash read this token, in MiB and rounded: never turned into read_bytes"),
        METRICS["cache_hit_pct"],
        METRICS["majflt"],
        METRICS["cpu_ms"],
        METRICS["dense_resident_frac"],
        _C("reset", "int", "", "1: the deltas on this line replace what came before", "0.18"),
        _C("delta_reasoning", "str", "", "new reasoning text", "0.18"),
        _C("delta_text", "str", "", "new answer text", "0.18"),
        _C("reasoning", "str", "", "the whole reasoning so far", "0.9.2"),
        _C("text", "str", "", "the whole answer so far", "0.3"),
    ]
)
"""Keys of BMOE_PROGRESS (contract "Per-token lines")."""

LOAD: Table = _table(
    [
        _C("mb", "float", "MiB", "flash read this token; some engines print zeros"),
        _C("ms", "float", "ms", "read time"),
    ]
)

READY: Table = _table(
    [
        _C("load_s", "float", "s", "model load"),
        _C("arch", "str", "", "architecture"),
        _C("n_ctx", "int", "tokens", "context size"),
        _C("think_ctl", "str", "", "template, prefill or none: how think=false can be honoured"),
        _C("n_expert_used", "int", "", "effective routing width; 0 on a model without experts"),
    ]
)

BEGIN: Table = _table([_C("id", "int", "", "request id")])

_PREFILL = [
    _C("prefill_cpu_s", "float", "s", "process CPU over the prompt phase", "0.23"),
    _C("prefill_read_mib", "float", "MiB", "flash read by the prompt phase", "0.23"),
    _C("prefill_io_s", "float", "s", "read time of the prompt phase; summed lanes under overlap", "0.23"),
    _C("prefill_stall_s", "float", "s", "union of stalled intervals in the prompt phase", "0.23"),
    _C("prefill_mgmt_s", "float", "s", "cache management in the prompt phase", "0.23"),
]
_PREFILL_DEVICE = [
    _C("prefill_dev_tokens", "int", "tokens", "prompt tokens run on the prefill device", "0.24"),
    _C("prefill_dev_nodes", "int", "", "graph nodes the device computed: the proof it ran", "0.24"),
    _C("prefill_dev_read_mib", "float", "MiB", "read by the device's expert arena", "0.24"),
    _C("prefill_dev_stall_s", "float", "s", "the device graph waiting for the arena", "0.24"),
]

DONE: Table = _table(
    [
        _C("id", "int", "", "request id"),
        _C("cancelled", "bool", "", "the turn was interrupted by a cancel"),
        _C("tokens", "int", "tokens", "tokens generated"),
        _C("tok_s", "float", "tokens/s", "decode time alone; excludes what lies between decodes"),
        _C("prefill_s", "float", "s", "prompt phase"),
        _C("prefill_tps", "float", "tokens/s", "prompt rate"),
        _C("load_s", "float", "s", "model load"),
        METRICS["cache_hit_pct"],
        _C("n_prompt", "int", "tokens", "prompt tokens prefilled this turn"),
        _C("n_past", "int", "tokens", "context length after the turn"),
        _C("compute_s_tok", "float", "s/token", "mean of the compute residual"),
        _C("io_s_tok", "float", "s/token", "mean of io_ms"),
        _C("cache_resident_mib", "float", "MiB", "cache in memory"),
        _C("cache_budget_mib", "float", "MiB", "cache budget"),
        _C("read_mib", "float", "MiB", "flash read by this generation"),
        _C("stall_s_tok", "float", "s/token", "mean of stall_ms"),
        _C("mgmt_s_tok", "float", "s/token", "mean of mgmt_ms"),
        _C("majflt_tok", "float", "1/token", "major faults a token", zero_group="cpu"),
        _C("cpu_s_tok", "float", "s/token", "CPU a token", zero_group="cpu"),
        *_PREFILL,
        *_PREFILL_DEVICE,
        _C("token_demand_mib", "float", "MiB", "expert bytes one token routes, measured"),
        _C("mtp_drafted", "int", "", "tokens drafted", "0.18"),
        _C("mtp_accepted", "int", "", "drafts accepted", "0.18"),
        _C("mtp_decodes", "int", "", "decodes the generation cost", "0.18"),
        _C("mtp_draft_s_tok", "float", "s/token", "drafting a token", "0.18"),
        _C("drafted_steps", "int", "", "passes that drafted at all", "0.19"),
        _C("loop_overhead_s_tok", "float", "s/token", "between decodes; tok_s excludes it", "0.17"),
        _C("reasoning", "str", "", "final reasoning"),
        _C("text", "str", "", "final answer"),
    ]
)
"""Keys of BMOE_DONE (contract "Session mode")."""

DECIDE: Table = _table(
    [
        _C("id", "int", "", "request id"),
        _C("cancelled", "bool", "", "interrupted by a cancel"),
        _C("best", "int", "", "index of the highest choice"),
        _C("choice_logp", "list", "", "log-probability of each choice's first token; null is minus infinity"),
        _C("n_tokens", "int", "tokens", "tokens of the request"),
        _C("n_reused", "int", "tokens", "restored from the kept prefix state"),
        _C("n_prefilled", "int", "tokens", "prefilled"),
        _C("restore_s", "float", "s", "restoring the state"),
        _C("store_s", "float", "s", "keeping the state"),
        _C("prefill_s", "float", "s", "prompt phase"),
        *_PREFILL,
        _PREFILL_DEVICE[0],
        _PREFILL_DEVICE[2],
        _PREFILL_DEVICE[3],
        _C("prefill_dev_routed", "int", "", "(layer, expert) pairs the prefill routed to"),
        _C("prefill_dev_demand", "int", "", "of those, missed by the prediction and read at the routing node"),
        _C("prefix_state_mib", "float", "MiB", "memory the kept state holds"),
    ]
)

ERROR: Table = _table(
    [
        _C("id", "int", "", "request id; 0 while loading"),
        _C("fatal", "bool", "", "the process is ending"),
        _C("msg", "str", "", "what was wrong"),
    ]
)


def _trailer(name: str, kind: Type, unit: str = "", doc: str = "", since: str = "", minus_one: bool = False) -> Column:
    return Column(name, kind, unit, doc, since, minus_one, done=done_spelling(name))


TRAILER: Table = _table(
    [
        _trailer("tokens", "int", "tokens", "tokens generated"),
        _trailer("s/tok", "float", "s/token", "decode time a token"),
        _trailer("tok/s", "float", "tokens/s", "decode rate; excludes what lies between decodes"),
        _trailer("read_MiB", "float", "MiB", "flash read"),
        _trailer("io_s", "float", "s", "read time"),
        _trailer("compute_s/tok", "float", "s/token", "mean of the compute residual"),
        _trailer("io_s/tok", "float", "s/token", "mean of io_ms"),
        _trailer("cache_hit_pct", "float", "%", "cache hit rate; -1 without a cache", minus_one=True),
        _trailer("n_prompt", "int", "tokens", "prompt tokens prefilled"),
        _trailer("load_s", "float", "s", "model load"),
        _trailer("prefill_s", "float", "s", "prompt phase"),
        _trailer("prefill_tps", "float", "tokens/s", "prompt rate"),
        _trailer("stall_s/tok", "float", "s/token", "mean of stall_ms", "0.1.1"),
        _trailer("mgmt_s/tok", "float", "s/token", "mean of mgmt_ms", "0.3"),
        _trailer("cache_resident_MiB", "float", "MiB", "cache in memory"),
        _trailer("cache_budget_MiB", "float", "MiB", "cache budget"),
        _trailer("cache_resizes", "int", "", "times the budget moved (retired governor)"),
        _trailer("spec_read_MiB", "float", "MiB", "read speculatively"),
        _trailer("spec_experts", "int", "", "experts fully read ahead"),
        _trailer("spec_useful", "int", "", "of those, hit by a later routing"),
        _trailer("majflt/tok", "float", "1/token", "major faults a token", "0.7"),
        _trailer("cpu_s/tok", "float", "s/token", "CPU a token", "0.7"),
        _trailer("token_demand_MiB", "float", "MiB", "expert bytes one token routes, measured"),
        _trailer("layer_demand_MiB", "float", "MiB", "widest layer's routed bytes"),
        _trailer("experts_routed", "int", "", "routings while generating"),
        _trailer("experts_dropped", "int", "", "routings discarded"),
        _trailer("experts_reranked", "int", "", "slots substitution examined", "0.24"),
        _trailer("experts_substituted", "int", "", "slots moved to a resident expert", "0.24"),
        _trailer("row_table_MiB", "float", "MiB", "row-gathered tables under the dense policy", "0.24"),
        _trailer("row_resident_MiB", "float", "MiB", "what they occupy", "0.24"),
        _trailer("row_rows", "int", "", "rows gathered", "0.24"),
        _trailer("row_reads", "int", "", "reads it took", "0.24"),
        _trailer("row_read_MiB", "float", "MiB", "bytes it took", "0.24"),
        _trailer("row_evictions", "int", "", "slabs evicted", "0.24"),
        _trailer("row_io_errors", "int", "", "failed reads: the text is not trustworthy", "0.24"),
        _trailer("loop_overhead_s/tok", "float", "s/token", "between decodes, the tail after the last token included"),
        _trailer("mtp_drafted", "int", "", "tokens drafted"),
        _trailer("mtp_accepted", "int", "", "drafts accepted"),
        _trailer("mtp_decodes", "int", "", "decodes the generation cost"),
        _trailer("mtp_draft_s/tok", "float", "s/token", "drafting a token"),
        _trailer("drafted_steps", "int", "", "steps that drafted at all"),
        _trailer("ra_committed", "int", "", "routings replaced by the early prediction"),
        _trailer("ra_passthrough", "int", "", "eligible routings that kept the router's choice"),
        _trailer("ra_agree_pct", "float", "%", "slots on which prediction and router agreed"),
        _trailer("ra_gemv_ms/tok", "float", "ms/token", "prediction's worker CPU"),
        _trailer("ra_issue_ms/tok", "float", "ms/token", "issuing the early reads"),
        _trailer("ra_wd_ms/tok", "float", "ms/token", "watchdog"),
        _trailer("drain_s/tok", "float", "s/token", "mean of drain_ms"),
        _trailer("adopt_s/tok", "float", "s/token", "mean of adopt_ms"),
        _trailer("evictions", "int", "", "cache entries evicted"),
        _trailer("rereads", "int", "", "reads of an entry the cache had held before"),
        *(_trailer(c.name, c.type, c.unit, c.doc, c.since) for c in (*_PREFILL, *_PREFILL_DEVICE)),
    ]
)
"""Keys of the `# summary` line (contract "Per-token rows"); `done` is the spelling they are stored under."""

PREAMBLE: Table = _table(
    [
        _C("engine", "str", "", "version that produced the rows; not unique"),
        _C("model", "str", "", "model file; may hold spaces"),
        _C("arch", "str", "", "architecture"),
        _C("n_layer", "int", "", "layers"),
        _C("n_expert", "int", "", "experts a layer"),
        _C("n_expert_used", "int", "", "effective top-k"),
        _C("threads", "int", "", "compute threads"),
        _C("n_ctx", "int", "tokens", "context size"),
        _C("n_ubatch", "int", "tokens", "compute-buffer reservation; 0 follows n_batch"),
        _C("chatml", "int", "", "0|1"),
        _C("moe_stream", "int", "", "0|1: 0 is plain llama.cpp on mmap, a baseline"),
        _C("cache_mb", "int", "MiB", "what the streamer settled on"),
        _C("cache_auto", "int", "", "0|1"),
        _C("cache_floor_mb", "int", "MiB", ""),
        _C("cache_ceil_mb", "int", "MiB", ""),
        _C("cache_cycle_mb", "float", "MiB", "one token's worst-case routed bytes"),
        _C("cache_policy", "str", "", "some older files"),
        _C("force_cache", "int", "", "0|1"),
        _C("load_all", "int", "", "0|1: reads the whole expert set"),
        _C("io_threads", "int", "", "read lanes"),
        _C("o_direct", "int", "", "0|1: what the opens achieved"),
        _C("overlap", "int", "", "0|1"),
        _C("io_two_wave", "int", "", "0|1"),
        _C("prefetch", "int", "", "layers read ahead"),
        _C("route_ahead", "int", "", "layers"),
        _C("predict_prefetch", "int", "", "0|1"),
        _C("predict_log", "int", "", "0|1: instrumented"),
        _C("predict_spec_max", "int", "", ""),
        _C("prefetch_sync", "int", "", "0|1: instrumented"),
        _C("dense_weights", "str", "", "mmap, warm, anon or ahwb"),
        _C("drop_cold_frac", "float", "1", "threshold, not a rate"),
        _C("drop_renorm", "int", "", "0|1"),
        _C("drop_prefill", "int", "", "0|1"),
        _C("substitute_lambda", "float", "", "expert substitution"),
        _C("temp", "float", "", "above 0 the run was stochastic"),
        _C("top_k", "int", "", ""),
        _C("top_p", "float", "", ""),
        _C("seed", "int", "", "4294967295: random and not recorded"),
        _C("compute_trace_layers", "int", "", "above 0 the run was instrumented"),
        _C("spec", "str", "", "off, mtp or ngram"),
        _C("mtp", "int", "", "0|1: earlier spelling of spec=mtp"),
        _C("spec_draft_max", "int", "", ""),
        _C("mtp_p_min", "float", "", ""),
        _C("ngram_min_match", "int", "", ""),
        # Only traces:
        _C("n_threads", "int", "", "compute threads (traces)"),
        _C("layer", "int", "", "layer the facts are of (route trace)"),
        _C("expert_bytes", "int", "B", "bytes of one expert of the layer (route trace)"),
        _C("dense_bytes", "int", "B", "bytes of the layer's dense weights (route trace)"),
    ]
)
"""Keys of `#` preambles (contract "Run-parameter preamble", "Route trace", "Decode traces")."""

ROUTE: Table = _table(
    [
        _C("turn", "int", "", "session turn, 0 for one-shot"),
        _C("phase", "int", "", "0 prefill, 1 decode"),
        _C("step", "int", "", "absolute context position"),
        _C("layer", "int", "", "MoE layer"),
        _C("slot", "int", "", "router's rank order"),
        _C("expert", "int", "", "routed expert"),
        _C("weight", "float", "", "applied routing weight; nan is unknown"),
        _C("residency", "int", "", "0 miss, 1 hit, 2 first touch of a speculative read"),
        _C("expert_bytes", "int", "B", "flash bytes this routing reads; per read, not per routing"),
        _C("dropped", "int", "", "1: discarded by dropping"),
    ]
)

COMPUTE: Table = _table(
    [
        _C("turn", "int", "", "session turn"),
        _C("phase", "int", "", "0 prefill, 1 decode"),
        _C("step", "int", "", "absolute context position"),
        _C("seq", "int", "", "execution order in the decode"),
        _C("layer", "int", "", "-1 is a true value: belongs to no layer"),
        _C("op", "str", "", "ggml op, or LAYER"),
        _C("name", "str", "", "graph node, or segment"),
        _C("wall_ns", "int", "ns", "time of the node"),
        _C("majflt", "int", "", "major faults in it"),
    ]
)

IO: Table = _table(
    [
        _C("turn", "int", "", "session turn"),
        _C("phase", "int", "", "0 prefill, 1 decode"),
        _C("step", "int", "", "decode the read was drained after"),
        _C("layer", "int", "", "layer"),
        _C("expert", "int", "", "expert"),
        _C("proj", "int", "", "projection"),
        _C("lane", "int", "", "read lane"),
        _C("spec", "int", "", "1: speculative"),
        _C("offset", "int", "B", "file offset"),
        _C("req_bytes", "int", "B", "what was wanted"),
        _C("read_bytes", "int", "B", "aligned window read"),
        _C("latency_ns", "int", "ns", "time of the read"),
    ]
)

SIDECAR: Table = _table(
    [
        _C("peak_rss_kb", "int", "kB", ""),
        _C("mem_avail_before_kb", "int", "kB", ""),
        _C("mem_avail_floor_kb", "int", "kB", ""),
        _C("mem_avail_after_kb", "int", "kB", ""),
        _C("batt_temp_before_dC", "int", "0.1 °C", ""),
        _C("batt_temp_max_dC", "int", "0.1 °C", ""),
        _C("batt_temp_after_dC", "int", "0.1 °C", ""),
        _C("cpu_temp_before_mC", "int", "0.001 °C", ""),
        _C("cpu_temp_max_mC", "int", "0.001 °C", ""),
    ]
)
"""Keys of a pressure sidecar (generations "Metrics CSV headers")."""
