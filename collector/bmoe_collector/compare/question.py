"""What a plan asked before its first run, and the answer in those terms.

A `[question]` table travels with the plan and is stored with every run of it:

    compare = [["A", "B"], …]      pairs of cell names, the first the baseline
    metric = "tok_s"                the primary metric, a fact's name
    smallest_effect = 0.05          relative: what is worth knowing about
    keep = ["foreign_load", …]      expressions of the filter language that a run must satisfy to be used

An answer to it is labelled `as asked`; anything else is exploration. A question that was edited after runs existed
is answered and says so: each edition is a plan of its own sha256.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import select

from bmoe_collector.common import UserError
from bmoe_collector.compare.answer import Answer, compare
from bmoe_collector.compare.metrics import PRIMARY, TokenCosts
from bmoe_collector.compare.sides import ComparedRun, Side, find_side, namesakes, plan_id_of
from bmoe_collector.compare.statistics import LEVEL, holm
from bmoe_collector.query.fields import compile_where
from bmoe_collector.query.where import Tree, holds, parse
from bmoe_collector.store.engine import Store
from bmoe_collector.store.schema import RUNS


@dataclass(frozen=True, slots=True)
class Question:
    """As fixed before the first run."""

    compare: tuple[tuple[str, str], ...]
    metric: str
    smallest_effect: float | None
    keep: tuple[str, ...]
    plan_id: str = ""
    edited: bool = False

    def asks(self, a: str, b: str) -> bool:
        """Whether it asks about these two cells, in this order or the other."""
        return (a, b) in self.compare or (b, a) in self.compare


def read_question(table: Mapping[str, Any], plan_id: str = "", *, edited: bool = False) -> Question:
    """From its stored JSON; what is missing has its default.

    Raises:
        UserError: a pair is no pair, or a keep rule cannot be read.
    """
    pairs = table.get("compare") or []
    if not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        raise UserError('[question] compare: a list of pairs of cell names is wanted, [["A", "B"]]')
    rules = tuple(str(rule) for rule in table.get("keep") or ())
    for rule in rules:
        compile_where(parse(rule))
    effect = table.get("smallest_effect")
    return Question(
        tuple((str(first), str(second)) for first, second in pairs),
        str(table.get("metric") or PRIMARY),
        float(effect) if effect is not None else None,
        rules,
        plan_id,
        edited,
    )


def question_of(store: Store, plan: str) -> Question | None:
    """The question stored with a plan's runs; None when it asked none."""
    plan_id = plan_id_of(store, plan)
    with store.read() as connection:
        rows = connection.execute(
            select(RUNS.c.question, RUNS.c.plan_sha256, RUNS.c.started_wall_ns)
            .where(RUNS.c.plan_id == plan_id)
            .order_by(RUNS.c.started_wall_ns)
        ).all()
        name = connection.execute(select(RUNS.c.plan_name).where(RUNS.c.plan_id == plan_id).limit(1)).scalar()
        editions = connection.execute(
            select(RUNS.c.question).where(RUNS.c.plan_name == name, RUNS.c.plan_id != plan_id, RUNS.c.started_wall_ns < (rows[0][2] or 0))
        ).scalars().all()  # fmt: skip
    first = next((row[0] for row in rows if row[0]), None)
    if not first:
        return None
    texts = {json.dumps(row[0], sort_keys=True) for row in rows}
    earlier = {json.dumps(edition, sort_keys=True) for edition in editions if edition}
    return read_question(first, plan_id, edited=len(texts) > 1 or bool(earlier - texts))


def keep_rule(question: Question) -> Callable[[ComparedRun], str | None]:
    """A function that says which keep rule a run breaks, or None."""
    trees: list[tuple[str, Tree]] = [(rule, parse(rule)) for rule in question.keep]

    def broken(run: ComparedRun) -> str | None:
        for rule, tree in trees:
            if holds(tree, run.get) is not True:
                return f"it breaks the keep rule `{rule}`"
        return None

    return broken


def answer_sides(
    store: Store, a: str, b: str, costs: TokenCosts, *, force: bool, metric: str | None, wanted: float | None
) -> Answer:
    """Compare two sides; as their plan asked, when both are cells of one plan that asked about them."""
    question = _asked(store, a, b)
    left, right = find_side(store, a), find_side(store, b)
    if question is None or (metric not in {None, question.metric}):
        answer = compare(left, right, costs, force=force, primary=metric or PRIMARY, wanted=wanted)
    else:
        answer = _as_asked(question, left, right, costs, force=force)
    plans = dict.fromkeys(side.partition(":")[2].partition("/")[0] for side in (a, b) if side.startswith("cell:"))
    for plan in plans:
        answer = _of_several(store, plan, answer)
    return answer


def _as_asked(question: Question, a: Side, b: Side, costs: TokenCosts, *, force: bool) -> Answer:
    label = "as asked" + (", but the question was edited after runs existed" if question.edited else "")
    return compare(
        a, b, costs, force=force, primary=question.metric, wanted=question.smallest_effect, keep=keep_rule(question), label=label
    )  # fmt: skip


def _asked(store: Store, a: str, b: str) -> Question | None:
    cells = []
    for text in (a, b):
        kind, _, rest = text.partition(":")
        plan, slash, cell = rest.partition("/")
        if kind != "cell" or not slash:
            return None
        cells.append((plan_id_of(store, plan), cell))
    if cells[0][0] != cells[1][0]:
        return None
    question = question_of(store, cells[0][0])
    return question if question is not None and question.asks(cells[0][1], cells[1][1]) else None


def answer_question(store: Store, plan: str, costs: TokenCosts, *, force: bool = False) -> list[Answer]:
    """Every comparison a plan asked for, in its order; p-values of the primary metric corrected for their number.

    Raises:
        UserError: the plan asked nothing.
    """
    question = question_of(store, plan)
    if question is None or not question.compare:
        raise UserError(f"plan {plan} has no [question] with cells to compare: name two sides instead")
    try:
        answers = [
            _as_asked(question, _cell(store, question, first), _cell(store, question, second), costs, force=force)
            for first, second in question.compare
        ]
    except UserError as error:
        several = f"; {said}" if (said := namesakes(store, plan)) else ""
        raise UserError(f"{error}{several}") from error
    return corrected([_of_several(store, plan, answer) for answer in answers], question.metric)


def _cell(store: Store, question: Question, cell: str) -> Side:
    side = find_side(store, f"cell:{question.plan_id}/{cell}")
    return replace(side, text=f"cell:{question.plan_id[:8]}/{cell}")


def _of_several(store: Store, plan: str, answer: Answer) -> Answer:
    """The answer with a note when the plan's name means other plans too."""
    said = namesakes(store, plan)
    return replace(answer, notes=(*answer.notes, said)) if said else answer


def corrected(answers: list[Answer], metric: str = PRIMARY) -> list[Answer]:
    """Several comparisons judged together: each answer gets `p_corrected` and `resolved_corrected` of its primary metric."""
    found = [next((row for row in answer.metrics if row.metric == metric), None) for answer in answers]
    values = holm([row.p if row is not None else None for row in found])
    return [
        replace(
            answer,
            extra={
                **answer.extra,
                "p_corrected": value,
                "resolved_corrected": bool(
                    row is not None and row.smallest_resolvable is not None and value is not None and value <= LEVEL
                ),
                "comparisons": len(answers),
            },
        )
        for answer, row, value in zip(answers, found, values, strict=True)
    ]
