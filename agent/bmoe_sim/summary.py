"""A generation's totals in the three texts the contract has for them.

Comes in: a `Summary` and the run's options. Goes out: the one-shot report ("End-of-run lines"), the `# summary`
trailer ("Per-token rows") and the BMOE_DONE line ("Session mode"). The pose decides which keys and lines exist.
"""

import random

from bmoe_sim.argv import Options
from bmoe_sim.row import Summary, escape
from bmoe_sim.settings import Settings

_MIB = 1 << 20


def trailer(s: Summary, settings: Settings) -> str:
    """The CSV's `# summary` line."""
    c = s.count
    per = s.per_token_s
    routings = c.ra_slots or 1
    n = max(1, s.tokens)
    words = [
        f"# summary tokens={s.tokens} s/tok={per(s.wall_ms):.3f} tok/s={s.tok_s:.3f} read_MiB={s.read_mib:.1f}",
        f"io_s={s.io_ms / 1e3:.2f} compute_s/tok={per(s.compute_ms):.3f} io_s/tok={per(s.io_ms):.3f}",
        f"cache_hit_pct={s.hit_pct:.1f} n_prompt={s.n_prompt} load_s={s.load_s:.3f} prefill_s={s.prefill.seconds:.3f}",
        f"prefill_tps={s.prefill_tps:.2f} stall_s/tok={per(s.stall_ms):.3f} mgmt_s/tok={per(s.mgmt_ms):.3f}",
        f"cache_resident_MiB={s.resident_mib:.1f} cache_budget_MiB={s.budget_mib:.1f} cache_resizes=0",
        f"spec_read_MiB={c.spec_bytes / _MIB:.1f} spec_experts={c.spec_experts} spec_useful={c.spec_useful}",
        f"majflt/tok={s.majflt / n:.2f} cpu_s/tok={per(s.cpu_ms):.4f} token_demand_MiB={s.demand_bytes / n / _MIB:.1f}",
        f"layer_demand_MiB={s.widest_layer_bytes / _MIB:.1f} experts_routed={c.routed} experts_dropped={c.dropped}",
    ]
    if not settings.old:
        words.append(f"experts_reranked={c.reranked} experts_substituted={c.substituted}")
    words += [
        f"loop_overhead_s/tok={per(s.overhead_ms):.4f} mtp_drafted={s.drafted} mtp_accepted={s.accepted}",
        f"mtp_decodes={s.decodes} mtp_draft_s/tok={per(s.draft_ms):.4f} drafted_steps={s.drafted_steps}",
        f"ra_committed={c.ra_committed} ra_passthrough={c.ra_passed} ra_agree_pct={100.0 * c.ra_agreed / routings:.1f}",
        f"ra_gemv_ms/tok={_gemv_ms(s):.2f} ra_issue_ms/tok={s.ra_issue_ms / n:.2f} ra_wd_ms/tok={s.ra_wd_ms / n:.2f}",
        f"drain_s/tok={per(s.drain_ms):.3f} adopt_s/tok={per(s.adopt_ms):.3f}",
        f"evictions={c.evictions} rereads={c.rereads}",
    ]
    if not settings.old:
        p = s.prefill
        words += [
            f"row_table_MiB={s.row_table_mib:.1f} row_resident_MiB={_row_resident(s):.1f} row_rows={s.row_rows}",
            f"row_reads={s.row_reads} row_read_MiB={s.row_read_mib:.1f} row_evictions=0 row_io_errors={s.row_errors}",
            f"prefill_cpu_s={p.cpu:.3f} prefill_read_mib={p.read_mib:.1f} prefill_io_s={p.io:.3f}",
            f"prefill_stall_s={p.stall:.3f} prefill_mgmt_s={p.mgmt:.3f} prefill_dev_tokens={s.dev_tokens}",
            f"prefill_dev_nodes={s.dev_nodes} prefill_dev_read_mib={s.dev_read_mib:.1f}",
            f"prefill_dev_stall_s={s.dev_stall_s:.3f}",
        ]
    return " ".join(words) + "\n"


