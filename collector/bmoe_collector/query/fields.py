"""Names a filter may use and columns a list may show: where each lies in the database, and the expression for it.

A name is looked for as a column of the run, then as a key of the preamble, then as a derived fact; `label.KEY`,
`verdict` and the names of `MADE` are their own. `expression` and `compile_where` give SQL over `source()` that both
databases answer alike: text is compared byte by byte, yes and no are 1 and 0, unmeasured is NULL and sorts last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any

from sqlalchemy import Boolean, ColumnElement, Double, Integer, and_, case, cast, func, literal, not_, or_, select
from sqlalchemy import Text as SqlText
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.expression import FromClause
from sqlalchemy.sql.functions import FunctionElement

from bmoe_collector.common import UserError
from bmoe_collector.query.where import Both, Comparison, Not, Tree, Value, as_text, lowered
from bmoe_collector.store.schema import CONFIGS, DEVICE_NAMES, LABELS, RUN_FACTS, RUNS, VERDICTS

RUN_DOCS: Mapping[str, tuple[str, str]] = {
    "run_id": ("", "32 hex digits"),
    "source": ("", "agent: recorded by a phone's agent; import: from files"),
    "outcome": ("", "started, ok, partial, failed, killed, aborted, skipped or lost"),
    "cause": ("", "short code of why it ended: exit, signal, watchdog:decode, gate:cpu_temp_c ..."),
    "exit_code": ("", "exit status of the engine; null when it was not observed or a signal ended it"),
    "signal": ("", "number of the signal that ended the engine"),
    "simulated": ("0|1", "a stand-in engine or sensor tree"),
    "agent_uuid": ("", "the phone: its agent's uuid, 32 hex digits"),
    "device_name": ("", "what the phone called itself"),
    "device_model": ("", "the phone's model"),
    "engine_name": ("", "name of the engine in the agent's configuration"),
    "engine_version": ("", "first line of its --version, or the preamble's engine="),
    "engine_sha256": ("", "the binary; versions are not unique"),
    "model_name": ("", "model file"),
    "model_arch": ("", "architecture"),
    "model_size": ("bytes", "all shards"),
    "model_identity": ("", "sha256 over size, header and sampled blocks of every shard"),
    "prompt_sha256": ("", "what was asked, all turns"),
    "plan_id": ("", "the plan, 32 hex digits"),
    "plan_name": ("", "its name"),
    "cell": ("", "name of the plan's cell"),
    "cell_index": ("", "place in the order the cells ran in, from 0"),
    "repeat": ("", "repeat of the cell, from 0"),
    "block": ("", "cells to be compared with each other share one"),
    "attempt": ("", "from 1"),
    "unmeasured": ("0|1", "warm-up, or discarded by protocol"),
    "session": ("0|1", "several prompts in one process"),
    "started_wall_ns": (
        "ns",
        "start, since 1970, by the phone's wall clock; of an import when the newest of its files was written",
    ),
    "ended_wall_ns": ("ns", "end, likewise"),
    "boot_id": ("", "the phone's boot"),
    "directory": ("", "on the phone, or the folder that was imported"),
    "n_tokens": ("tokens", "generated"),
    "n_turns": ("", "generations, decisions and rejected requests"),
    "complete": ("0|1", "everything asked for is in the record, and the record has no hole"),
    "ended_by": ("", "engine, agent, user, gate or unknown"),
}
"""Columns of `runs` that can be asked for by name: unit and meaning."""

RUN_FIELDS: tuple[str, ...] = tuple(RUN_DOCS)

MADE: Mapping[str, tuple[str, str]] = {
    "device": ("", "what people call the phone, else what it calls itself, else its model"),
    "started": ("", "start in UTC, YYYY-MM-DDTHH:MM:SSZ"),
    "labels": ("", "labels as KEY=VALUE"),
    "verdicts": ("", "codes of the run's verdicts, gravest first"),
}
"""Columns a list can show that are put together from several places; `device` can be filtered and sorted by too."""

_ALIASES: Mapping[str, str] = {
    "id": "run_id",
    "run": "run_id",
    "when": "started",
    "engine": "engine_version",
    "model": "model_name",
    "arch": "model_arch",
    "plan": "plan_name",
    "tokens": "n_tokens",
    "exit": "exit_code",
    "hit": "cache_hit_pct",
    "ttft": "ttft_s",
}


@dataclass(frozen=True, slots=True)
class Field:
    """One name: what kind of value ("int", "float", "str", "bool"), unit, meaning and where it comes from."""

    name: str
    kind: str
    unit: str
    doc: str
    source: str  # "run", "preamble", "fact", "made"


class Bytewise(FunctionElement[str]):
    """Text compared byte by byte, as SQLite does by itself and Postgres when told; its `lower` then knows ASCII alone."""

    type = SqlText()
    name = "bytewise"
    inherit_cache = True


@compiles(Bytewise)
def _bytewise(element: Bytewise, compiler: Any, **how: Any) -> str:
    return str(compiler.process(element.clauses, **how))


@compiles(Bytewise, "postgresql")
def _bytewise_postgresql(element: Bytewise, compiler: Any, **how: Any) -> str:
    return f'({compiler.process(element.clauses, **how)} COLLATE "C")'


class Falling(FunctionElement[Any]):
    """Largest first, NULL last. SQLite does so by itself, and then reads an index backwards; Postgres is told."""

    name = "falling"
    inherit_cache = True


@compiles(Falling)
def _falling(element: Falling, compiler: Any, **how: Any) -> str:
    return f"{compiler.process(element.clauses, **how)} DESC NULLS LAST"


@compiles(Falling, "sqlite")
def _falling_sqlite(element: Falling, compiler: Any, **how: Any) -> str:
    return f"{compiler.process(element.clauses, **how)} DESC"


class Afterwards(FunctionElement[bool]):
    """A condition that is looked at run by run. SQLite would else turn joins round for it, lose the order of its index and
    sort every run for the sake of one page; Postgres knows better by itself.
    """

    type = Boolean()
    name = "afterwards"
    inherit_cache = True


@compiles(Afterwards)
def _afterwards(element: Afterwards, compiler: Any, **how: Any) -> str:
    return str(compiler.process(element.clauses, **how))


@compiles(Afterwards, "sqlite")
def _afterwards_sqlite(element: Afterwards, compiler: Any, **how: Any) -> str:
    return f"({compiler.process(element.clauses, **how)}) IS TRUE"


@cache
def fields() -> Mapping[str, Field]:
    """Every name but labels and `verdict`, in the order they are looked for."""
    from bmoe_proto.contract.columns import PREAMBLE

    from bmoe_collector.meaning.facts import FACTS

    found = {name: Field(name, _kind(RUNS.c[name]), unit, doc, "run") for name, (unit, doc) in RUN_DOCS.items()}
    found |= {name: Field(name, "str", unit, doc, "made") for name, (unit, doc) in MADE.items()}
    for name in _preamble():
        told = PREAMBLE[name]
        found.setdefault(name, Field(name, told.type, told.unit, told.doc, "preamble"))
    for fact in FACTS:
        found.setdefault(fact.name, Field(fact.name, fact.kind, fact.unit, fact.formula, "fact"))
    # `engine`, `model` and `arch` mean the run's column, whatever the preamble calls its own.
    return {name: field for name, field in found.items() if name not in _ALIASES}


def aliases() -> Mapping[str, str]:
    """Shorter words for names."""
    return _ALIASES


def _preamble() -> list[str]:
    return [column.name for column in CONFIGS.columns if column.name not in {"run_no", "keys", "format"}]


def _kind(column: ColumnElement[Any]) -> str:
    return {bool: "bool", int: "int", float: "float"}.get(column.type.python_type, "str")


@cache
def known_names() -> frozenset[str]:
    """Every name but labels."""
    return frozenset({*fields(), *_ALIASES, "verdict"})


def canonical(name: str) -> str:
    """The name a word stands for; raises UserError with what was probably meant."""
    if name.startswith(("label.", "label:")):
        return "label." + name[6:]
    if name in RUN_FIELDS or name in _ALIASES:
        return _ALIASES.get(name, name)
    if name in known_names():
        return name
    near = get_close_matches(name, sorted(known_names()), n=3, cutoff=0.6)
    hint = (
        f"; did you mean {', '.join(near)}?" if near else "; `bmoe runs --fields` lists the names, labels are label.KEY"
    )
    raise UserError(f"no such name: {name}{hint}")


def source() -> FromClause:
    """What every expression here is selected from."""
    return RUNS.outerjoin(CONFIGS, CONFIGS.c.run_no == RUNS.c.run_no).outerjoin(
        RUN_FACTS, RUN_FACTS.c.run_no == RUNS.c.run_no
    )


def expression(name: str) -> ColumnElement[Any]:
    """SQL for a name's value; raises UserError for a name nobody knows or that is no single value."""
    name = canonical(name)
    if name.startswith("label."):
        chosen = select(LABELS.c.value).where(LABELS.c.run_no == RUNS.c.run_no, LABELS.c.key == name[6:])
        return chosen.scalar_subquery().label(name)
    if name in {"verdict", "verdicts"}:
        raise UserError("a verdict is asked for with `verdict = CODE`")
    if name == "labels":
        raise UserError("a label is asked for with `label.KEY = VALUE`")
    if name == "started":
        raise UserError("the start is asked for with --since and --until, or as started_wall_ns")
    if name == "device":
        return device().label(name)
    if name in RUN_FIELDS:
        return RUNS.c[name].label(name)
    if name in CONFIGS.c and name not in {"run_no", "keys", "format"}:
        return CONFIGS.c[name].label(name)
    if name in RUN_FACTS.c:
        return RUN_FACTS.c[name].label(name)
    return _held(name, fields()[name].kind).label(name)


