"""`bmoe compare` and `bmoe regress`: two sides against each other, or why not.

In: sides (compare/sides.py). Out: counters, terms, speed and a sentence, or one JSON object. Exit 0 when an answer was
given, resolved or not; 1 when refused. `regress` exits 1 on a resolved regression, or when it was refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bmoe_collector.common import EXIT_NO, DbOption, JsonOption, UserError, emit, open_db, say

if TYPE_CHECKING:
    from bmoe_collector.compare.answer import Answer
    from bmoe_collector.store.engine import Store

SIDES = "Run ids joined by commas, label:KEY=VALUE, cell:PLAN/CELL or where:EXPR. The first is the baseline; more than two give a matrix."
_Force = Annotated[
    bool, typer.Option("--force", help="Answer although the sides are not comparable; the reasons stay on the answer.")
]
_Metric = Annotated[
    str | None, typer.Option(help="Primary metric, the name of a fact (default tok_s, or the plan's own).")
]
_Effect = Annotated[
    float | None, typer.Option("--smallest-effect", help="Smallest relative difference that matters, 0.05 is 5 %.")
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("compare")(compare)
    app.command("regress")(regress)


def compare(
    sides: Annotated[list[str] | None, typer.Argument(metavar="A B…", help=SIDES)] = None,
    question: Annotated[
        str | None, typer.Option(metavar="PLAN", help="Answer what a plan's [question] asked before it ran.")
    ] = None,
    by: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="Compare settings that alternate inside one run, by this column."),
    ] = None,
    cold: Annotated[int, typer.Option(help="With --by: tokens left out at the start of the run.")] = 32,
    carry: Annotated[int, typer.Option(help="With --by: tokens left out after every switch.")] = 8,
    metric: _Metric = None,
    smallest_effect: _Effect = None,
    force: _Force = False,
    json: JsonOption = False,
    db: DbOption = None,
) -> None:
    """Compare sides: counters exactly, each term of the time, then speed."""
    chosen = sides or []
    _fraction(smallest_effect)
    if metric is not None:
        _known_metric(metric)
    with closing(open_db(db, reads=True)) as store:
        if by is not None:
            if len(chosen) != 1 or question:
                raise UserError("--by compares inside one run: name that run alone")
            _sandwich(store, chosen[0], by, cold, carry, json)
            return
        answers = _answers(store, chosen, question, metric, smallest_effect, force=force)
    _print(answers, matrix=question is not None or len(answers) > 1, json=json, forced=force)
    if not all(answer.answered for answer in answers):
        raise typer.Exit(EXIT_NO)


def _answers(
    store: Store, chosen: Sequence[str], question: str | None, metric: str | None, wanted: float | None, *, force: bool
) -> list[Answer]:
    from bmoe_collector.compare.question import answer_question, answer_sides, corrected

    costs = token_costs(store)
    if question is not None:
        if chosen:
            raise UserError("--question answers what the plan asked: name no sides beside it")
        return answer_question(store, question, costs, force=force)
    if len(chosen) < 2:
        raise UserError("name two sides, or more for a matrix; `bmoe compare --help` says how")
    answers = [
        answer_sides(store, chosen[0], side, costs, force=force, metric=metric, wanted=wanted) for side in chosen[1:]
    ]
    return corrected(answers, metric or "tok_s") if len(answers) > 1 else answers


def regress(
    candidate: Annotated[str, typer.Argument(help="The side to judge; see `bmoe compare --help`.")],
    baseline: Annotated[str, typer.Option(help="The side it must not be worse than.")],
    metric: _Metric = None,
    smallest_effect: _Effect = None,
    force: _Force = False,
    json: JsonOption = False,
    db: DbOption = None,
) -> None:
    """Exit 1 on a resolved regression against a baseline, or when the two are not comparable."""
    from bmoe_collector.compare.question import answer_sides

    _fraction(smallest_effect)
    chosen = _known_metric(metric or "tok_s")
    with closing(open_db(db, reads=True)) as store:
        answer = answer_sides(
            store, baseline, candidate, token_costs(store), force=force, metric=chosen, wanted=smallest_effect
        )
    row = next((row for row in answer.metrics if row.metric == chosen), None)
    better = _better(chosen)
    worse = bool(row and row.resolved and row.ratio is not None and (row.ratio < 1) == (better > 0) and row.ratio != 1)
    if worse and smallest_effect is not None and row is not None and row.ratio is not None:
        worse = abs(row.ratio - 1) >= smallest_effect
    if json:
        emit({**answer.to_json(), "regression": worse if answer.answered else None})
    else:
        _print([answer], matrix=False, json=False, forced=force)
        if answer.answered:
            say("regression" if worse else "no resolved regression")
    if worse or not answer.answered:
        raise typer.Exit(EXIT_NO)


def _fraction(effect: float | None) -> None:
    if effect is not None and not 0 < effect <= 1:
        raise UserError(f"--smallest-effect {effect:g}: a fraction is wanted, 0.05 is 5 %")


def _known_metric(name: str) -> str:
    from bmoe_collector.meaning.facts import BY_NAME

    if name not in BY_NAME or BY_NAME[name].kind not in {"float", "int"}:
        numbers = ", ".join(fact.name for fact in BY_NAME.values() if fact.better)
        raise UserError(f"--metric {name}: no such number; those with a better side are {numbers}")
    return name


def _better(name: str) -> int:
    from bmoe_collector.meaning.facts import BY_NAME

    better = BY_NAME[name].better
    if better == 0:
        raise UserError(f"--metric {name}: neither more nor less of it is better, so it cannot regress")
    return better


def token_costs(store: Store) -> Callable[[str], Sequence[float]]:
    """Cost of every token of a run in ms, read when an answer needs them."""

    def costs(run_id: str) -> Sequence[float]:
        from bmoe_collector.meaning.derive import derive
        from bmoe_collector.store.load import load_run

        return [cost for cost in derive(load_run(store, run_id)).token_costs_ms if cost is not None and cost > 0]

    return costs


def _sandwich(store: Store, word: str, column: str, cold: int, carry: int, json: bool) -> None:
    from bmoe_collector.compare.sandwich import compare_by
    from bmoe_collector.meaning.derive import derive
    from bmoe_collector.record import SIMULATED
    from bmoe_collector.store.find import RunNotFoundError, find_run
    from bmoe_collector.store.load import load_run

    if cold < 0 or carry < 0:
        raise UserError("--cold and --carry count tokens: 0 or more")
    try:
        record = load_run(store, find_run(store, word))
    except RunNotFoundError as error:
        raise UserError(str(error)) from error
    result = compare_by(record.tokens().columns, column, derive(record).token_costs_ms, cold, carry)
    notes = [SIMULATED] if record.run.get("simulated") else []
    result = {"run": record.run_id, **result, "notes": notes}
    if json:
        emit(result)
        return
    from bmoe_collector.compare.tables import show_sandwich

    show_sandwich(result)


def _print(answers: Sequence[Answer], *, matrix: bool, json: bool, forced: bool) -> None:
    if json:
        whole: Any = {"matrix": [answer.to_json() for answer in answers]} if matrix else answers[0].to_json()
        emit(whole)
        return
    from bmoe_collector.compare.tables import show_answer, show_matrix

    if matrix and len(answers) > 1:
        show_matrix(answers)
    for answer in answers:
        show_answer(answer, forced=forced)
