"""One benchmark from this phone's own command line, and what the agent does now.

In: what the command line asks. Out: plain values for it to print. A benchmark is a plan of one cell and takes the same
path as a plan from a host: by the agent that serves this home when there is one, else by one started here for it.
"""

from __future__ import annotations

import hashlib
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bmoe_proto import calls
from bmoe_proto.asking import ARTIFACTS
from bmoe_proto.v1 import telemetry_pb2 as pb

from bmoe_agent import config
from bmoe_agent.spool import Spool
from bmoe_agent.supervisor import SecondAgentError, Supervisor

REFERENCE_PROMPT = (
    "Write a long detailed essay about the history of computing including its origins its key milestones the people "
    "involved and the future directions of the field"
)
"""The community protocol's (generations.md)."""
_LOOK_S = 0.5


def plan_of_one(
    *,
    model: str,
    engine: str = "",
    prompt: bytes,
    n_predict: int = 0,
    traces: Sequence[str] = (),
    flags: Sequence[str] = (),
    labels: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> pb.Plan:
    """A plan of one cell. Raises ValueError for a trace that does not exist."""
    if unknown := [kind for kind in traces if kind not in ARTIFACTS]:
        raise ValueError(f"trace {unknown[0]!r} is not known (known: {', '.join(ARTIFACTS)})")
    cell = pb.Cell(
        name="run",
        engine=engine,
        model=model,
        prompt=prompt,
        n_predict=n_predict,
        flags=flags,
        artifacts=dict.fromkeys(["metrics", *traces]),
        labels=labels or {},
        environment=environment or {},
    )
    return pb.Plan(
        plan_id=secrets.token_hex(16),
        name="run",
        sha256=hashlib.sha256(b"").hexdigest(),
        cells=[cell],
        order="listed",
        submitted_wall_ns=time.time_ns(),
    )


def run(home: Path, plan: pb.Plan) -> dict[str, Any]:
    """Run it and wait for its end; what `bmoe-agent run --json` prints. Raises `RuntimeError` when it is refused."""
    try:
        with Supervisor(home, serve=False) as agent:
            _taken(agent.submit(plan))
            try:
                while not agent.night.wait_idle(_LOOK_S):
                    now = agent.context.now
                    _progress(now.state, now.tokens, now.tok_s)
            except KeyboardInterrupt:
                # Nothing half-written and nothing running: the engine is ended and the run gets its end.
                agent.cancel(plan.plan_id, only_current_cell=False)
                agent.night.wait_idle(60.0)
                raise
            _progress_ends()
        spool = agent.context.spool
    except SecondAgentError:
        settings = config.load(home)
        with _call(settings) as client:
            _taken(client.submit(plan))
            try:
                while not _plan_is_done(client, plan.plan_id):
                    status = client.status()
                    _progress(status.state, status.tokens, status.tok_s if status.HasField("tok_s") else None)
                    time.sleep(_LOOK_S)
            except KeyboardInterrupt:
                client.cancel(plan.plan_id)
                raise
            _progress_ends()
        # A spool is read by anyone, written by the agent that owns it: this one only looks.
        spool = Spool(home / "spool", settings.quota_bytes)
    return _ended(spool, plan.plan_id)


def status(home: Path) -> dict[str, Any]:
    """What the agent on this home does now, asked over its own socket."""
    settings = config.load(home)
    document: dict[str, Any] = {
        "name": settings.name,
        "uuid": settings.uuid.hex(),
        "socket": settings.socket,
        "paired": bool(settings.kept_for_store),
        "running": False,
    }
    try:
        with _call(settings) as client:
            told, listing = client.status(), client.listing()
    except calls.CallError as error:
        return document | {"why": str(error)}
    return document | {
        "running": True,
        "state": told.state,
        "plan": told.plan_name or told.plan_id,
        "cell": told.cell,
        "run": told.run_id.hex(),
        "tokens": told.tokens,
        "tok_s": told.tok_s if told.HasField("tok_s") else None,
        "backlog_bytes": told.backlog_bytes,
        "spool_bytes": told.spool_bytes,
        "free_bytes": told.free_bytes,
        "plans": [
            {"plan": plan.plan_id, "name": plan.name, "cells": plan.cells, "done": plan.done, "state": plan.state}
            for plan in listing.plans
        ],
        "runs": len(listing.runs),
    }


def _call(settings: config.Config) -> calls.AgentClient:
    return calls.connect(
        f"unix-abstract:{settings.socket}", settings.secret, bytes(16), expect_uuid=settings.uuid, client="bmoe-agent"
    )


def _taken(reply: pb.SubmitReply) -> None:
    for warning in reply.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if reply.refused:
        raise RuntimeError("the plan is refused: " + "; ".join(reply.refused))


def _plan_is_done(client: calls.AgentClient, plan_id: str) -> bool:
    found = next((plan for plan in client.listing().plans if plan.plan_id == plan_id), None)
    return found is None or found.state not in {"queued", "running"}


def _progress(state: str, tokens: int, tok_s: float | None) -> None:
    """One line that a terminal keeps writing over; elsewhere nothing, the end is told anyway."""
    if sys.stderr.isatty():
        rate = f", {tok_s:.2f} tok/s" if tok_s is not None else ""
        print(f"\r\033[K{state}, {tokens} tokens{rate}", end="", file=sys.stderr, flush=True)


def _progress_ends() -> None:
    if sys.stderr.isatty():
        print(file=sys.stderr)


def _ended(spool: Spool, plan_id: str) -> dict[str, Any]:
    summaries = [summary for summary in spool.summaries() if summary.plan_id == plan_id]
    if not summaries:
        raise RuntimeError("the plan was cancelled before its cell began")
    summary = max(summaries, key=lambda found: found.attempt)
    ended = pb.RunEnded()
    tokens = 0
    for frame in spool.frames(summary.run_id):
        if frame.WhichOneof("what") == "run_ended":
            ended = frame.run_ended
        elif frame.WhichOneof("what") == "output" and frame.output.stream == pb.STREAM_STDOUT:
            tokens += frame.output.data.count(b"BMOE_PROGRESS {")
    return {
        "run": summary.run_id.hex(),
        "outcome": summary.outcome,
        "cause": summary.cause,
        "exit": ended.exit_code if ended.HasField("exit_code") else None,
        "signal": ended.signal if ended.HasField("signal") else None,
        "tokens": tokens,
        "evidence": list(ended.evidence),
        "artifacts": [
            {"name": item.name, "kind": item.kind, "size": item.size, "problem": item.problem}
            for item in ended.artifacts
        ],
    }
