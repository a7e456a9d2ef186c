"""`bmoe judge [RUN…|--all] [--plan FILE]`: compute facts and verdicts again, and name the cells to run again.

In: stored records. Out: their facts and verdicts, replaced; the contaminated cells, and on request the plan that runs
them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bmoe_collector.common import DbOption, JsonOption, OutsideError, UserError, counted, emit, open_db, say

if TYPE_CHECKING:
    from bmoe_collector.judge import Judged
    from bmoe_collector.store.engine import Store


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("judge", help="Compute facts and verdicts again, and name the cells to run again.")(judge)


def judge(
    runs: Annotated[list[str] | None, typer.Argument(metavar="[RUN]...", help="Run ids or unique prefixes.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every stored run.")] = False,
    plan: Annotated[
        Path | None, typer.Option("--plan", metavar="FILE", help="Write the plan that runs contaminated cells again.")
    ] = None,
    json: JsonOption = False,
    db: DbOption = None,
) -> None:
    """Compute facts and verdicts again."""
    from bmoe_collector.judge import every_run, refresh, to_run_again

    if bool(runs) == everything:
        raise UserError("name the runs to judge, or --all for every stored one" + (", not both" if runs else ""))
    store = open_db(db, reads=True)
    try:
        chosen = every_run(store) if everything else _named(store, runs or [])
        judged = refresh(store, chosen)
        again = to_run_again(store, [one.run_id for one in judged])
        written = _write_plan(store, again, plan) if plan is not None else None
    finally:
        store.close()
    failed = len(chosen) - len(judged)
    if json:
        emit(
            {
                "judged": [
                    {"run": one.run_id, "verdicts": [verdict.to_json() for verdict in one.verdicts]} for one in judged
                ],
                "rerun": again,
                "plan": str(written) if written else None,
            }
        )
    else:
        _print(judged, again)
    if written:
        say(f"wrote {written}")
    if failed:
        raise OutsideError(f"{failed} of {counted(len(chosen), 'run')} could not be judged; the lines above say why")


def _named(store: Store, words: Sequence[str]) -> list[str]:
    from bmoe_collector.commands.show import with_nearest
    from bmoe_collector.store.find import RunNotFoundError, find_runs

    try:
        return find_runs(store, list(words))
    except RunNotFoundError as error:
        raise UserError(with_nearest(error)) from error


def _print(judged: Sequence[Judged], again: Sequence[dict[str, Any]]) -> None:
    from collections import Counter

    from rich.table import Table

    from bmoe_collector.show.console import console as made
    from bmoe_collector.show.safe import clip, escape

    console = made()
    counts = Counter((verdict.severity, verdict.code) for one in judged for verdict in one.verdicts)
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for name in ("severity", "verdict", "runs"):
        table.add_column(name)
    for severity in ("fail", "warn", "info"):
        for (found, code), count in sorted(counts.items()):
            if found == severity:
                table.add_row(severity, code, str(count))
    console.print(f"{counted(len(judged), 'run')} judged")
    if counts:
        console.print(table)
    for one in again:
        where = escape(f"{one['plan'] or 'no plan'} / {one['cell'] or 'no cell'}")
        console.print(f"run again {one['run'][:12]}  {where}  {clip(one['why'], 200)}", markup=False, soft_wrap=True)


def _write_plan(store: Store, again: Sequence[dict[str, Any]], path: Path) -> Path | None:
    """Write the plan that runs the cells again; nothing is written when none needs to."""
    from sqlalchemy import select

    from bmoe_collector.store.schema import PLANS, RUNS
    from bmoe_collector.verdicts.again import FIRST_LINE, plan_again

    if not again:
        say("no run is contaminated: no plan was written")
        return None
    with store.read() as connection:
        names = [one["run"] for one in again]
        rows = [
            dict(row)
            for at in range(0, len(names), 500)
            for row in connection.execute(select(RUNS).where(RUNS.c.run_id.in_(names[at : at + 500]))).mappings()
        ]
        texts = {str(plan_id): str(text) for plan_id, text in connection.execute(select(PLANS.c.plan_id, PLANS.c.text))}
    rows.sort(key=lambda row: row["run_no"])
    try:
        text = plan_again(rows, texts, {one["run"]: one["why"] for one in again})
    except ValueError as error:
        raise OutsideError(str(error)) from error
    try:
        if path.exists() and not path.read_text("utf-8", "replace").startswith(FIRST_LINE):
            raise UserError(f"--plan {path}: is there already and was not written by this command; name another file")
        path.write_text(text, "utf-8")
    except OSError as error:
        raise OutsideError(f"{path}: {error.strerror}") from error
    return path
