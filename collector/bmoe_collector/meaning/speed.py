"""How fast a run was: rows and end records in, rates out.

| quantity | formula | contract |
|---|---|---|
| `tok_s` | the engine's own; without an end record tokens / sum of `wall_ms` | End-of-run lines |
| `effective_tok_s` | 1 / (1 / `tok_s` + `loop_overhead_s_tok`) | What `tok/s` does not include |
| `drafting_tok_s` | 1 / (1 / `tok_s` + `mtp_draft_s_tok`) | End-of-run lines, `mtp: drafting costs` |
| `ttft_s` | one-shot `load_s + prefill_s`; a session turn `prefill_s` | End-of-run lines |
| `prefill_tps` | the engine's own; else `n_prompt / prefill_s` | Session mode |

`tok/s` comes from decode time alone; what happens between two decodes is in the effective rate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bmoe_collector.meaning.groups import Group, token_costs_ms
from bmoe_collector.meaning.numbers import Distribution, distribution, number, ratio, total
from bmoe_collector.record import Rows


@dataclass(frozen=True, slots=True)
class Speed:
    """Rates of one turn, or of a whole run (sums over its turns)."""

    tokens: int | None
    decode_s: float | None
    tok_s: float | None
    s_tok: float | None
    loop_overhead_s_tok: float | None
    effective_tok_s: float | None
    draft_s_tok: float | None
    drafting_tok_s: float | None
    source: str  # where the headline comes from: "engine", "rows" or ""
    token_ms: Distribution | None


def slower_by(tok_s: float | None, extra_s_tok: float | None) -> float | None:
    """The rate that is left when every token takes `extra_s_tok` longer."""
    if tok_s is None or tok_s <= 0 or extra_s_tok is None:
        return None
    return ratio(1.0, 1.0 / tok_s + extra_s_tok)


def turn_speed(
    summary: Mapping[str, Any], rows: Rows, at: Sequence[int], decodes: Sequence[Group], count: int | None
) -> Speed:
    """One turn: its end record, all rows with the indices of the turn's own, its decodes and its token count."""
    tokens = count if count is not None else (len(at) or None)
    told = number(summary.get("tok_s"))
    if told is None:
        told = ratio(1.0, summary.get("s_tok"))
    wall_ms = total(group.wall_ms for group in decodes)
    source = "engine"
    if told is None or told <= 0:
        charged = sum(group.batch for group in decodes)
        told = ratio(charged, None if wall_ms is None else wall_ms / 1e3)
        source = "rows" if told is not None else ""
    overhead = number(summary.get("loop_overhead_s_tok"))
    if overhead is None:
        overhead = _per_token(rows, "loop_overhead_ms", at)
    draft = number(summary.get("mtp_draft_s_tok"))
    if draft is None:
        draft = _per_token(rows, "mtp_draft_ms", at)
    return Speed(
        tokens=tokens,
        decode_s=ratio(tokens, told) if tokens is not None else None,
        tok_s=told,
        s_tok=ratio(1.0, told),
        loop_overhead_s_tok=overhead,
        effective_tok_s=slower_by(told, overhead),
        draft_s_tok=draft,
        drafting_tok_s=slower_by(told, draft),
        source=source,
        token_ms=distribution(token_costs_ms(list(decodes))),
    )


def run_speed(turns: Sequence[Speed], decodes: Sequence[Group]) -> Speed:
    """The run as a whole: every turn that generated, weighted by its tokens."""
    timed = [turn for turn in turns if turn.tokens and turn.decode_s is not None]
    if len(turns) == 1:
        return turns[0]
    tokens = sum(turn.tokens or 0 for turn in timed)
    decode_s = total(turn.decode_s for turn in timed)
    tok_s = ratio(tokens, decode_s)
    overhead = _weighted([(turn.loop_overhead_s_tok, turn.tokens or 0) for turn in timed])
    draft = _weighted([(turn.draft_s_tok, turn.tokens or 0) for turn in timed])
    return Speed(
        tokens=sum(turn.tokens or 0 for turn in turns) if turns else None,
        decode_s=decode_s,
        tok_s=tok_s,
        s_tok=ratio(1.0, tok_s),
        loop_overhead_s_tok=overhead,
        effective_tok_s=slower_by(tok_s, overhead),
        draft_s_tok=draft,
        drafting_tok_s=slower_by(tok_s, draft),
        source="engine" if timed and all(turn.source == "engine" for turn in timed) else ("rows" if timed else ""),
        token_ms=distribution(token_costs_ms(list(decodes))),
    )


def _per_token(rows: Rows, column: str, at: Sequence[int]) -> float | None:
    values = rows.get(column) if column in rows.columns else []
    if not values or not at:
        return None
    whole = total(values[index] for index in at)
    return None if whole is None else whole / len(at) / 1e3


def _weighted(pairs: Sequence[tuple[float | None, int]]) -> float | None:
    """Mean over tokens; None as soon as one turn does not know, so a sum is never half a sum."""
    if not pairs or any(value is None for value, _ in pairs):
        return None
    return ratio(sum((value or 0.0) * weight for value, weight in pairs), sum(weight for _, weight in pairs))


@dataclass(frozen=True, slots=True)
class Prefill:
    """What the prompt cost."""

    n_prompt: float | None
    load_s: float | None
    prefill_s: float | None
    prefill_tps: float | None
    ttft_s: float | None


def prefill(summary: Mapping[str, Any], ready: Mapping[str, Any], *, session: bool) -> Prefill:
    """From a generation's end record, and BMOE_READY for a session's first."""
    load = number(summary.get("load_s"))
    load = load if load is not None else number(ready.get("load_s"))
    seconds = number(summary.get("prefill_s"))
    prompt = number(summary.get("n_prompt"))
    rate = number(summary.get("prefill_tps"))
    if rate is None or rate <= 0:
        rate = ratio(prompt, seconds)
    if session:
        first = seconds
    elif seconds is not None and load is not None:
        first = load + seconds
    else:
        first = number(summary.get("ttft_s"))
    return Prefill(prompt, load, seconds, rate, first)