def done(s: Summary, request: int, settings: Settings) -> bytes:
    """The BMOE_DONE line."""
    p = s.prefill
    per = s.per_token_s
    n = max(1, s.tokens)
    parts = [
        f'"id":{request},"cancelled":{"true" if s.cancelled else "false"},"tokens":{s.tokens},"tok_s":{s.tok_s:.3f}',
        f'"prefill_s":{p.seconds:.3f},"prefill_tps":{s.prefill_tps:.2f},"load_s":{s.load_s:.3f}',
        f'"cache_hit_pct":{s.hit_pct:.1f},"n_prompt":{s.n_prompt},"n_past":{s.n_past}',
        f'"compute_s_tok":{per(s.compute_ms):.4f},"io_s_tok":{per(s.io_ms):.4f}',
        f'"cache_resident_mib":{s.resident_mib:.0f},"cache_budget_mib":{s.budget_mib:.0f},"read_mib":{s.read_mib:.1f}',
        f'"stall_s_tok":{per(s.stall_ms):.4f},"mgmt_s_tok":{per(s.mgmt_ms):.4f},"majflt_tok":{s.majflt / n:.2f}',
        f'"cpu_s_tok":{per(s.cpu_ms):.4f}',
    ]
    if not settings.old:
        parts += [
            f'"prefill_cpu_s":{p.cpu:.3f},"prefill_read_mib":{p.read_mib:.1f},"prefill_io_s":{p.io:.3f}',
            f'"prefill_stall_s":{p.stall:.3f},"prefill_mgmt_s":{p.mgmt:.3f},"prefill_dev_tokens":{s.dev_tokens}',
            f'"prefill_dev_nodes":{s.dev_nodes},"prefill_dev_read_mib":{s.dev_read_mib:.1f}',
            f'"prefill_dev_stall_s":{s.dev_stall_s:.3f}',
        ]
    parts += [
        f'"token_demand_mib":{s.demand_bytes / n / _MIB:.1f},"mtp_drafted":{s.drafted},"mtp_accepted":{s.accepted}',
        f'"mtp_decodes":{s.decodes},"mtp_draft_s_tok":{per(s.draft_ms):.4f},"drafted_steps":{s.drafted_steps}',
        f'"loop_overhead_s_tok":{per(s.overhead_ms):.4f}',
    ]
    head = "BMOE_DONE {" + ",".join(parts)
    return head.encode() + b',"reasoning":"' + escape(s.reasoning) + b'","text":"' + escape(s.text) + b'"}\n'


def report(s: Summary, o: Options, arch: str, settings: Settings, moe_layers: list[int]) -> str:
    """The report after a one-shot run, from `generation:` on."""
    per = s.per_token_s
    c = s.count
    n = max(1, s.tokens)
    out = [f"generation: {s.tokens} tokens, {per(s.wall_ms):.3f} s/token ({s.tok_s:.3f} tok/s)"]
    if s.cpu_ms > 0 or s.majflt:
        busy = s.cpu_ms / (s.wall_ms * o.threads) if s.wall_ms > 0 else 0.0
        out.append(
            f"compute: {100 * busy:.1f}% CPU occupancy ({per(s.cpu_ms):.4f} cpu-s/token over {o.threads} threads), "
            f"{s.majflt / n:.2f} major faults/token"
        )
    out += _speculation(s, o)
    if s.n_prompt:
        out.append(
            f"prefill: {s.n_prompt} tokens, {s.prefill.seconds:.3f} s ({s.prefill_tps:.1f} tok/s) | "
            f"model load {s.load_s:.3f} s | TTFT {s.load_s + s.prefill.seconds:.3f} s"
        )
    if not settings.old:
        out.append(_mode(o, arch, streams=bool(moe_layers)))
    if o.moe_stream:
        rate = s.read_mib / (s.io_ms / 1e3) if s.io_ms > 0 else 0.0
        out.append(
            f"moe-stream: read {s.read_mib:.1f} MiB ({s.read_mib / n:.2f} MiB/token), decode {per(s.wall_ms):.3f} "
            f"s/token (compute {per(s.compute_ms):.3f} + cache mgmt {per(s.mgmt_ms):.3f} + flash I/O "
            f"{per(s.io_ms):.3f} s/token, {rate:.0f} MiB/s)" + _stall(s, o, settings)
        )
        if s.hit_pct >= 0:
            sized = f", budget {s.budget_mib:.0f} MiB (auto)" if o.cache_auto else ""
            out.append(f"moe-cache: {s.hit_pct:.1f}% hit, resident {s.resident_mib:.1f} MiB{sized}")
            if c.evictions or c.rereads:
                out.append(
                    f"moe-cache: {c.evictions} evictions, {c.rereads} re-reads ({c.rereads / n:.1f}/token) — bytes "
                    "the cache had already paid for once"
                )
        out += _stream_extras(s, o)
        if settings.arms:
            out.append(f"arms: 2 settings in blocks of {settings.arms} tokens")
        if o.predict_log:
            out += _predict(s, moe_layers, max(1, o.n_expert_used), settings.seed)
    return "\n".join(out) + "\n"


