"""Simulated campaigns: interleaved runs of two settings with a known effect, as comparison sees them.

Tokens inside a run are autocorrelated, the phone drifts as a random walk between runs, and runs spread by themselves
as they do on a phone (a standard deviation of 5 %, which is the clock governor alone).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from bmoe_collector.compare.answer import Answer, compare
from bmoe_collector.compare.sides import ComparedRun, Side

ROW = {
    "outcome": "ok", "cause": None, "simulated": False, "agent_uuid": "p", "engine_version": "0.24.0", "model_name": "m.gguf",
    "model_identity": "i", "prompt_sha256": "q", "session": False, "unmeasured": False, "n_tokens": 256, "boot_id": "b",
}  # fmt: skip


def rates(
    pairs: int, effect: float, seed: int, *, sd: float = 0.05, walk: float = 0.02, tokens: int = 64
) -> tuple[list[float], list[float]]:
    """Tokens per second of A and B in A B A B …; B is faster by `effect`, relative."""
    rng = np.random.default_rng(seed)
    level = np.cumsum(rng.normal(0, walk, 2 * pairs)) + rng.normal(0, sd, 2 * pairs)
    found = []
    for at in range(2 * pairs):
        steps, noise, value = rng.normal(0, 0.1, tokens), np.empty(tokens), 0.0
        for token in range(tokens):
            value = 0.4 * value + steps[token]
            noise[token] = value
        wall = np.exp(-level[at] + noise) / ((1 + effect) if at % 2 else 1)
        found.append(float(tokens / wall.sum()))
    return found[0::2], found[1::2]


def compared(a: Iterable[float], b: Iterable[float]) -> Answer:
    """The answer `bmoe compare` gives about two cells of an interleaved plan with these rates."""
    sides = []
    for first, values in enumerate((a, b)):
        runs = []
        for block, rate in enumerate(values):
            place = 2 * block + first
            row = {
                **ROW,
                "run_id": f"{place:032x}",
                "plan_id": "c" * 32,
                "block": block,
                "started_wall_ns": place * 10**11,
            }
            runs.append(ComparedRun(row, {"tok_s": rate, "n_tokens": 256, "overlap": False, "text_sha256": "t"}))
        sides.append(Side("AB"[first], tuple(runs)))
    return compare(sides[0], sides[1], lambda _run_id: [])


def called_different(pairs: int, effect: float, seeds: Iterable[int]) -> int:
    """Of the campaigns of these seeds, how many have a resolved difference."""
    return sum(compared(*rates(pairs, effect, seed)).metrics[0].resolved for seed in seeds)
