"""How a run ended, and whether its record is whole: judged again on the host from what is stored.

In: a `RunReader` that has read every frame. Out: column values of `runs`. The outcome comes from the same function as
on the phone (`bmoe_proto.outcome`), from facts read out of the record, so that it can be redone when rules improve.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bmoe_proto import gates
from bmoe_proto.asking import tokens_asked
from bmoe_proto.outcome import EndFacts, Outcome, decide
from bmoe_proto.v1 import telemetry_pb2 as pb

from bmoe_collector.ingest import told
from bmoe_collector.ingest.reader import RunReader
from bmoe_collector.store.engine import view

OUTPUT_LOST = "disk_full"
"""The note of an agent that saw the disk full while the engine wrote."""
CUT = "ends in the middle of a row"
"""What is wrong with a stored file that an engine writes row by row."""


def end_facts(reader: RunReader) -> EndFacts:
    """What the record says of the run's end, as the phone's own runner counts it."""
    ended, said, started = reader.ended, reader.stdout, reader.started
    if ended is None:
        return EndFacts(ended=False)
    turns: Sequence[pb.Turn] = tuple(started.cell.turns) if started is not None else ()
    session = bool(turns)
    rejected = sum(not _expected(turns, said.requests.get(number or 0), "expect_rejected") for number in said.rejected)
    unplanned = sum(
        request.state == "cancelled" and not _cancel_planned(turns, request.index) for request in said.requests.values()
    )
    end_seen = said.report_seen or said.done > 0 or said.decided > 0
    code = ended.exit_code if ended.HasField("exit_code") else None
    asked = _asked(started) or said.steps_asked if ended.launched else None
    got = said.tokens + said.unseen  # lines that were lost are no tokens that were not generated
    if any(request.state == "cancelled" for request in said.requests.values()):
        asked = None  # a turn cut short on purpose has no number of tokens to fall short of
    # A wait that was called off is on record as one given up; the phone says whether it was the reason.
    watchdog, gate = reader.watchdog, reader.gave_up if ended.ended_by == "gate" else None
    return EndFacts(
        launched=ended.launched,
        exit_observed=ended.exit_observed,
        exit_code=code,
        signal=ended.signal if ended.HasField("signal") else None,
        ended_by=ended.ended_by or "unknown",
        cancelled=ended.ended_by == "user",
        tokens_asked=asked,
        tokens_got=got if ended.launched else None,
        # The engine stops before the tokens asked for only at an end of generation: a clean end says it was one.
        ended_by_eog=code == 0 and end_seen and asked is not None and got < asked and OUTPUT_LOST not in reader.notes,
        end_record=end_seen if ended.launched and not session else None,
        fatal_error=said.fatal_error,
        turns_asked=ended.turns_asked,
        turns_sent=ended.turns_sent,
        turns_ended=max(0, ended.turns_ended - rejected - unplanned),
        turns_rejected=rejected,
        turns_cancelled=unplanned,
        stderr_tail=reader.streams[pb.STREAM_STDERR].tail,
        watchdog=watchdog.rule if watchdog is not None else "",
        watchdog_detail=_watchdog_detail(watchdog),
        gate=gate.gate if gate is not None else "",
        gate_detail=gates.detail(gate),
        launch_error=reader.launch_error,
        disk_full=ended.cause == "disk_full",
        kill_evidence=tuple(reader.kill_evidence),
        abandoned=ended.cause == "abandoned",
    )


def _expected(turns: Sequence[pb.Turn], request: Any, name: str) -> bool:
    return request is not None and request.index < len(turns) and bool(getattr(turns[request.index], name))


def _cancel_planned(turns: Sequence[pb.Turn], index: int) -> bool:
    turn = turns[index] if index < len(turns) else None
    return turn is not None and (turn.HasField("cancel_after_ms") or turn.HasField("cancel_after_tokens"))


def _watchdog_detail(report: pb.WatchdogReport | None) -> str:
    if report is None:
        return ""
    return view(report.detail) or f"{report.rule}: {report.seen:g} {report.unit}, bound {report.bound:g} {report.unit}"


def _asked(started: pb.RunStarted | None) -> int | None:
    """How many tokens the cell asks for; None when that is not known."""
    if started is None:
        return None
    return tokens_asked(started.cell, [view(flag) for flag in started.cell.flags], started.cell.turns)


def columns(reader: RunReader) -> dict[str, Any]:
    """Columns of `runs` that say how it ended (`started` while nothing says so)."""
    ended = reader.ended
    outcome: Outcome = decide(end_facts(reader))
    values: dict[str, Any] = {
        "outcome": outcome.outcome,
        "cause": outcome.cause or None,
        "evidence": list(outcome.evidence),
        "ended": ended is not None,
    }
    if ended is None:
        return values
    if ended.outcome and ended.outcome != outcome.outcome:
        reader.problems.append(f"the phone said {ended.outcome} ({ended.cause}), the record says {outcome.outcome}")
    return values | {
        "launched": ended.launched,
        "exit_observed": ended.exit_observed,
        "exit_code": ended.exit_code if ended.HasField("exit_code") else None,
        "signal": ended.signal if ended.HasField("signal") else None,
        "ended_by": (ended.ended_by or "unknown")[:16],
        "ended_boot_ns": reader.ended_boot_ns,
        "ended_wall_ns": told.clock(ended.clock, reader.ended_boot_ns),
        "turns_asked": told.bounded(ended.turns_asked),
        "turns_sent": told.bounded(ended.turns_sent),
        "turns_ended": told.bounded(ended.turns_ended),
        "run_ended": told.message(ended),
    }


def completeness(reader: RunReader, artifacts: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    """Whether the record is whole: `complete`, `reasons`, frame and gap counts.

    `artifacts`: name to (state, problem) as stored. Every count and hash the run's last frame carries is compared with
    what is here (law 3).
    """
    reasons: list[str] = []
    ended = reader.ended
    declared = 0
    if ended is None:
        reasons.append("no end of the record yet")
    else:
        declared = sum(count.frames for count in ended.segments) + 1
        reasons += _segments(reader, ended)
        reasons += _streams(reader, ended)
        reasons = file_reasons(artifacts, well=ended.HasField("exit_code") and ended.exit_code == 0) + reasons
    if reader.stdout.unseen:
        reasons.append(f"stdout: the engine counts {reader.stdout.unseen} tokens more than there are lines of")
    if OUTPUT_LOST in reader.notes:
        reasons.append("the phone's disk was full while the engine wrote to it: its output may lack lines")
    if reader.gaps:
        reasons.append(f"{reader.gaps} gaps in the record")
    reasons += [f"segment {each.segment[:8]}: {each.problem}" for each in reader.segments.values() if each.problem]
    frames = sum(segment.frames for segment in reader.segments.values())
    return {
        "complete": not reasons,
        "reasons": reasons,
        "frames": frames,
        "frames_declared": declared if ended is not None else None,
        "segments": len(reader.segments),
        "gaps": reader.gaps,
    }


def file_reasons(artifacts: Mapping[str, tuple[str, str]], *, well: bool) -> list[str]:
    """Reasons for incompleteness that are about fetched files: name to (state, problem).

    `well`: the engine ended with exit 0. It writes whole rows, so one that is cut was not all written: a disk that was full
    for a moment says nothing else.
    """
    reasons: list[str] = []
    for name, (state, problem) in sorted(artifacts.items()):
        if state == "awaited":
            reasons.append(f"artifact {name} has not been fetched yet")
        elif state == "given_up":
            reasons.append(f"artifact {name} cannot be had: {problem}")
        elif problem == CUT and well:
            reasons.append(f"artifact {name} {CUT}: what the engine wrote from there on is lost")
    return reasons


def _segments(reader: RunReader, ended: pb.RunEnded) -> list[str]:
    reasons: list[str] = []
    known = {count.segment.hex() for count in ended.segments}
    for count in ended.segments:
        name = count.segment.hex()
        here = reader.segments.get(name)
        if here is None:
            if count.frames:  # a writer that was killed before its first block left a segment of none
                reasons.append(f"segment {name[:8]}: none of its {count.frames} frames are here")
            continue
        own = name == reader.ended_segment
        frames = reader.ended_seq if own else here.frames
        digest = reader.ended_own if own else here.sha.digest()
        if frames < count.frames:
            reasons.append(f"segment {name[:8]}: {frames} of {count.frames} frames are here")
        elif frames > count.frames:
            # A spool that lost its tail: what is here is more than the phone still has. It is kept, and said.
            reasons.append(f"segment {name[:8]}: {frames} frames are here, the phone kept {count.frames}")
        elif count.sha256 and digest != count.sha256:
            reasons.append(f"segment {name[:8]}: its frames' hash is not the one the phone made")
    reasons += [f"segment {name[:8]} is not in the phone's count" for name in reader.segments if name not in known]
    return reasons


def _streams(reader: RunReader, ended: pb.RunEnded) -> list[str]:
    reasons: list[str] = []
    for number, name, size, sha in (
        (pb.STREAM_STDOUT, "stdout", ended.stdout_bytes, ended.stdout_sha256),
        (pb.STREAM_STDERR, "stderr", ended.stderr_bytes, ended.stderr_sha256),
    ):
        stream = reader.streams[number]
        if not sha and not size:
            continue
        if stream.offset != size:
            reasons.append(f"{name}: {stream.offset} bytes are here, the engine wrote {size}")
        elif sha and stream.sha.digest() != sha:
            reasons.append(f"{name}: its hash is not the one the phone made")
    return reasons
