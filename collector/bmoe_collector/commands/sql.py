"""`bmoe sql QUERY`: one read-only SELECT over documented views; `--views` lists them.

In: SQL text, or `-` for stdin. Out: a table, one JSON array, or CSV.
"""

from __future__ import annotations

from contextlib import closing
from typing import Annotated, Any

import typer

from bmoe_collector.common import DbOption, JsonOption, UserError, emit, open_db, say


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("sql", help="Read-only SQL over documented views.")(sql)


def sql(
    query: Annotated[str | None, typer.Argument(metavar="QUERY", help="One SELECT; - reads it from stdin.")] = None,
    views: Annotated[
        bool, typer.Option("--views", help="List the views and their columns; with a view's name as QUERY, its own.")
    ] = False,
    limit: Annotated[int, typer.Option(help="At most so many rows; 0: all.")] = 0,
    csv: Annotated[bool, typer.Option("--csv", help="CSV, safe to open in a spreadsheet.")] = False,
    json: JsonOption = False,
    db: DbOption = None,
) -> None:
    """Read-only SQL over documented views."""
    if json and csv:
        raise UserError("choose one of --json and --csv")
    if limit < 0:
        raise UserError("--limit counts rows: 0 (all) or more")
    if views:
        _views(query, json=json, csv=csv)
        return
    if query is None:
        raise UserError(
            "say what to ask: bmoe sql 'SELECT model_name, avg(tok_s) FROM v_runs GROUP BY 1'; --views lists"
        )
    if query == "-":
        import sys

        query = sys.stdin.read()
    from bmoe_collector.query.sql import run_sql

    with closing(open_db(db, reads=True)) as store:
        result = run_sql(store, query, limit)
    _print(result.columns, result.rows, json=json, csv=csv)
    if result.more:
        say(f"the first {limit}; --limit 0 shows all")


def _print(columns: tuple[str, ...], rows: list[tuple[Any, ...]], *, json: bool, csv: bool) -> None:
    from bmoe_collector.query import tables

    if json:
        emit([dict(zip(columns, row, strict=True)) for row in rows])
    elif csv:
        print(tables.to_csv(columns, rows), end="")
    else:
        tables.print_table(columns, rows, wide=("meaning", "text", "evidence"))


def _views(name: str | None, *, json: bool, csv: bool) -> None:
    from bmoe_collector.store.views import views

    known = views()
    if name is not None and name not in known:
        raise UserError(f"no view is called {name}: they are {', '.join(known)}")
    chosen = [known[name]] if name else list(known.values())
    if json:
        emit(
            [
                {
                    "view": view.name,
                    "meaning": view.doc,
                    "columns": [
                        {"name": column.name, "type": column.kind, "unit": column.unit, "meaning": column.doc}
                        for column in view.columns
                    ],
                }
                for view in chosen
            ]
        )
        return
    rows = [
        (view.name, column.name, column.kind, column.unit, column.doc) for view in chosen for column in view.columns
    ]
    if not csv:
        for view in chosen:
            print(f"{view.name}  {view.doc}")
        print()
    _print(("view", "column", "type", "unit", "meaning"), rows, json=False, csv=csv)
