"""`bmoe show RUN [--tokens]`: everything stored of one run and what it means, for eyes or as one JSON object.

Showing a failed run is a success. An unknown run is wrong usage; the message names the nearest ids.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from bmoe_collector.common import DbOption, JsonOption, UserError, emit, open_db

if TYPE_CHECKING:
    from bmoe_collector.meaning import Derived
    from bmoe_collector.record import RunRecord
    from bmoe_collector.store.engine import Store
    from bmoe_collector.verdicts import Verdict


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("show", help="One run: configuration, speed, memory, cache, verdicts.")(show)


def show(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run id or a unique prefix of it; `last` is the newest.")],
    tokens: Annotated[bool, typer.Option("--tokens", help="Every token too, under the contract's names.")] = False,
    text: Annotated[bool, typer.Option("--text", help="The generated text whole, not its beginning.")] = False,
    json: JsonOption = False,
    db: DbOption = None,
) -> None:
    """One run: configuration, speed, memory, cache, verdicts."""
    from bmoe_collector.store.find import RunNotFoundError
    from bmoe_collector.store.load import load_run

    store = open_db(db, reads=True)
    try:
        try:
            record = load_run(store, run)
        except RunNotFoundError as error:
            raise UserError(with_nearest(error)) from error
        derived, verdicts = judged(store, record)
    finally:
        store.close()
    if json:
        from bmoe_collector.show.document import document

        emit(document(record, derived, verdicts, tokens=tokens))
        return
    show_in_terminal(record, derived, verdicts, tokens=tokens, text=text)


def with_nearest(error: Exception) -> str:
    """The message of a RunNotFoundError with the nearest ids, where it does not name them already."""
    message, near = str(error), list(getattr(error, "near", ()))
    fresh = [run_id for run_id in near if run_id not in message]
    return f"{message}; nearest: {', '.join(fresh)}" if fresh else message


def judged(store: Store, record: RunRecord) -> tuple[Derived, list[Verdict]]:
    """What a run means, and its verdicts: the stored ones, or those it has by itself when it was never judged."""
    from bmoe_collector.meaning import derive
    from bmoe_collector.store.facts import verdicts_of
    from bmoe_collector.verdicts import Verdict, judge_alone

    derived = derive(record)
    if not record.run.get("facts"):
        return derived, judge_alone(record, derived)
    known = {"info", "warn", "fail"}
    stored = [
        Verdict(code, severity, evidence)  # type: ignore[arg-type]
        for code, severity, evidence in verdicts_of(store, record.run_id)
        if severity in known
    ]
    return derived, stored


def show_in_terminal(
    record: RunRecord, derived: Derived, verdicts: list[Verdict], *, tokens: bool = False, text: bool = False
) -> None:
    """Print a run for eyes."""
    from bmoe_collector.show.console import console as made
    from bmoe_collector.show.view import render

    console = made()
    render(console, record, derived, verdicts, whole_text=text)
    if tokens:
        from bmoe_collector.show.tokens import token_table

        console.print(token_table(record))