def _stall(s: Summary, o: Options, settings: Settings) -> str:
    # The contract's moe-stream line carries the stall under overlap; 0.19 has it on moe-overlap alone.
    return f" stall_s/tok={s.per_token_s(s.stall_ms):.3f}" if o.overlap and not settings.old else ""


def _mode(o: Options, arch: str, *, streams: bool) -> str:
    if o.moe_stream:
        cache = "auto" if o.cache_auto else f"{o.cache_mb} MiB" if o.cache_mb else "off"
        return f"mode: expert streaming, cache {cache}, dense {o.dense_weights}{', overlap' if o.overlap else ''}"
    if streams:
        return f"mode: mmap. Expert streaming is off on a MoE model ({arch}): add --moe-stream to stream the experts."
    return f"mode: mmap ({arch} is not a MoE architecture this build streams)"


def _speculation(s: Summary, o: Options) -> list[str]:
    if o.spec == "off" or not s.decodes:
        return []
    per = s.per_token_s
    total = per(s.wall_ms) + per(s.draft_ms)
    rate = 100.0 * s.accepted / s.drafted if s.drafted else 0.0
    out = [
        (
            f"{o.spec}: {s.accepted}/{s.drafted} drafts accepted ({rate:.1f}%), {s.tokens / s.decodes:.2f} tokens per "
            f"verify decode ({s.decodes} decodes for {s.tokens} tokens)"
        ),
        (
            f"{o.spec}: drafting costs {per(s.draft_ms):.4f} s/token on top of decode → "
            f"{1 / total if total else 0:.2f} tok/s effective (vs {s.tok_s:.2f} reported)"
        ),
    ]
    if o.spec == "ngram":
        share = 100.0 * s.drafted_steps / s.decodes
        out.append(f"ngram: drafted on {s.drafted_steps} of {s.decodes} steps ({share:.1f}%); the rest decoded plainly")
    elif s.read_bytes:
        out.append(
            f"mtp: of {s.read_mib:.1f} MiB streamed, 0.0 MiB (0.0%) was the head's own routing, {s.read_mib:.1f} MiB "
            "the widened verify batch"
        )
    return out


