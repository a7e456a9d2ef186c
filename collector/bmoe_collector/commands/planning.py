"""`bmoe plan check|init|list`: look at a plan before it runs, or begin one.

In: a plan file, or the name of a shipped plan. Out: its cells in order, what speaks against it, how long it takes.
"""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bmoe_collector.common import EXIT_NO, DbOption, JsonOption, UserError, counted, emit, open_db, say

if TYPE_CHECKING:
    from bmoe_proto.v1 import telemetry_pb2 as pb

    from bmoe_collector.plans.check import Checked


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(
        no_args_is_help=True, help="Plans: what would run, what speaks against it, a file to begin with."
    )
    group.command("check")(check)
    group.command("init")(init)
    group.command("list")(list_shipped)
    app.add_typer(group, name="plan")


def check(
    file: Annotated[str, typer.Argument(help="A plan file, or the name of a shipped plan.")],
    device: Annotated[
        str | None, typer.Option(help="Check against this phone as well: engine, model, flags, gates.")
    ] = None,
    runs: Annotated[bool, typer.Option("--runs", help="List every run in its order, not only the cells.")] = False,
    json: JsonOption = False,
    db: DbOption = None,
) -> None:
    """Show the cells of a plan, what each will run and how long it takes; exit 1 when it is refused."""
    from bmoe_collector.plans.check import check as judge
    from bmoe_collector.plans.document import read_plan
    from bmoe_collector.plans.expand import expand

    document = read_plan(file)
    plan = expand(document)
    phone = None
    if device is not None:
        from bmoe_collector.plans.phones import status_of

        phone = status_of(device, db)
    found = judge(document, plan, phone, _earlier(plan, db))
    if json:
        emit(_as_json(plan, found))
    else:
        _show(plan, found, runs)
    if found.errors:
        raise typer.Exit(EXIT_NO)


