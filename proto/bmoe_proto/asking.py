"""What may be asked of a phone: reasons to refuse a cell or a gate, whatever the engine, and the tokens a cell asks for. Both sides go by it.
Pure.

In: a cell, a gate, a bound, a variable. Out: reasons. A host refuses a plan by it when it is checked, and a phone when it is handed in: a plan
that waits for a phone which is away must not be refused at 3 a.m.

Paths are the agent's (design, "On the phone"): model, prompt, session mode and every output file are put into the argv there, inside
the run's directory. A plan that names any of them itself is refused, as is a variable that could load code or name a place.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise

from bmoe_proto.contract.flags import BY_SPELLING
from bmoe_proto.gates import GATES
from bmoe_proto.numbers import count
from bmoe_proto.v1 import telemetry_pb2 as pb

COMPARISONS = ("<=", ">=", "==")
POLICIES = ("skip", "run-flagged", "abort")
MAX_PLAN_BYTES = 1 << 20
"""Of one cell with the plan's text and question: all of it is in the first frame of a run."""
# Name of an artifact (telemetry.proto, Cell.artifacts) to the flag that asks for it and the file it is written to.
ARTIFACTS: Mapping[str, tuple[str, str]] = {
    "metrics": ("--csv", "metrics.csv"),
    "route": ("--route-trace", "route.csv"),
    "compute": ("--compute-trace", "compute.csv"),
    "compute_layers": ("--compute-trace-layers", "compute_layers.csv"),
    "io": ("--io-trace", "io.csv"),
}
ARTIFACT_OF: Mapping[str, str] = {flag: kind for kind, (flag, _) in ARTIFACTS.items()}
"""The same the other way round: flag to name."""
OURS = frozenset(
    {"-m", "--model", "-p", "--prompt", "--session", "--progress", "-h", "--help", "--version", "--list-archs"}
)
N_PREDICT = frozenset({"-n", "--n-predict"})
MOST_SECONDS = 30 * 86_400  # beyond this, waiting itself fails
_WATCHED: Mapping[str, str] = {"max_cpu_temp_c": "cpu_temp_c", "min_battery_pct": "battery_pct"}
"""Bounds of a watchdog or of a plan's limits, and the gate whose source they are read from."""
_PATH_FLAGS = frozenset(flag for flag, _ in ARTIFACTS.values())
_FLAG = re.compile(r"--?[A-Za-z][\w-]*")
# What the linker, the C library or the launcher's own shell acts on, and where programs and files are looked for.
_REFUSED_VARIABLES = frozenset(
    [
        "ENV",
        "BASH_ENV",
        "BASHOPTS",
        "SHELLOPTS",
        "PS4",
        "IFS",
        "CDPATH",
        "PATH",
        "HOME",
        "TMPDIR",
        "PREFIX",
        "GCONV_PATH",
        "LOCPATH",
        "NLSPATH",
    ]
)
_REFUSED_BEGINNINGS = ("LD_", "GLIBC_", "MALLOC_", "ANDROID_", "BASH_")


def cell_problems(cell: pb.Cell) -> list[str]:
    """Reasons why this cell can never be run, whatever the engine: for the moment a plan is handed in."""
    problems: list[str] = []
    if not cell.model:
        problems.append("no model is named")
    if bool(cell.prompt) == bool(cell.turns):
        problems.append("a cell has either a prompt or turns")
    if b"\0" in cell.prompt:
        problems.append("the prompt holds a NUL byte and cannot be given to a program")
    unknown = [kind for kind in cell.artifacts if kind not in ARTIFACTS]
    problems += [f"artifact {kind!r} is not known (known: {', '.join(ARTIFACTS)})" for kind in unknown]
    for index, turn in enumerate(cell.turns):
        if turn.kind not in {"", "generate", "decide"}:
            problems.append(f"turn {index}: kind {turn.kind!r} is neither generate nor decide")
    problems += _own_flags(cell.flags)
    problems += [why for key, value in cell.environment.items() if (why := variable_problem(key, value))]
    times = {"preheat_s": cell.preheat_s, **{field.name: value for field, value in cell.watchdog.ListFields()}}
    problems += [
        f"{name} = {value}: a number from 0 to {MOST_SECONDS}"
        for name, value in times.items()
        if not 0 <= value <= MOST_SECONDS
    ]
    if {"--mtp", "--ngram"} <= set(cell.flags):
        problems.append("--mtp and --ngram exclude each other")
    return problems