def device() -> ColumnElement[Any]:
    """What people call the phone of a run, else what it calls itself, else its model."""
    called = select(DEVICE_NAMES.c.name).where(DEVICE_NAMES.c.agent_uuid == RUNS.c.agent_uuid).scalar_subquery()
    return func.coalesce(called, RUNS.c.device_name, RUNS.c.device_model)


def _held(name: str, kind: str) -> ColumnElement[Any]:
    """A fact without a column of its own, from the JSON that holds them all."""
    text = cast(RUN_FACTS.c.facts[name].as_string(), SqlText)
    if kind == "str":
        return text
    if kind == "bool":  # JSON's true is 1 in SQLite and the word in Postgres
        return case((text.in_(["1", "true"]), 1), (text.in_(["0", "false"]), 0), else_=None)
    return cast(text, Double)


def ordering(name: str) -> ColumnElement[Any]:
    """SQL to sort by a name, alike on both databases; the caller says which way and puts NULL last."""
    column = _plain(name) if canonical(name) != "started" else RUNS.c.started_wall_ns
    return Bytewise(column) if _is_text(column) else column


def _plain(name: str) -> ColumnElement[Any]:
    labelled: Any = expression(name)
    inner: ColumnElement[Any] = labelled.element
    return inner


def _is_text(column: ColumnElement[Any]) -> bool:
    kind: Any = column.type
    try:
        return bool(kind.python_type is str)
    except NotImplementedError:
        return False