def _stream_extras(s: Summary, o: Options) -> list[str]:
    c = s.count
    per = s.per_token_s
    out = []
    if s.row_table_mib > 0:
        out.append(
            f"moe-rows: {s.row_table_mib:.0f} MiB of row-gathered table(s) off the resident set, "
            f"{_row_resident(s):.1f} MiB resident, {s.row_rows} rows gathered, {s.row_reads} reads "
            f"({s.row_read_mib:.1f} MiB)"
        )
        if s.row_errors:
            out.append(f"moe-rows: {s.row_errors} FAILED reads — this run's output is not trustworthy")
    if o.overlap:
        out.append(f"moe-overlap: stall {per(s.stall_ms):.3f} s/token (flash reads overlapped with FFN compute)")
    if per(s.drain_ms) >= 0.0005 or per(s.adopt_ms) >= 0.0005:
        out.append(
            f"moe-waits: drain {per(s.drain_ms):.3f} s/token (inside compute), adopt {per(s.adopt_ms):.3f} s/token "
            "(inside mgmt)"
        )
    if o.prefetch or o.predict_prefetch or o.route_ahead:
        tag = " [route-ahead]" if o.route_ahead else " [stale-gate]" if o.predict_prefetch else ""
        share = 100.0 * c.spec_useful / c.spec_experts if c.spec_experts else 0.0
        out.append(
            f"moe-prefetch: {c.spec_bytes / _MIB:.1f} MiB speculative, {c.spec_useful}/{c.spec_experts} experts "
            f"useful ({share:.0f}%){tag}"
        )
    if o.drop_cold:
        share = 100.0 * c.dropped / c.routed if c.routed else 0.0
        out.append(
            f"moe-drop: {c.dropped}/{c.routed} routed experts dropped ({share:.1f}%), threshold {o.drop_cold:.2f} x "
            "uniform"
        )
    if o.substitute:
        share = 100.0 * c.substituted / c.reranked if c.reranked else 0.0
        out.append(
            f"moe-substitute: {c.substituted}/{c.reranked} reranked slots went to a resident expert ({share:.1f}%), "
            f"margin {o.substitute:.2f} x score range"
        )
    if o.route_ahead:
        agreed = 100.0 * c.ra_agreed / c.ra_slots if c.ra_slots else 0.0
        out.append(
            f"moe-route-ahead: {o.route_ahead} layers early — {c.ra_committed} routings committed, {c.ra_passed} "
            f"passed through; committed selection agreed with the router on {agreed:.1f}% of slots"
        )
    return out


def _gemv_ms(s: Summary) -> float:
    return 0.05 * s.count.ra_committed / max(1, s.tokens)


def _row_resident(s: Summary) -> float:
    return min(s.row_read_mib, s.row_table_mib)


def _predict(s: Summary, layers: list[int], used: int, seed: int) -> list[str]:
    rng = random.Random(f"predict {seed}")
    steps = max(0, s.tokens - 1)  # neither predictor can speak for a run's first token
    prev_rows, stale_rows = len(layers) * steps, max(0, len(layers) - 1) * steps
    all_rows = len(layers) * s.tokens
    table = []
    stale_sum = prev_sum = 0.0
    for depth, layer in enumerate(layers):
        stale, prev = 78 + 12 * rng.random(), 35 + 10 * rng.random()
        stale_sum += stale if depth else 0.0
        prev_sum += prev
        rows = steps if depth else 0
        first = f"{stale:6.1f}" if rows else f"{'-':>6}"
        second = f"{prev:6.1f}" if steps else f"{'-':>6}"
        table.append(f"  {layer:5d}  {first}  {second} {100.0:6.1f}     {rows:6d}")
    mean_stale = stale_sum / (len(layers) - 1) if stale_rows else 0.0
    mean_prev = prev_sum / len(layers) if prev_rows else 0.0
    return [
        (
            f"moe-predict: stale-gate {mean_stale:.1f}% of routed slots ({mean_stale / 3:.1f}% whole routings) | prev-token "
            f"{mean_prev:.1f}% ({mean_prev / 12:.1f}%) | fresh-gate control 100.0% (100.0%)"
        ),
        (
            f"moe-predict: stale-2 (two layers early) {mean_stale * 0.9:.1f}% of routed slots ({mean_stale / 4:.1f}% whole "
            "routings)"
        ),
        (
            f"moe-predict: scored — stale-gate {stale_rows} routings/{stale_rows * used} slots, prev-token "
            f"{prev_rows}/{prev_rows * used}, control {all_rows}/{all_rows * used}; {all_rows - stale_rows} routings the "
            "stale-gate could not rank"
        ),
        "  layer   stale    prev   ctrl   routings",
        *table,
    ]
