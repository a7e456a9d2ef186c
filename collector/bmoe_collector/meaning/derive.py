"""Everything a run means: a RunRecord in, one Derived out. Pure; the same record always gives the same result (law 1).

Each part has its module with its formulas and the section of the contract they come from; this one only puts them
together, for the run as a whole and for every turn of a session.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bmoe_collector.meaning.bars import Bars, bars, occupancy, prefill_bars, terms_of
from bmoe_collector.meaning.cache import Cache, Speculation, cache_of, speculation_of
from bmoe_collector.meaning.config import Config, config_of
from bmoe_collector.meaning.groups import Group, groups, token_costs_ms
from bmoe_collector.meaning.measured import generations, rows_of, unmeasured_groups
from bmoe_collector.meaning.memory import ENTRY, EXIT, Curve, State, curves, state_at
from bmoe_collector.meaning.numbers import number, ratio, total
from bmoe_collector.meaning.semantics import stall_meaning
from bmoe_collector.meaning.speed import Prefill, Speed, prefill, run_speed, turn_speed
from bmoe_collector.meaning.steady import Steady, steady_state
from bmoe_collector.record import Rows, RunRecord, TurnRecord


@dataclass(frozen=True, slots=True)
class TurnMeaning:
    """One generation of the run."""

    turn: TurnRecord
    summary: Mapping[str, Any]  # its end record, law 5 applied; a one-shot's completed from the report
    speed: Speed
    prefill: Prefill
    terms: Mapping[str, float | None]
    bars: Bars
    prefill_bars: Bars
    steady: Steady


@dataclass(frozen=True, slots=True)
class Derived:
    """What the numbers of a run mean."""

    config: Config
    rows: Rows  # one row a token, law 5 applied
    summaries: Sequence[Mapping[str, Any]]  # end records of all turns, law 5 applied
    unmeasured: tuple[str, ...]
    stall_meaning: str | None
    turns: Sequence[TurnMeaning]  # generations, in order; decisions and rejected requests are not among them
    tokens: int
    decodes: Sequence[Group]
    speed: Speed
    terms: Mapping[str, float | None]
    bars: Bars
    occupancy: float | None
    cpu_busy: float | None
    cache: Cache
    speculation: Speculation
    steady: Steady
    curves: Mapping[str, Curve]
    entry: State
    exit: State
    text_sha256: str | None

    @property
    def token_costs_ms(self) -> list[float | None]:
        """Cost of every token, a speculative group's shared evenly among its own."""
        return token_costs_ms(list(self.decodes))


def derive(record: RunRecord) -> Derived:
    """Work out everything."""
    config = config_of(record)
    rows = rows_of(record)
    decodes = groups(rows, speculative=config.spec in {"mtp", "ngram"})
    turns = _turns(record, config, rows, decodes)
    summaries = [turn.summary for turn in turns]
    speed = run_speed([turn.speed for turn in turns], decodes) if turns else _no_speed(rows, decodes)
    tokens = _tokens(record, rows, summaries)
    terms = _run_terms(turns, rows)
    return Derived(
        config=config,
        rows=rows,
        summaries=summaries,
        unmeasured=unmeasured_groups(record),
        stall_meaning=stall_meaning(config.version),
        turns=turns,
        tokens=tokens,
        decodes=decodes,
        speed=speed,
        terms=terms,
        bars=bars(speed.s_tok, terms, config),
        occupancy=occupancy(terms["cpu"], speed.s_tok, config.threads),
        cpu_busy=occupancy(terms["cpu"], speed.s_tok, config.busy_threads),
        cache=cache_of(summaries, rows, config, tokens),
        speculation=speculation_of(summaries, config, tokens),
        steady=_longest(turns).steady if turns else steady_state(decodes),
        curves=curves(rows, record.samples),
        entry=state_at(record, ENTRY),
        exit=state_at(record, EXIT, last=True),
        text_sha256=text_sha256(record),
    )


def _tokens(record: RunRecord, rows: Rows, summaries: Sequence[Mapping[str, Any]]) -> int:
    """Generated tokens: the rows, or without rows what the end records or the report say."""
    if len(rows):
        return len(rows)
    told = [turn.tokens for turn in record.turns if turn.tokens is not None]
    if told:
        return sum(told)
    reported = total(summary.get("tokens") for summary in summaries)
    return int(reported or number(record.run.get("n_tokens")) or 0)


def _turns(record: RunRecord, config: Config, rows: Rows, decodes: Sequence[Group]) -> list[TurnMeaning]:
    """Each generation with its own rows and decodes."""
    pairs = generations(record)
    lone = len(pairs) == 1
    places: dict[Any, list[int]] = {}
    for index, turn in enumerate(rows.get("turn")):
        places.setdefault(turn, []).append(index)
    by_turn: dict[Any, list[Group]] = {}
    for group in decodes:
        by_turn.setdefault(group.turn, []).append(group)
    found: list[TurnMeaning] = []
    for turn, summary in pairs:
        at = list(range(len(rows))) if lone else places.get(turn.turn, [])
        own = list(decodes) if lone else by_turn.get(turn.turn, [])
        count = turn.tokens if turn.tokens is not None else (len(at) or None)
        speed = turn_speed(summary, rows, at, own, count)
        terms = terms_of(summary, rows, at)
        start = prefill(summary, record.ready if not found else {}, session=config.session)
        found.append(
            TurnMeaning(
                turn=turn,
                summary=summary,
                speed=speed,
                prefill=start,
                terms=terms,
                bars=bars(speed.s_tok, terms, config),
                prefill_bars=prefill_bars(summary, start.prefill_s, config),
                steady=steady_state(own),
            )
        )
    return found


def _no_speed(rows: Rows, decodes: Sequence[Group]) -> Speed:
    return turn_speed({}, rows, range(len(rows)), decodes, None)


def _run_terms(turns: Sequence[TurnMeaning], rows: Rows) -> Mapping[str, float | None]:
    """Terms of the whole run: each turn's weighted by its tokens; None as soon as one that generated does not know."""
    if not turns:
        return terms_of({}, rows, range(len(rows)))
    if len(turns) == 1:
        return turns[0].terms
    told = [(turn, turn.speed.tokens or 0) for turn in turns if turn.speed.tokens]
    found: dict[str, float | None] = {}
    for term in turns[0].terms:
        values = [(turn.terms[term], weight) for turn, weight in told]
        known_all = bool(values) and all(value is not None for value, _ in values)
        weights = sum(weight for _, weight in values)
        found[term] = ratio(sum((value or 0.0) * weight for value, weight in values), weights) if known_all else None
    return found


def _longest(turns: Sequence[TurnMeaning]) -> TurnMeaning:
    """The turn with most tokens: where a steady state is, it is there."""
    return max(turns, key=lambda turn: turn.speed.tokens or 0)


def text_sha256(record: RunRecord) -> str | None:
    """One hash over every generation's reasoning and answer, in order; None when the record holds no text at all.

    Each text goes in with its length, so moving a byte from one to the next changes the hash.
    """
    texts = [(turn.reasoning, turn.text) for turn in record.turns if turn.turn is not None and turn.decide is None]
    if not any(reasoning or text for reasoning, text in texts):
        return None
    digest = hashlib.sha256()
    for pair in texts:
        for text in pair:
            digest.update(b"%d:" % len(text))
            digest.update(text)
    return digest.hexdigest()
