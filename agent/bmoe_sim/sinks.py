"""The files the engine writes: metrics CSV and the three traces.

Comes in: the model, the options, then rows. Goes out: files in the contract's formats ("CSV sink", "Route trace",
"Decode traces"), every write whole rows, so that a killed process leaves whole rows and no trailer.
"""

import os

from bmoe_sim import row as rows
from bmoe_sim.argv import Options
from bmoe_sim.model import Model
from bmoe_sim.output import Sink, complain, open_sink
from bmoe_sim.settings import Settings
from bmoe_sim.streamer import Batch

# One layer of the graph as the trace shows it: (op, name, belongs to the layer); names carry the layer's number.
_LAYER_OPS = (
    ("RMS_NORM", "norm-{}", True),
    ("MUL", "attn_norm-{}", True),
    ("MUL_MAT", "Qcur-{}", True),
    ("ROPE", "Qcur-{}", True),
    ("MUL_MAT", "Vcur-{}", True),
    ("MUL_MAT", "Kcur-{}", True),
    ("ROPE", "Kcur-{}", True),
    ("SET_ROWS", "cache_k_l{} (view)", False),
    ("FLASH_ATTN_EXT", "node_{}", False),
    ("MUL_MAT", "kqv_out-{}", True),
    ("ADD", "ffn_inp-{}", True),
    ("MUL_MAT", "ffn_moe_logits-{}", True),
    ("SOFT_MAX", "ffn_moe_probs-{}", True),
    ("ARGSORT", "ffn_moe_argsort-{}", True),
    ("GET_ROWS", "ffn_moe_weights-{}", True),
    ("MUL_MAT_ID", "ffn_moe_gate-{}", True),
    ("MUL_MAT_ID", "ffn_moe_up-{}", True),
    ("GLU", "ffn_moe_swiglu-{}", True),
    ("MUL_MAT_ID", "ffn_moe_down-{}", True),
    ("ADD", "l_out-{}", True),
)
_HEAVY = {"MUL_MAT": 5, "MUL_MAT_ID": 9, "FLASH_ATTN_EXT": 4}


class Sinks:
    """All files of a process; those not asked for are absent and cost nothing."""

    def __init__(self, model: Model, options: Options, settings: Settings, copies: str) -> None:
        o = options
        self.csv = open_sink(o.csv, "csv", copies)
        self.route = self._streaming_only(o, o.route_trace, "--route-trace", "route trace", copies)
        self.io = self._streaming_only(o, o.io_trace, "--io-trace", "io trace", copies)
        self.compute = open_sink(o.compute_trace, "compute trace", copies)
        self._model, self._o = model, o
        if self.csv:
            self.csv.write(preamble(model, o, settings))
        if self.route:
            lines = [
                "# route_trace v1",
                (
                    f"# model={o.model} arch={model.arch} n_layer={model.n_layer} n_expert={model.n_expert} "
                    f"n_expert_used={o.n_expert_used}"
                ),
            ]
            lines += [
                f"# layer={i} expert_bytes={model.expert_bytes(i)} dense_bytes={model.dense_bytes.get(i, 0)}"
                for i in range(model.n_layer)
            ]
            lines.append("turn,phase,step,layer,slot,expert,weight,residency,expert_bytes,dropped")
            self.route.write("\n".join(lines) + "\n")
        facts = (
            f"# model={o.model} arch={model.arch} n_layer={model.n_layer} n_threads={o.threads} "
            f"io_threads={o.io_threads} o_direct={int(model.o_direct)} overlap={int(o.overlap)}\n"
        )
        if self.compute:
            self.compute.write("# compute_trace v1\n" + facts + "turn,phase,step,seq,layer,op,name,wall_ns,majflt\n")
        if self.io:
            self.io.write(
                "# io_trace v1\n"
                + facts
                + "turn,phase,step,layer,expert,proj,lane,spec,offset,req_bytes,read_bytes,latency_ns\n"
            )

    @staticmethod
    def _streaming_only(o: Options, path: str, flag: str, what: str, copies: str) -> Sink | None:
        if path and not o.moe_stream:
            complain(f"warning: {flag} needs --moe-stream; no trace will be written")
            return None
        return open_sink(path, what, copies)

    def batch(self, batch: Batch, *, turn: int, phase: int, last_step: int, compute_ms: float, majflt: int) -> None:
        """Trace one decode. Reads and nodes carry the last position of a batch of several."""
        if self.route and batch.routed:
            self.route.write(
                "".join(
                    f"{turn},{phase},{r.step},{r.layer},{r.slot},{r.expert},{r.weight:.6g},{r.residency},"
                    f"{r.expert_bytes},{r.dropped}\n"
                    for r in batch.routed
                )
            )
        if self.io and batch.reads:
            self.io.write(
                "".join(
                    f"{turn},{phase},{last_step},{r.layer},{r.expert},{r.proj},{r.lane},{r.spec},{r.offset},"
                    f"{r.req_bytes},{r.read_bytes},{r.latency_ns}\n"
                    for r in batch.reads
                )
            )
        if self.compute:
            nodes = self._segments() if self._o.compute_layers else self._nodes()
            unit = compute_ms * 1e6 / sum(weight for *_, weight in nodes)
            self.compute.write(
                "".join(
                    f"{turn},{phase},{last_step},{seq},{layer},{op},{name},{int(unit * weight)},"
                    f"{majflt if seq == 1 else 0}\n"
                    for seq, (op, name, layer, weight) in enumerate(nodes)
                )
            )

    def _segments(self) -> list[tuple[str, str, int, int]]:
        middle = [("LAYER", f"blk.{i}", i, 20) for i in range(self._model.n_layer)]
        return [("LAYER", "pre", -1, 1), *middle, ("LAYER", "post", -1, 6)]

    def _nodes(self) -> list[tuple[str, str, int, int]]:
        out = [("GET_ROWS", "embd", -1, 1)]
        for i in range(self._model.n_layer):
            out += [(op, name.format(i), i if own else -1, _HEAVY.get(op, 1)) for op, name, own in _LAYER_OPS]
        return [*out, ("RMS_NORM", "norm", -1, 1), ("MUL", "result_norm", -1, 1), ("MUL_MAT", "result_output", -1, 9)]


