"""From a cell to the argv that is executed. Pure, but for looking a model up.

In: a cell of a plan, the engine's facts, the model's file. Out: a `Command`, or `RefusedError` with the reason in the words
of an outcome's cause ("refused:flags", "refused:model").

Paths are the agent's (design, "On the phone"): model, prompt, session mode and every output file are put here, inside
the run's directory, where the engine is started. A plan that names any of them itself is refused. The prompt is an
argument of its own after `-p`, so a prompt that looks like a flag stays a prompt.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bmoe_proto.asking import ARTIFACTS, N_PREDICT, cell_problems, tokens_asked
from bmoe_proto.v1 import telemetry_pb2 as pb

from bmoe_agent.engine import check_flags, flags_of
from bmoe_agent.launch import ARGUMENT_LIMIT


class RefusedError(Exception):
    """The cell cannot be run as it is; `cause` is a cause of `bmoe_proto.outcome`."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


@dataclass(frozen=True, slots=True)
class Command:
    """What is executed."""

    argv: tuple[bytes, ...]
    session: bool
    turns: tuple[pb.Turn, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)  # artifact kind to file name inside the run's directory
    tokens_asked: int | None = None
    notes: tuple[tuple[str, str], ...] = ()  # code and text of what was changed on the way


def command(cell: pb.Cell, engine: str, facts: pb.EngineFacts, model: Path) -> Command:
    """The argv of one cell. Raises `RefusedError`."""
    if problems := cell_problems(cell):
        raise RefusedError("refused:flags", "; ".join(problems))
    turns = tuple(cell.turns)
    flags = list(cell.flags)
    notes: list[tuple[str, str]] = []
    offered = flags_of(facts.help_text)
    prompt = bytes(cell.prompt)
    if len(prompt) >= ARGUMENT_LIMIT:
        turns = (_prompt_as_turn(prompt, flags),)
        notes.append(("prompt_in_session", f"{len(prompt)} bytes do not fit an argument; sent as a session's turn"))
    added: list[str] = []
    if any(turn.kind == "decide" for turn in turns) and "--decide" not in flags:
        added.append("--decide")
    files: dict[str, str] = {}
    for kind in dict.fromkeys(cell.artifacts):
        flag, name = ARTIFACTS[kind]
        added += [flag, name]
        files[kind] = name
    if turns:
        added.append("--session")
    elif not offered or "--progress" in offered:
        added.append("--progress")
    if cell.n_predict and not N_PREDICT & set(flags):
        added += ["-n", str(cell.n_predict)]
    if facts.help_text and (refusals := check_flags(facts, [*added, *flags], cell.allow_unknown_flags)):
        raise RefusedError("refused:flags", "; ".join(refusals))
    argv = [os.fsencode(engine), b"-m", os.fsencode(model)]
    if not turns:
        argv += [b"-p", prompt]
    # The plan's own come last: none of them can swallow one of ours as its value.
    argv += [flag.encode() for flag in (*added, *flags)]
    return Command(tuple(argv), bool(turns), turns, files, tokens_asked(cell, flags, turns), tuple(notes))


def recorded_command(cell: pb.Cell, argv: Sequence[bytes]) -> Command:
    """The command of a run that was started already, from its cell and the argv on record."""
    session = b"--session" in argv
    turns = tuple(cell.turns)
    if session and not turns:
        turns = (pb.Turn(kind="generate", prompt=cell.prompt.decode("utf-8", "replace")),)
    files = {kind: ARTIFACTS[kind][1] for kind in cell.artifacts if kind in ARTIFACTS}
    return Command(tuple(argv), session, turns if session else (), files, tokens_asked(cell, cell.flags, turns))


def _prompt_as_turn(prompt: bytes, flags: Sequence[str]) -> pb.Turn:
    """A session renders every prompt as a chat, so only a chat can move there and stay the same experiment."""
    if "--chatml" not in flags:
        raise RefusedError(
            "refused:flags",
            f"the prompt is {len(prompt)} bytes and an argument holds less than {ARGUMENT_LIMIT}; a session would render "
            "it as a chat, which this cell does not ask for (--chatml): write it as a session turn",
        )
    try:
        return pb.Turn(kind="generate", prompt=prompt.decode())
    except UnicodeDecodeError as error:
        raise RefusedError("refused:flags", f"the prompt does not fit an argument and is no UTF-8: {error}") from None
