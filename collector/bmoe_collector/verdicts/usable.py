"""Rules about whether a number can be used at all: output, instruments, completeness, length."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from bmoe_proto.contract.flags import TRACES

from bmoe_collector.meaning.numbers import number, total
from bmoe_collector.record import TurnRecord
from bmoe_collector.verdicts.rule import Case, Rule, Verdict, fail, warn

FEWEST_TOKENS = 256
"""The community protocol's length; shorter runs time the cold head."""

_GAPS = re.compile(r"\d+ gaps in the record")
_FAILED_READS = re.compile(r"(\d+) FAILED reads")
_TRACE_KINDS = frozenset({"route", "compute", "compute_layers", "io"})
_ENDED = frozenset({"done", "decided", "rejected"})


def untrustworthy_output(case: Case) -> Iterator[Verdict]:
    """Failed row reads are memory that was never written: the text is garbage (contract, `moe-rows:`)."""
    record = case.record
    said: list[str] = []
    counted = total(turn.summary.get("row_io_errors") for turn in record.turns)
    if not counted:
        counted = total(keys.get("row_io_errors") for keys in record.trailers)
    if counted:
        said.append(f"the trailer counts {counted:.0f} failed row reads")
    lines = [line.text for line in record.report if line.name == "moe-rows"]
    for text in [*lines, *record.others]:
        if match := _FAILED_READS.search(text):
            said.append(f"the report says {match[1]} FAILED reads")
            break
    if said:
        yield fail("untrustworthy_output", " and ".join(said) + ": the generated text is not trustworthy")


def instrumented(case: Case) -> Iterator[Verdict]:
    """A probed or traced run is not a benchmark run (contract, "Decode traces"); its preamble can look clean."""
    record, flags = case.record, case.derived.config.flags
    said: list[str] = []
    for key in ("predict_log", "prefetch_sync", "compute_trace_layers"):
        value = number(record.preamble.get(key))
        if value:
            said.append(f"{key}={value:g} in the preamble")
    asked = sorted(name for name in (*TRACES, "--predict-log", "--prefetch-sync") if name in flags)
    if asked:
        said.append(f"run with {', '.join(asked)}")
    kinds = sorted({artifact.name for artifact in record.artifacts if artifact.kind in _TRACE_KINDS})
    if kinds:
        said.append(f"wrote {', '.join(kinds)}")
    if any(line.name == "moe-predict" for line in record.report):
        said.append("the report has predictor scores")
    if said:
        yield fail("instrumented", "; ".join(said))


def load_all(case: Case) -> Iterator[Verdict]:
    """Reading the whole expert set makes `read_bytes` another quantity (contract, "Run-parameter preamble")."""
    if case.derived.config.load_all:
        told = number(case.record.preamble.get("load_all"))
        yield fail("load_all", "load_all=1 in the preamble" if told else "run with --load-all")


def incomplete(case: Case) -> Iterator[Verdict]:
    """Fewer tokens than asked without an end-of-generation, no end record, or gaps nobody declared."""
    unended = list(_unended(case))
    # What the turns say of a missing end is nearer than the record's own word for it.
    holes = [reason for reason in _holes(case) if not (unended and reason.startswith("no end record"))]
    reasons = list(dict.fromkeys([*unended, *holes]))
    if reasons:
        yield fail("incomplete", "; ".join(reasons))


def _unended(case: Case) -> Iterator[str]:
    record, run = case.record, case.record.run
    if run.get("outcome") == "skipped":
        yield "never launched"
        return
    if run.get("outcome") == "started":
        yield "the run has not ended yet"
    turns = record.turns
    if not turns and not case.derived.turns:
        yield "no end record: nothing was generated"
        return
    if not turns:
        pairs = [(turn.turn, turn.summary) for turn in case.derived.turns]
    else:
        completed = {id(meaning.turn): meaning.summary for meaning in case.derived.turns}
        pairs = [(turn, completed.get(id(turn), turn.summary)) for turn in turns]
    asked = record.run.get("asked")
    plans = list(asked.get("turns") or ()) if isinstance(asked, Mapping) else []
    for at, (turn, summary) in enumerate(pairs):
        if turn.cancelled and at < len(plans) and _cancel_was_asked(plans[at]):
            continue
        reason = _turn_reason(case, turn, summary)
        if reason:
            which = turn.turn if turn.turn is not None else f"of request {turn.request_id}"
            yield reason if len(pairs) == 1 else f"turn {which}: {reason}"


def _turn_reason(case: Case, turn: TurnRecord, summary: Mapping[str, Any]) -> str:
    if turn.decide is not None:
        return "the decision was cancelled" if turn.cancelled else ""
    if turn.error is not None:
        fatal = bool(turn.error.get("fatal"))
        return f"fatal error: {turn.error.get('msg', '')}" if fatal else ""
    got = turn.tokens if turn.tokens is not None else number(summary.get("tokens"))
    asked = _asked(case, turn)
    of = f" after {got or 0:.0f} of {asked} tokens" if asked else f" after {got or 0:.0f} tokens"
    if turn.state == "not_run":
        return "never sent to the engine"
    if turn.cancelled:
        return "" if _cancel_was_asked(turn.request or {}) else f"cancelled{of}"
    ended = number(summary.get("tok_s")) is not None or number(summary.get("s_tok")) is not None
    ended = ended or (turn.state in _ENDED and bool(case.record.ready))
    return "" if ended else f"no end record{of}"


def _asked(case: Case, turn: TurnRecord) -> int | None:
    told = number((turn.request or {}).get("n_predict"))
    if told is None:
        told = number(case.derived.config.n_predict)
    if told is None:
        told = number(next((steps for steps in case.derived.rows.get("steps") if steps), None))
    return None if told is None else int(told)


def _cancel_was_asked(request: Mapping[str, Any]) -> bool:
    """After 0 tokens or milliseconds too: as soon as it has begun."""
    return request.get("cancel_after_ms") is not None or request.get("cancel_after_tokens") is not None


def _holes(case: Case) -> Iterator[str]:
    record = case.record
    if record.completeness.get("complete") is False:
        reasons = [str(reason) for reason in record.completeness.get("reasons") or ()] or ["the record has gaps"]
        # What the phone declared to have given up, its own samples for want of room, is accounted for; output is not.
        gaps = [note.facts for note in record.notes if note.code == "gap"]
        declared = bool(gaps) and all(gap.get("declared") and gap.get("what") != "output" for gap in gaps)
        yield from (reason for reason in reasons if not (declared and _GAPS.fullmatch(reason)))
    rows = len(case.derived.rows)
    told = total(turn.tokens for turn in record.turns if turn.turn is not None and turn.decide is None)
    if rows and told is not None and rows < told:
        yield f"{told - rows:.0f} of {told:.0f} token rows are missing"


def short_run(case: Case) -> Iterator[Verdict]:
    """Fewer than 256 generated tokens time the cold head."""
    turns = case.record.turns
    only_decisions = bool(turns) and all(turn.decide is not None for turn in turns)
    if case.record.run.get("outcome") == "skipped" or only_decisions:
        return
    tokens = case.derived.tokens
    if tokens < FEWEST_TOKENS:
        why = ": much of it is the cold head" if tokens else ""
        yield warn("short_run", f"{tokens} generated tokens, fewer than {FEWEST_TOKENS}{why}")


RULES: tuple[Rule, ...] = (untrustworthy_output, instrumented, load_all, incomplete, short_run)
