"""Closing a run: exit state, artifacts, the outcome, and the last frame.

In: a `Live` whose engine has ended, or was never started. Out: `Ended`; the run is sealed and durable. Also used for
runs that a killed agent left behind (adopt).
"""

from __future__ import annotations

import hashlib
import os
import signal
from pathlib import Path

from bmoe_proto import gates
from bmoe_proto.asking import ARTIFACTS
from bmoe_proto.outcome import EndFacts, Outcome, decide
from bmoe_proto.v1 import telemetry_pb2 as pb

from bmoe_agent import oomkills
from bmoe_agent.runner_live import Ended, Live
from bmoe_agent.session import Session

NOT_ARTIFACTS = frozenset({"stdout", "stderr", "pid", "status", "launcher"})
_KIND_OF_FILE = {name: kind for kind, (_, name) in ARTIFACTS.items()}
MOST_FILES = 200
"""Of one run; what an engine writes besides its streams is a handful, and a host takes no more than 256 with them."""
_READ_BYTES = 1 << 20
_FULL_BYTES = 1 << 20


def close(live: Live) -> Ended:
    """Write the run's end."""
    context = live.context
    if live.launched:
        live.record_sample("exit")
        live.record_residency()
        _look_at_model(live)
    if live.session is not None and live.launched:
        for report in live.session.abandon("the engine ended"):
            live.record_turn(report)
    cost = live.observer.cost(live.sampler)  # before files are hashed, which is no watching
    live.disk_full = live.disk_full or context.free_bytes() < _FULL_BYTES or live.writer.given_up > 0
    _look_for_a_killer(live)
    facts = end_facts(live)
    outcome = decide(facts)
    ended = _message(live, facts, outcome)
    ended.artifacts.extend(artifacts(live, complete=outcome.outcome == "ok"))
    ended.observer.CopyFrom(cost)
    ended.clock.CopyFrom(context.clock.pair())
    live.writer.end(ended, context.clock.boot_ns())
    # The record is complete and durable (or says in a gap what is missing): what the streams' files held is in it, and
    # the room they take is the next cell's.
    for name in ("stdout", "stderr"):
        (live.directory / name).unlink(missing_ok=True)
    return Ended(
        run_id=live.run_id,
        outcome=outcome.outcome,
        cause=outcome.cause,
        retryable=outcome.retryable,
        launched=live.launched,
        gate_policy=live.gate.policy if live.gate is not None else "",
    )


def _look_at_model(live: Live) -> None:
    """A file that was replaced, cut or removed while the engine read it: the run measured no model that can be named."""
    for shard in live.model.shards:
        try:
            facts = os.stat(shard.path)
        except OSError as error:
            live.note("model_changed", f"{shard.path}: {error.strerror} at the run's end")
            continue
        if (facts.st_size, facts.st_mtime_ns) != (shard.size, shard.mtime_ns):
            text = f"{shard.path}: {shard.size} bytes at the run's start, {facts.st_size} at its end, written to in between"
            live.note("model_changed", text, {"size": facts.st_size, "size_at_start": shard.size})


def _look_for_a_killer(live: Live) -> None:
    """Of a SIGKILL that was not ours: whether the memory controller says that it was its own."""
    if live.ended_by_us or live.status is None or live.status.signal != signal.SIGKILL:
        return
    if found := oomkills.evidence(live.context.roots, live.oom_kills):
        live.note("kill_evidence", found)
        live.kill_evidence = (found,)


def end_facts(live: Live) -> EndFacts:
    """What was observed of this run's end."""
    status, phases, session = live.status, live.phases, live.session
    asked = live.command.tokens_asked if live.command.tokens_asked is not None else phases.steps_asked
    if session is not None and "cancelled" in session.states:
        asked = None  # a turn cut short on purpose has no number of tokens to fall short of
    clean = status is not None and status.code == 0
    return EndFacts(
        launched=live.launched,
        exit_observed=status is not None,
        exit_code=status.code if status else None,
        signal=status.signal if status else None,
        ended_by=_ended_by(live),
        cancelled=live.ended_by_us == "user",
        tokens_asked=asked if live.launched else None,
        tokens_got=phases.got_tokens if live.launched else None,
        # An engine that ends cleanly before the tokens asked for does so only at an end of generation.
        # On a full disk tokens may have been generated and lost.
        ended_by_eog=clean
        and phases.saw_end
        and asked is not None
        and phases.got_tokens < asked
        and not live.output_lost,
        end_record=phases.saw_end if live.launched and session is None else None,
        fatal_error=phases.fatal_message,
        turns_asked=len(session.turns) if session else 0,
        turns_sent=session.sent if session else 0,
        turns_ended=_turns_ended(session),
        turns_rejected=session.unexpected_rejections if session else 0,
        turns_cancelled=session.unplanned_cancels if session else 0,
        stderr_tail=live.stderr_tail,
        watchdog=live.watchdog.rule if live.watchdog is not None else "",
        watchdog_detail=_watchdog_detail(live.watchdog),
        gate=live.gate.gate if live.gate is not None else "",
        gate_detail=gates.detail(live.gate),
        launch_error=live.launch_error,
        disk_full=live.disk_full,
        kill_evidence=live.kill_evidence,
        abandoned=live.abandoned,
    )


