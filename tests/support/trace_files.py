"""Large traces of the contract's three kinds for the benches: a size in, a file out, in the order an engine writes them.

Two turns, the second of a continued chat; prefill by layer, its last layer routing one token only; skewed routing;
weights as printed with six digits; one read in fifty speculative. The same size gives the same bytes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl

LAYERS, EXPERTS, WIDTH = 48, 128, 8
Prompts = tuple[int, int]
PROMPTS: Prompts = (400, 60)
EXPERT_BYTES = 2_359_296
_NODES = (
    ("RMS_NORM", "norm"), ("MUL", "attn_norm"), ("MUL_MAT", "Qcur"), ("MUL_MAT", "Kcur"), ("MUL_MAT", "Vcur"),
    ("ROPE", "Qcur"), ("SOFT_MAX", "kq_soft_max"), ("MUL_MAT", "kqv_out"), ("ADD", "ffn_inp"), ("MUL_MAT", "ffn_moe_logits"),
    ("ARGSORT", "ffn_moe_argsort"), ("GET_ROWS", "ffn_moe_weights"), ("MUL_MAT_ID", "ffn_moe_gate"), ("MUL_MAT_ID", "ffn_moe_up"),
    ("MUL_MAT_ID", "ffn_moe_down"), ("ADD", "l_out"),
)  # fmt: skip


def route(path: Path, rows: int, prompts: Prompts = PROMPTS) -> None:
    """A route trace of about `rows` rows."""
    rng = np.random.default_rng(7)
    tokens = max(rows // (LAYERS * WIDTH), sum(prompts) + 2)
    turn, phase, step, layer = _cells(tokens, prompts)
    popular = 0.6 * np.log1p(np.arange(EXPERTS))
    experts = np.empty((len(turn), WIDTH), np.int64)
    for at in range(0, len(turn), 20_000):  # the top of perturbed log-weights is a draw without replacement
        some = experts[at : at + 20_000]
        noise = rng.gumbel(size=(len(some), EXPERTS)) - popular
        some[:] = np.argpartition(noise, -WIDTH, axis=1)[:, -WIDTH:]
    weights = np.sort(rng.exponential(size=experts.shape), axis=1)[:, ::-1]
    weights /= weights.sum(axis=1, keepdims=True)
    residency = rng.choice([0, 1, 1, 1, 2], size=experts.shape)
    dropped = (residency == 0) & (weights < 0.02)
    repeat = WIDTH
    pl.DataFrame(
        {
            "turn": np.repeat(turn, repeat),
            "phase": np.repeat(phase, repeat),
            "step": np.repeat(step, repeat),
            "layer": np.repeat(layer, repeat),
            "slot": np.tile(np.arange(WIDTH), len(turn)),
            "expert": experts.ravel(),
            "weight": np.round(weights.ravel(), 6),
            "residency": residency.ravel(),
            "expert_bytes": np.where((residency == 0) & ~dropped, EXPERT_BYTES, 0).ravel(),
            "dropped": dropped.ravel().astype(np.int64),
        }
    ).write_csv(path)
    facts = f"# model=/models/bench.gguf arch=qwen3moe n_layer={LAYERS} n_expert={EXPERTS} n_expert_used={WIDTH}\n"
    layers = "".join(f"# layer={at} expert_bytes={EXPERT_BYTES} dense_bytes=9437184\n" for at in range(LAYERS))
    _preface(path, f"# route_trace v1\n{facts}{layers}")


def compute(path: Path, rows: int, prompts: Prompts = PROMPTS) -> None:
    """A compute trace with a row a graph node, of about `rows` rows."""
    rng = np.random.default_rng(7)
    nodes = [("GET_ROWS", "embd", -1)]
    nodes += [(op, f"{name}-{layer}", layer) for layer in range(LAYERS) for op, name in _NODES]
    nodes += [("RMS_NORM", "result_norm", -1), ("MUL_MAT", "result_output", -1)]
    decodes = max(rows // len(nodes), len(prompts) + 2)
    turn, phase, step = _decodes(decodes, prompts)
    count = decodes * len(nodes)
    faults = np.where(rng.random(count) < 0.02, rng.integers(1, 40, count), 0)
    pl.DataFrame(
        {
            "turn": np.repeat(turn, len(nodes)),
            "phase": np.repeat(phase, len(nodes)),
            "step": np.repeat(step, len(nodes)),
            "seq": np.tile(np.arange(len(nodes)), decodes),
            "layer": np.tile([layer for *_, layer in nodes], decodes),
            "op": [op for op, *_ in nodes] * decodes,
            "name": [name for _, name, _ in nodes] * decodes,
            "wall_ns": rng.gamma(1.5, 60_000, count).astype(np.int64) + 900,
            "majflt": faults,
        }
    ).write_csv(path)
    _preface(path, f"# compute_trace v1\n# model=/models/bench.gguf arch=qwen3moe n_layer={LAYERS} n_threads=4\n")


def io(path: Path, rows: int, prompts: Prompts = PROMPTS) -> None:
    """An I/O trace of about `rows` reads."""
    rng = np.random.default_rng(7)
    each = LAYERS * 2 * 3  # two experts a layer, three projections
    decodes = max(rows // each, len(prompts) + 2)
    turn, phase, step = _decodes(decodes, prompts)
    count = decodes * each
    layer = np.tile(np.repeat(np.arange(LAYERS), 6), decodes)
    expert = np.repeat(rng.integers(0, EXPERTS, count // 3), 3)
    proj = np.tile(np.arange(3), count // 3)
    wanted = np.where(proj == 2, 1_105_920, 884_736)
    offset = ((layer * 3 + proj) * EXPERTS + expert) * 1_105_920
    first = offset // 4096 * 4096
    pulled = -(-(offset + wanted) // 4096) * 4096 - first
    pl.DataFrame(
        {
            "turn": np.repeat(turn, each),
            "phase": np.repeat(phase, each),
            "step": np.repeat(step, each),
            "layer": layer,
            "expert": expert,
            "proj": proj,
            "lane": rng.integers(0, 4, count),
            "spec": (rng.random(count) < 0.02).astype(np.int64),
            "offset": offset,
            "req_bytes": wanted,
            "read_bytes": pulled,
            "latency_ns": rng.gamma(4, 150_000, count).astype(np.int64) + 40_000,
        }
    ).write_csv(path)
    _preface(
        path, f"# io_trace v1\n# model=/models/bench.gguf arch=qwen3moe n_layer={LAYERS} io_threads=4 o_direct=1\n"
    )


def _cells(tokens: int, prompts: Prompts) -> tuple[np.ndarray, ...]:
    """Turn, phase, step and layer of every cell; prefill by layer, decode by step."""
    parts = []
    start = 0
    for turn, (prompt, share) in enumerate(zip(prompts, (0.7, 0.3), strict=True)):
        decode = max(1, int((tokens - sum(prompts)) * share))
        prefill = (np.tile(np.arange(start, start + prompt), LAYERS), np.repeat(np.arange(LAYERS), prompt))
        kept = (prefill[1] < LAYERS - 1) | (prefill[0] == start + prompt - 1)
        parts.append((turn, 0, prefill[0][kept], prefill[1][kept]))
        start += prompt
        parts.append((turn, 1, np.repeat(np.arange(start, start + decode), LAYERS), np.tile(np.arange(LAYERS), decode)))
        start += decode
    return (
        np.concatenate([np.full(len(step), turn) for turn, _, step, _ in parts]),
        np.concatenate([np.full(len(step), phase) for _, phase, step, _ in parts]),
        np.concatenate([step for _, _, step, _ in parts]),
        np.concatenate([layer for _, _, _, layer in parts]),
    )


def _decodes(count: int, prompts: Prompts) -> tuple[np.ndarray, ...]:
    """Turn, phase and step of every decode: a prompt is one."""
    second = count * 7 // 10
    turn = (np.arange(count) >= second).astype(np.int64)
    phase = np.ones(count, np.int64)
    phase[[0, second]] = 0
    step = np.cumsum(np.where(phase == 0, np.where(turn == 0, prompts[0], prompts[1]), 1)) - 1
    return turn, phase, step


def _preface(path: Path, head: str) -> None:
    path.write_bytes(head.encode() + path.read_bytes())