def compile_where(tree: Tree) -> ColumnElement[bool]:
    """The expression as SQL over `source()`."""
    if isinstance(tree, Not):
        return not_(compile_where(tree.of))
    if isinstance(tree, Both):
        parts = [compile_where(part) for part in tree.of]
        return or_(*parts) if tree.op == "or" else and_(*parts)
    name = canonical(tree.name)
    if name == "verdict":
        return _verdict(tree)
    column = _plain(name)
    if tree.op == "null":
        return column.is_(None)
    if tree.op == "in":
        assert isinstance(tree.value, tuple)
        return or_(*(_one(name, column, "=", value) for value in tree.value))
    assert not isinstance(tree.value, tuple)
    return _one(name, column, tree.op, tree.value)


_ORDERED = frozenset({"<", "<=", ">", ">="})


def _one(name: str, column: ColumnElement[Any], op: str, value: Value) -> ColumnElement[bool]:
    if op == "~":
        return contains(cast(column, SqlText), as_text(value))
    if _is_text(column):
        return _compared(Bytewise(column) if op in _ORDERED else column, op, literal(as_text(value)))
    if isinstance(value, str):
        raise UserError(f"where: {name} is a number, {value!r} is not")
    if getattr(column.type, "python_type", None) is bool:
        column = cast(column, Integer)
    return _compared(column, op, literal(float(value or 0)))


def contains(column: ColumnElement[Any], text: str) -> ColumnElement[bool]:
    """Whether text holds some other, ASCII letters in any case: what both databases can do alike."""
    return func.lower(Bytewise(column)).contains(lowered(text), autoescape=True)


def _compared(column: ColumnElement[Any], op: str, value: ColumnElement[Any]) -> ColumnElement[bool]:
    return {
        "=": column == value,
        "!=": column != value,
        "<": column < value,
        "<=": column <= value,
        ">": column > value,
        ">=": column >= value,
    }[op]


def _verdict(asked: Comparison) -> ColumnElement[bool]:
    of_run = select(VERDICTS.c.code).where(VERDICTS.c.run_no == RUNS.c.run_no)
    if asked.op == "null":
        return ~of_run.exists()
    if asked.op == "in":
        assert isinstance(asked.value, tuple)
        return of_run.where(VERDICTS.c.code.in_([as_text(value) for value in asked.value])).exists()
    if asked.op == "!=":
        return ~of_run.where(VERDICTS.c.code == as_text(asked.value)).exists()
    if asked.op == "~":
        return of_run.where(contains(VERDICTS.c.code, as_text(asked.value))).exists()
    if asked.op != "=":
        raise UserError(f"verdict {asked.op}: ask `verdict = CODE` or `verdict != CODE`")
    return of_run.where(VERDICTS.c.code == as_text(asked.value)).exists()
