"""A single benchmark as a plan of one cell: from the words of a command line to a `Plan`.

In: what `bmoe run --model ...` was told. Out: a `Plan` with one `Cell`, which takes the same way as any other plan.
"""

from __future__ import annotations

import hashlib
import secrets
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from bmoe_proto.v1 import telemetry_pb2 as pb

from bmoe_collector.common import UserError

REFERENCE_PROMPT = (
    "Write a long detailed essay about the history of computing including its origins its key milestones the people "
    "involved and the future directions of the field"
)
"""What is asked when nothing is said: the community protocol's (generations.md)."""
ARTIFACTS = ("metrics", "route", "compute", "compute_layers", "io")


@dataclass(frozen=True, slots=True)
class Single:
    """One benchmark as asked for."""

    model: str
    engine: str = ""
    prompts: Sequence[bytes] = ()
    n_predict: int = 0
    flags: Sequence[str] = ()
    traces: Sequence[str] = ()
    labels: Sequence[str] = ()
    name: str = ""
    environment: Sequence[str] = ()
    retries: int = 0
    send_during_cells: bool = False
    gates: Sequence[pb.GateAsk] = field(default_factory=tuple)


def plan_of(asked: Single) -> pb.Plan:
    """The plan of one cell. One prompt is a one-shot, several are the turns of a session. Raises `UserError`."""
    if not asked.model:
        raise UserError("--model: which model? A name inside the phone's model directories (`bmoe devices` lists them)")
    prompts = list(asked.prompts) or [REFERENCE_PROMPT.encode()]
    cell = pb.Cell(
        name=asked.name or asked.model,
        engine=asked.engine,
        model=asked.model,
        flags=asked.flags,
        artifacts=["metrics", *_traces(asked.traces)],
        labels=_pairs("--label", asked.labels),
        environment=_pairs("--env", asked.environment),
        n_predict=asked.n_predict,
        retries=asked.retries,
        gates=asked.gates,
    )
    if len(prompts) == 1:
        cell.prompt = prompts[0]
    for prompt in prompts if len(prompts) > 1 else ():
        turn = cell.turns.add(kind="generate", prompt=prompt.decode("utf-8"))
        if asked.n_predict:
            turn.n_predict = asked.n_predict
    return pb.Plan(
        plan_id=secrets.token_hex(16),
        name=cell.name,
        sha256=hashlib.sha256(b"").hexdigest(),
        cells=[cell],
        order="given",
        send_during_cells=asked.send_during_cells,
        submitted_wall_ns=time.time_ns(),
    )


def split_flags(options: Sequence[str], words: Sequence[str]) -> list[str]:
    """Engine flags from `--flag "--cache-mb 2048"` options and from the words after `--`."""
    flags: list[str] = []
    for option in options:
        try:
            flags += shlex.split(option)
        except ValueError as error:
            raise UserError(f"--flag {option!r}: {error}") from None
    return flags + list(words)


def _traces(names: Sequence[str]) -> list[str]:
    wanted = [name for text in names for name in text.split(",") if name]
    for name in wanted:
        if name not in ARTIFACTS:
            raise UserError(f"--trace {name}: one of {', '.join(ARTIFACTS[1:])}")
    return list(dict.fromkeys(name for name in wanted if name != "metrics"))


def _pairs(option: str, texts: Sequence[str]) -> dict[str, str]:
    pairs = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UserError(f"{option} {text}: KEY=VALUE")
        pairs[key] = value
    return pairs
