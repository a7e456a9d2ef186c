"""Names a filter may use and columns a list may show: where each lies in the database, and the expression for it.

A name is looked for as a column of the run, then as a key of the preamble, then as a derived fact; `label.KEY` and
`verdict` are their own. `compile_where` turns the tree of `query.where` into SQL that both databases answer alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from typing import Any

from sqlalchemy import ColumnElement, Double, Integer, and_, cast, func, literal, not_, or_, select
from sqlalchemy import Text as SqlText
from sqlalchemy.sql.expression import FromClause

from bmoe_collector.common import UserError
from bmoe_collector.query.where import Both, Comparison, Not, Tree, Value, as_text, lowered
from bmoe_collector.store.schema import CONFIGS, LABELS, RUN_FACTS, RUNS, VERDICTS

RUN_FIELDS: tuple[str, ...] = (
    "run_id", "source", "outcome", "cause", "exit_code", "signal", "simulated", "agent_uuid", "device_name", "device_model",
    "engine_name", "engine_version", "engine_sha256", "model_name", "model_arch", "model_size", "model_identity",
    "prompt_sha256", "plan_id", "plan_name", "cell", "cell_index", "repeat", "block", "attempt", "unmeasured", "session",
    "started_wall_ns", "ended_wall_ns", "boot_id", "directory", "n_tokens", "n_turns", "complete", "ended_by",
)  # fmt: skip
"""Columns of `runs` that can be asked for by name."""

_ALIASES: Mapping[str, str] = {
    "id": "run_id",
    "run": "run_id",
    "device": "device_name",
    "engine": "engine_version",
    "model": "model_name",
    "plan": "plan_name",
    "tokens": "n_tokens",
    "exit": "exit_code",
}


@cache
def known_names() -> frozenset[str]:
    """Every name but labels."""
    from bmoe_collector.meaning.facts import FACTS

    preamble = {column.name for column in CONFIGS.columns} - {"run_no", "keys", "format"}
    return frozenset({*RUN_FIELDS, *_ALIASES, *preamble, *(fact.name for fact in FACTS), "verdict"})


def canonical(name: str) -> str:
    """The name a word stands for; raises UserError with what was probably meant."""
    if name.startswith(("label.", "label:")):
        return "label." + name[6:]
    found = _ALIASES.get(name, name)
    if found in known_names():
        return found
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
    """SQL for a name's value; raises UserError for a name nobody knows."""
    name = canonical(name)
    if name.startswith("label."):
        chosen = select(LABELS.c.value).where(LABELS.c.run_no == RUNS.c.run_no, LABELS.c.key == name[6:])
        return chosen.scalar_subquery().label(name)
    if name == "verdict":
        raise UserError("verdict is asked for with `verdict = CODE`")
    if name in RUN_FIELDS:
        return RUNS.c[name].label(name)
    if name in CONFIGS.c and name not in {"run_no", "keys", "format"}:
        return CONFIGS.c[name].label(name)
    if name in RUN_FACTS.c:
        return RUN_FACTS.c[name].label(name)
    from bmoe_collector.meaning.facts import BY_NAME

    held = RUN_FACTS.c.facts[name]
    return (held.as_string() if BY_NAME[name].kind == "str" else cast(held.as_string(), Double)).label(name)


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


def _one(name: str, column: ColumnElement[Any], op: str, value: Value) -> ColumnElement[bool]:
    if op == "~":
        return _lower(cast(column, SqlText)).contains(lowered(as_text(value)), autoescape=True)
    if _is_text(column):
        return _compared(column, op, literal(as_text(value)))
    if isinstance(value, str):
        raise UserError(f"where: {name} is a number, {value!r} is not")
    if getattr(column.type, "python_type", None) is bool:
        column = cast(column, Integer)
    return _compared(column, op, literal(float(value or 0)))


def _lower(column: ColumnElement[Any]) -> ColumnElement[Any]:
    return func.lower(column)


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
        return of_run.where(_lower(VERDICTS.c.code).contains(lowered(as_text(asked.value)), autoescape=True)).exists()
    if asked.op != "=":
        raise UserError(f"verdict {asked.op}: ask `verdict = CODE` or `verdict != CODE`")
    return of_run.where(VERDICTS.c.code == as_text(asked.value)).exists()