def preamble(model: Model, o: Options, settings: Settings) -> str:
    """The run-parameter preamble and the header (contract: Run-parameter preamble)."""
    name = os.path.basename(o.model)
    cycle = model.cycle_bytes(o.n_expert_used)
    newer = "" if settings.old else f" cache_cycle_mb={-(-cycle // (1 << 20))}"
    newest = "" if settings.old else f" substitute_lambda={o.substitute:g}"
    return (
        f"# bmoe_metrics v2\n# engine={settings.version}\n"
        f"# model={name} arch={model.arch} n_layer={model.n_layer} n_expert={model.n_expert} "
        f"n_expert_used={o.n_expert_used} threads={o.threads} n_ctx={o.n_ctx} n_ubatch={o.n_ubatch} "
        f"chatml={int(o.chatml)}\n"
        f"# moe_stream={int(o.moe_stream)} cache_mb={o.cache_mb} cache_auto={int(o.cache_auto)} "
        f"cache_floor_mb={o.cache_floor_mb} cache_ceil_mb={o.cache_ceil_mb}{newer} force_cache={int(o.force_cache)} "
        f"load_all={int(o.load_all)} io_threads={o.io_threads} o_direct={int(model.o_direct)} "
        f"overlap={int(o.overlap)} io_two_wave={int(o.io_two_wave)} prefetch={o.prefetch} "
        f"route_ahead={o.route_ahead} predict_prefetch={int(o.predict_prefetch)} predict_log={int(o.predict_log)} "
        f"predict_spec_max={o.predict_spec_max} prefetch_sync={int(o.prefetch_sync)} "
        f"dense_weights={o.dense_weights} drop_cold_frac={o.drop_cold:g} drop_renorm={int(o.drop_renorm)} "
        f"drop_prefill={int(o.drop_in_prefill)}{newest}\n"
        f"# temp={o.temp:g} top_k={o.top_k} top_p={o.top_p:g} seed={o.seed} "
        f"compute_trace_layers={int(o.compute_layers)} spec={o.spec} spec_draft_max={o.draft} "
        f"mtp_p_min={o.mtp_p_min:g} ngram_min_match={o.ngram_min_match}\n"
        + (
            f"# arm_block={settings.arms}\n{rows.COLUMNS},arm,tokens_since_switch\n"
            if settings.arms
            else f"{rows.COLUMNS}\n"
        )
    )