def init(
    file: Annotated[Path, typer.Argument(help="The file to write.")] = Path("plan.toml"),
    like: Annotated[str | None, typer.Option(metavar="NAME", help="Begin with a shipped plan instead.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
    json: JsonOption = False,
    db: DbOption = None,  # noqa: ARG001 - every command takes it
) -> None:
    """Write a commented plan to begin with."""
    from importlib import resources

    from bmoe_collector.plans.document import shipped, shipped_text

    if like is not None and like not in shipped():
        raise UserError(f"no shipped plan is called {like}: there are {', '.join(shipped())}")
    text = shipped_text(like) if like else (resources.files("bmoe_collector.plans") / "start.toml").read_text("utf-8")
    flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if force else os.O_EXCL)
    try:
        handle = os.open(file, flags, 0o666)
    except FileExistsError:
        what = "is a folder; name a file in it" if file.is_dir() else "is there already; --force writes over it"
        raise UserError(f"{file} {what}") from None
    with open(handle, "w", encoding="utf-8") as out:
        out.write(text)
    if json:
        emit({"file": str(file)})
    else:
        say(f"wrote {file}; next: bmoe plan check {file}")


def list_shipped(json: JsonOption = False, db: DbOption = None) -> None:  # noqa: ARG001 - every command takes it
    """List the plans that come with this program."""
    from bmoe_collector.plans.document import shipped, shipped_text

    rows = [{"name": name, "about": shipped_text(name).splitlines()[0].lstrip("# ")} for name in shipped()]
    if json:
        emit(rows)
        return
    for row in rows:
        print(f"{row['name']:<16} {row['about']}")


def _earlier(plan: pb.Plan, db: str | None) -> dict[str, dict[str, float]]:
    """What earlier runs of the plan's models took; nothing when there is no database yet."""
    from sqlalchemy import select

    from bmoe_collector.common import database_url
    from bmoe_collector.store.schema import RUN_FACTS, RUNS

    url = database_url(db)
    if url.startswith("sqlite:///") and not Path(url.removeprefix("sqlite:///")).exists():
        return {}
    found: dict[str, dict[str, float]] = {}
    with closing(open_db(db)) as store, store.read() as connection:
        for model in {cell.model for cell in plan.cells if cell.model}:
            row = connection.execute(
                select(RUN_FACTS.c.tok_s, RUN_FACTS.c.load_s, RUN_FACTS.c.prefill_s)
                .join(RUNS, RUNS.c.run_no == RUN_FACTS.c.run_no)
                .where(RUNS.c.model_name == model, RUNS.c.outcome == "ok", RUN_FACTS.c.tok_s > 0)
                .order_by(RUNS.c.started_wall_ns.desc())
                .limit(1)
            ).first()
            if row is not None:
                found[model] = {
                    name: value for name, value in zip(("tok_s", "load_s", "prefill_s"), row, strict=True) if value
                }
    return found


def _as_json(plan: pb.Plan, found: Checked) -> dict[str, Any]:
    return {
        "name": plan.name,
        "accepted": not found.errors,
        "errors": list(found.errors),
        "warnings": list(found.warnings),
        "estimate_s": found.estimate_s,
        "estimate_from": found.estimate_from,
        **found.facts,
        "order_of_runs": [
            {"index": cell.index, "cell": cell.name, "repeat": cell.repeat, "block": cell.block} for cell in plan.cells
        ],
        "cells_expanded": [
            {
                "cell": cell.name,
                "model": cell.model,
                "engine": cell.engine,
                "flags": list(cell.flags),
                "n_predict": cell.n_predict,
                "turns": len(cell.turns),
                "artifacts": list(cell.artifacts),
                "labels": dict(cell.labels),
                "prompt_bytes": len(cell.prompt),
                "gates": [f"{gate.gate} {gate.comparison} {gate.bound:g}" for gate in cell.gates],
                "watchdog": {field.name: value for field, value in cell.watchdog.ListFields()},
                "preheat_s": cell.preheat_s,
                "retries": cell.retries,
                "unmeasured": cell.unmeasured,
            }
            for cell in _kinds(plan)
        ],
    }


def _kinds(plan: pb.Plan) -> list[pb.Cell]:
    """Every distinct cell once, in the order in which they run first."""
    found: dict[str, pb.Cell] = {}
    for cell in plan.cells:
        found.setdefault(cell.name, cell)
    return list(found.values())


def _lasts(seconds: float) -> str:
    """An estimate has no more digits than it deserves."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _conditions(plan: pb.Plan) -> list[str]:
    """What is asked before, during and after cells, a line each; cells of which the same is asked share it."""
    kinds = _kinds(plan)
    alike: dict[str, list[str]] = {}
    for cell in kinds:
        gates = [
            f"{gate.gate} {gate.comparison} {gate.bound:g}{f' for {gate.settle_s} s' if gate.settle_s else ''}, "
            f"{gate.timeout_s} s at most, else {gate.policy}"
            for gate in cell.gates
        ]
        bounds = [f"{field.name} {value:g}" for field, value in cell.watchdog.ListFields()]
        after = [f"pre-heat {cell.preheat_s:g} s"] * (cell.preheat_s > 0)
        lines = [f"gates: {'; '.join(gates) or 'none'}", f"watchdog: {', '.join(bounds) or 'as usual'}"]
        lines += [*after, f"retries: {cell.retries}"]
        alike.setdefault("\n".join(lines), []).append(cell.name)
    said = []
    for lines_text, names in alike.items():
        few = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        whose = "every cell" if len(names) == len(kinds) else few
        said += [f"{whose}: {line}" for line in lines_text.splitlines()]
    limits = [
        f"min_free_mib {value / 1048576:g}" if field.name == "min_free_bytes" else f"{field.name} {value:g}"
        for field, value in plan.limits.ListFields()
    ]
    return [*said, f"the plan: limits: {', '.join(limits) or 'none'}"]


def _show(plan: pb.Plan, found: Checked, runs: bool) -> None:
    from rich.table import Table
    from rich.text import Text

    from bmoe_collector.show.console import console as made
    from bmoe_collector.show.safe import escape

    console = made()
    counts = f"{counted(len(_kinds(plan)), 'cell')}, {counted(len(plan.cells), 'run')}"
    console.print(Text(f"{escape(plan.name)}: {counts}, {plan.order}", style="bold"))
    table = Table("cell", "what runs", show_edge=False)
    for cell in _kinds(plan):
        what = f"{len(cell.turns)} turns" if cell.turns else f"-p ({len(cell.prompt)} bytes) -n {cell.n_predict}"
        table.add_row(
            Text(escape(cell.name)), Text(escape(f"{cell.model or 'no model'} {what} {' '.join(cell.flags)}"))
        )
    console.print(table)
    for line in _conditions(plan):
        console.print(Text(escape(line)))
    if runs:
        for cell in plan.cells:
            console.print(
                Text(f"{cell.index + 1:>5}  block {cell.block:<4} repeat {cell.repeat:<4} {escape(cell.name)}")
            )
    if found.estimate_s is None:
        console.print(Text(f"time: not known, {found.estimate_from}"))
    else:
        console.print(
            Text(f"time: about {_lasts(found.estimate_s)} without waiting at gates, from {found.estimate_from}")
        )
    for warning in found.warnings:
        console.print(Text(f"note: {escape(warning)}", style="yellow"))
    for error in found.errors:
        console.print(Text(f"refused: {escape(error)}", style="red"))