def artifacts(live: Live, *, complete: bool) -> list[pb.ArtifactFacts]:
    """Every file the engine left in its directory but its streams, with size and hash; and those it should have left.

    A file of an engine that did not end well is kept under its name with the remark that it may end in mid-row. Of very many
    files those that were asked for come first, and the record says how many are left out.
    """
    found: list[pb.ArtifactFacts] = []
    names = sorted(os.listdir(live.directory), key=_asked_for_first) if live.directory.is_dir() else []
    files = [name for name in names if name not in NOT_ARTIFACTS and _is_file(live.directory / name)]
    if len(files) > MOST_FILES:
        live.note(
            "files_left_out",
            f"the engine left {len(files)} files: {MOST_FILES} of them are kept",
            {"files": len(files)},
        )
    for name in files[:MOST_FILES]:
        path = live.directory / name
        facts = pb.ArtifactFacts(name=name, kind=_KIND_OF_FILE.get(name, "other"))
        try:
            facts.size, facts.sha256 = hash_file(path)
            if not complete:
                facts.problem = "the engine did not end well: the file may end in the middle of a row"
        except OSError as error:
            facts.problem = f"cannot be read: {error.strerror}"
        found.append(facts)
    if live.launched:
        missing = [item for item in live.command.files.items() if item[1] not in files]
        found += [pb.ArtifactFacts(name=name, kind=kind, problem="was not written") for kind, name in missing]
    return found


def _asked_for_first(name: str) -> tuple[bool, str]:
    return name not in _KIND_OF_FILE, name


def _is_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def hash_file(path: Path) -> tuple[int, bytes]:
    """Size and sha256 of a file."""
    digest = hashlib.sha256()
    size = 0
    with path.open("rb") as file:
        while data := file.read(_READ_BYTES):
            digest.update(data)
            size += len(data)
    return size, digest.digest()


def _message(live: Live, facts: EndFacts, outcome: Outcome) -> pb.RunEnded:
    ended = pb.RunEnded(
        launched=facts.launched,
        exit_observed=facts.exit_observed,
        outcome=outcome.outcome,
        cause=outcome.cause,
        evidence=outcome.evidence,
        ended_by=facts.ended_by,
        turns_asked=facts.turns_asked,
        turns_sent=facts.turns_sent,
        turns_ended=live.session.ended if live.session else 0,
        cancelled_by_us=facts.cancelled or facts.turns_cancelled > 0,
    )
    if facts.exit_code is not None:
        ended.exit_code = facts.exit_code
    if facts.signal is not None:
        ended.signal = facts.signal
    if live.stdout is not None:
        ended.stdout_bytes, ended.stdout_sha256 = live.stdout.offset, live.stdout.sha256()
    if live.stderr is not None:
        ended.stderr_bytes, ended.stderr_sha256 = live.stderr.offset, live.stderr.sha256()
    return ended


def _ended_by(live: Live) -> str:
    if live.ended_by_us:
        return live.ended_by_us
    if live.gate is not None:
        return "gate"
    if not live.launched:
        return "agent"
    return "engine" if live.status is not None else "unknown"


def _turns_ended(session: Session | None) -> int:
    """As EndFacts counts: done, decided, rejected as expected, cancelled as planned."""
    if session is None:
        return 0
    return session.ended - session.unexpected_rejections - session.unplanned_cancels


def _watchdog_detail(report: pb.WatchdogReport | None) -> str:
    if report is None:
        return ""
    return report.detail or f"{report.rule}: {report.seen:g} {report.unit}, bound {report.bound:g} {report.unit}"
