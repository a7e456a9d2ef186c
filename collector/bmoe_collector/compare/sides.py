"""From what a person types to the runs of one side.

A side is run ids joined by commas, `label:KEY=VALUE`, `cell:PLAN/CELL` or `where:EXPR` (query/where.py). In: the text and
an open store. Out: a `Side` whose runs carry their row, facts, verdicts and labels, in the order they started.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import ColumnElement, and_, func, or_, select

from bmoe_collector.common import UserError
from bmoe_collector.query.fields import compile_where, source
from bmoe_collector.query.where import parse
from bmoe_collector.store.engine import Store
from bmoe_collector.store.find import RunNotFoundError, find_run
from bmoe_collector.store.schema import CONFIGS, LABELS, RUN_FACTS, RUNS, VERDICTS

_RUN_COLUMNS = (
    "run_no", "run_id", "source", "outcome", "cause", "simulated", "agent_uuid", "device_name", "engine_version",
    "engine_sha256", "model_name", "model_size", "model_identity", "prompt_sha256", "plan_id", "plan_name", "plan_sha256",
    "cell", "cell_index", "repeat", "block", "attempt", "unmeasured", "session", "started_wall_ns", "stored_wall_ns",
    "n_tokens", "exit_code", "signal", "complete", "boot_id",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """One run as comparison sees it."""

    run: Mapping[str, Any]
    facts: Mapping[str, Any]
    verdicts: Sequence[tuple[str, str, str]] = ()  # code, severity, evidence
    labels: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def run_id(self) -> str:
        """32 hex digits."""
        return str(self.run["run_id"])

    @property
    def codes(self) -> frozenset[str]:
        """Codes of its verdicts."""
        return frozenset(code for code, _, _ in self.verdicts)

    def get(self, name: str) -> Any:
        """A value by the names of the filter language."""
        if name.startswith(("label.", "label:")):
            return self.labels.get(name[6:])
        if name == "verdict":
            return self.codes
        for place in (self.run, self.config, self.facts):
            if name in place:
                return place[name]
        return None


@dataclass(frozen=True, slots=True)
class Side:
    """What was asked for and the runs that are it."""

    text: str
    runs: tuple[ComparedRun, ...]
    named: bool = False  # by run ids: then none may be left out silently


def find_side(store: Store, text: str) -> Side:
    """The runs of a side.

    Raises:
        UserError: it cannot be read, names nothing stored, or has no run.
    """
    kind, colon, rest = text.partition(":")
    if colon and kind == "label":
        key, equals, value = rest.partition("=")
        if not equals or not key:
            raise UserError(f"{text}: say label:KEY=VALUE")
        runs = _load(store, _labelled(key, value))
    elif colon and kind == "cell":
        plan, slash, cell = rest.partition("/")
        if not slash or not plan or not cell:
            raise UserError(f"{text}: say cell:PLAN/CELL, the plan by its name or the start of its id")
        runs = _load(store, and_(RUNS.c.plan_id == plan_id_of(store, plan), RUNS.c.cell == cell))
        if not runs:
            known = ", ".join(cells_of(store, plan)) or "none"
            several = f"; {said}" if (said := namesakes(store, plan)) else ""
            raise UserError(f"{text}: that plan has no run of a cell `{cell}`; its cells are: {known}{several}")
    elif colon and kind == "where":
        runs = _load(store, compile_where(parse(rest)))
    elif colon and kind not in {"label", "cell", "where"}:
        raise UserError(f"{text}: a side is run ids joined by commas, label:KEY=VALUE, cell:PLAN/CELL or where:EXPR")
    else:
        return Side(text, _by_ids(store, text), named=True)
    if not runs:
        raise UserError(f"{text}: no stored run matches; `bmoe runs` lists what is there")
    return Side(text, runs)


def _by_ids(store: Store, text: str) -> tuple[ComparedRun, ...]:
    try:
        ids = list(dict.fromkeys(find_run(store, word) for word in text.split(",") if word.strip()))
    except RunNotFoundError as error:
        raise UserError(str(error)) from error
    if not ids:
        raise UserError("a side names no run")
    return _load(store, RUNS.c.run_id.in_(ids))


def _labelled(key: str, value: str) -> ColumnElement[bool]:
    return (
        select(LABELS.c.run_no)
        .where(LABELS.c.run_no == RUNS.c.run_no, LABELS.c.key == key, LABELS.c.value == value)
        .exists()
    )


def plan_id_of(store: Store, word: str) -> str:
    """The plan a word means: an id, the start of one (4 digits and more), or a name (its newest plan)."""
    start = word.lower()
    with store.read() as connection:
        rows = connection.execute(
            select(RUNS.c.plan_id, RUNS.c.plan_name)
            .where(or_(RUNS.c.plan_name == word, and_(RUNS.c.plan_id >= start, RUNS.c.plan_id < start + "g")))
            .order_by(RUNS.c.started_wall_ns.desc())
        ).all()
    by_name = [row[0] for row in rows if row[1] == word]
    if by_name:
        return str(by_name[0])
    by_id = {str(row[0]) for row in rows} if len(word) >= 4 else set()
    if len(by_id) == 1:
        return by_id.pop()
    if by_id:
        raise UserError(f"{word} means {len(by_id)} plans: {', '.join(sorted(by_id)[:5])}")
    raise UserError(f"no plan {word} has runs here; `bmoe runs --columns plan_name,cell` shows what is there")


def namesakes(store: Store, word: str) -> str:
    """What to say where a plan's name means several plans, of which the newest is taken; else nothing."""
    with store.read() as connection:
        rows = connection.execute(
            select(RUNS.c.plan_id, func.count(), func.max(RUNS.c.started_wall_ns))
            .where(RUNS.c.plan_name == word)
            .group_by(RUNS.c.plan_id)
            .order_by(func.max(RUNS.c.started_wall_ns).desc())
        ).all()
    if len(rows) < 2:
        return ""
    told = [f"{plan_id[:8]} ({runs} run{'' if runs == 1 else 's'})" for plan_id, runs, _ in rows[:6]]
    more = f" and {len(rows) - 6} more" if len(rows) > 6 else ""
    return f"{len(rows)} plans are called {word}: this is the newest, {told[0]}; the others are {', '.join(told[1:])}{more}"