def gate_problems(ask: pb.GateAsk) -> list[str]:
    """What is wrong with a gate as asked; empty when nothing is."""
    found: list[str] = []
    kind = GATES.get(ask.gate)
    if kind is None:
        found.append(f"no gate is called {ask.gate!r}: there are {', '.join(GATES)}")
    elif ask.unit and ask.unit != kind.unit:
        found.append(f"{ask.gate} is in {kind.unit or 'no unit'}, not in {ask.unit}")
    if ask.comparison and ask.comparison not in COMPARISONS:
        found.append(f"{ask.gate}: {ask.comparison!r} is no comparison: there are {', '.join(COMPARISONS)}")
    if ask.policy and ask.policy not in POLICIES:
        found.append(f"{ask.gate}: {ask.policy!r} is no policy: there are {', '.join(POLICIES)}")
    return found


def too_big(plan: pb.Plan, cell: pb.Cell) -> str:
    """Why a cell does not fit into a run's first frame together with its plan's text; empty when it does."""
    size = cell.ByteSize() + len(plan.text.encode()) + len(plan.question_json.encode())
    return f"with the plan's text more than {MAX_PLAN_BYTES} bytes" if size > MAX_PLAN_BYTES else ""


def unwatched(asked: pb.WatchdogAsk | pb.Limits, unreadable: Mapping[str, str]) -> dict[str, str]:
    """Bounds of which a phone cannot read what they are held against, and why: they would never be reached.

    `unreadable` is gates and why they cannot be read.
    """
    return {
        field.name: unreadable[gate]
        for field, value in asked.ListFields()
        if value and (gate := _WATCHED.get(field.name, "")) in unreadable
    }


def tokens_asked(cell: pb.Cell, flags: Sequence[str], turns: Sequence[pb.Turn]) -> int | None:
    """How many tokens a cell asks for with these flags and turns, all turns together; None when that is not known before it runs."""
    default: int | None = cell.n_predict or None
    for flag, value in pairwise(flags):
        if flag in N_PREDICT:
            default = count(value)
    if not turns:
        return default
    total = 0
    for turn in turns:
        if turn.kind == "decide" or turn.expect_rejected:
            continue
        if turn.HasField("cancel_after_ms") or turn.HasField("cancel_after_tokens"):
            return None
        asked = turn.n_predict if turn.HasField("n_predict") else default
        if asked is None:
            return None
        total += asked
    return total


def variable_problem(key: str, value: str) -> str:
    """Why a plan may not set this variable of the engine's; empty when it may."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key) or "\0" in value:
        return f"environment variable {key!r} cannot be set"
    if key in _REFUSED_VARIABLES or key.startswith(_REFUSED_BEGINNINGS):
        return f"environment variable {key} is not a plan's to set"
    if "/" in value:
        return f"environment variable {key}={value[:80]!r}: a plan names no paths"
    return ""


def _own_flags(flags: Sequence[str]) -> list[str]:
    problems: list[str] = []
    at = 0
    while at < len(flags):
        flag = flags[at]
        at += 1
        if "\0" in flag:
            problems.append(f"flag {flag!r} holds a NUL byte")
            continue
        name, equals, value = flag.partition("=")
        if name in OURS or name in _PATH_FLAGS:
            problems.append(f"{name} is the agent's to give: name model, prompt, turns and artifacts in the cell")
            continue
        if not _FLAG.fullmatch(name):
            problems.append(f"{flag!r} is no flag and belongs to none before it")
            continue
        known = BY_SPELLING.get(name)
        values = [value] if equals else []
        if known is not None:
            values += flags[at : at + known.arity]
            if at + known.arity > len(flags):
                problems.append(f"{name} needs a value and has none")
            at += known.arity
        else:
            while at < len(flags) and not _FLAG.fullmatch(flags[at].partition("=")[0]):
                values.append(flags[at])
                at += 1
        # A value with a slash names a file, which no flag of a plan's may do. One that is spelled like a flag of ours
        # would be that flag to a build in which this one takes no value.
        problems += [
            f"{name} {value}: a plan names no paths"
            for value in values
            if "/" in value or value.partition("=")[0] in OURS | _PATH_FLAGS
        ]
    return problems