def cells_of(store: Store, plan: str) -> list[str]:
    """Names of a plan's cells that have runs, in their order."""
    with store.read() as connection:
        rows = connection.execute(
            select(RUNS.c.cell, RUNS.c.cell_index)
            .where(RUNS.c.plan_id == plan_id_of(store, plan), RUNS.c.cell.is_not(None))
            .order_by(RUNS.c.cell_index)
        ).all()
    return list(dict.fromkeys(str(row[0]) for row in rows))


def _load(store: Store, condition: ColumnElement[bool]) -> tuple[ComparedRun, ...]:
    columns = [RUNS.c[name] for name in _RUN_COLUMNS]
    with store.read() as connection:
        rows = connection.execute(
            select(*columns, CONFIGS.c["keys"].label("config_keys"), RUN_FACTS.c.facts.label("derived"))
            .select_from(source())
            .where(condition)
            .order_by(RUNS.c.started_wall_ns, RUNS.c.run_no)
        ).mappings().all()  # fmt: skip
        numbers = [row["run_no"] for row in rows]
        verdicts: dict[int, list[tuple[str, str, str]]] = {}
        labels: dict[int, dict[str, str]] = {}
        for at in range(0, len(numbers), 500):
            some = numbers[at : at + 500]
            for row in connection.execute(
                select(VERDICTS.c.run_no, VERDICTS.c.code, VERDICTS.c.severity, VERDICTS.c.evidence)
                .where(VERDICTS.c.run_no.in_(some))
                .order_by(VERDICTS.c.run_no, VERDICTS.c.at)
            ):
                verdicts.setdefault(row[0], []).append((row[1], row[2], row[3]))
            for labelled in connection.execute(
                select(LABELS.c.run_no, LABELS.c.key, LABELS.c.value).where(LABELS.c.run_no.in_(some))
            ):
                labels.setdefault(labelled[0], {})[labelled[1]] = labelled[2]
    return tuple(
        ComparedRun(
            {name: row[name] for name in _RUN_COLUMNS},
            row["derived"] or {},
            verdicts.get(row["run_no"], []),
            labels.get(row["run_no"], {}),
            row["config_keys"] or {},
        )
        for row in rows
    )
