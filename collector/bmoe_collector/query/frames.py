"""Polars frames of what is stored: lists of runs, and the views of `store/views.py` for chosen runs.

In: a store, a `Selection` or runs' numbers, names of columns. Out: frames with fixed types: Int64, Float64, String, Boolean;
labels and verdicts of a list as JSON text and a list of strings. Unmeasured is null.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import polars as pl
from sqlalchemy import select

from bmoe_collector.common import UserError
from bmoe_collector.query.fields import fields, source
from bmoe_collector.query.runs import EVERYTHING, USUAL, Selection, chunks, conditions, driver_rows, list_runs
from bmoe_collector.store.engine import Store
from bmoe_collector.store.schema import RUNS
from bmoe_collector.store.standing_views import ensure_views
from bmoe_collector.store.views import View, views

POLARS: dict[str, Any] = {"int": pl.Int64, "float": pl.Float64, "str": pl.String, "bool": pl.Boolean}
_RUNS_A_QUERY = 64


def runs_frame(store: Store, selection: Selection = EVERYTHING, columns: Sequence[str] = USUAL) -> pl.DataFrame:
    """A list of runs; see query/runs.py. Raises UserError."""
    page = list_runs(store, selection, columns)
    schema: dict[str, Any] = {}
    for name in page.columns:
        if name == "verdicts":
            schema[name] = pl.List(pl.String)
        else:
            schema[name] = POLARS[fields()[name].kind] if name in fields() else pl.String
    at = page.columns.index("labels") if "labels" in page.columns else -1
    rows = page.rows
    if at >= 0:
        rows = [(*row[:at], labels_text(row[at]), *row[at + 1 :]) for row in rows]
    return pl.DataFrame(rows, schema=schema, orient="row")


def labels_text(labels: dict[str, str]) -> str:
    """Labels as JSON text, keys in order."""
    return json.dumps(labels, ensure_ascii=False, sort_keys=True)


def run_numbers(store: Store, selection: Selection) -> list[int]:
    """Numbers of a selection's runs, oldest first."""
    query = select(RUNS.c.run_no).select_from(source()).where(*conditions(selection))
    query = query.order_by(RUNS.c.started_wall_ns, RUNS.c.run_no)
    with store.read() as connection:
        return [int(number) for number in connection.execute(query).scalars()]


def view_schema(view: View, columns: Sequence[str] | None = None) -> dict[str, Any]:
    """Polars types of a view's columns, or of those chosen; raises UserError for one it has not."""
    kinds = {column.name: POLARS[column.kind] for column in view.columns}
    if columns is None:
        return kinds
    unknown = [name for name in columns if name not in kinds]
    if unknown:
        raise UserError(f"{view.name} has no column {', '.join(unknown)}; `bmoe sql --views {view.name}` lists them")
    return {name: kinds[name] for name in columns}


def view_frames(
    store: Store, name: str, numbers: Sequence[int], columns: Sequence[str] | None = None
) -> Iterator[pl.DataFrame]:
    """Rows of a view for runs, in pieces of some runs each, in the order of the runs and of their rows."""
    view = views()[name]
    schema = view_schema(view, columns)
    ensure_views(store)
    inner = {column.name for column in view.columns}
    keys = [key for key in ("turn", "at", "step", "boot_ns", "source", "part", "code", "key", "name") if key in inner]
    if name == "v_tokens":
        keys = ["turn", "step", "source"]
    chosen = ", ".join(f'"{column}"' for column in schema)
    ordered = ", ".join(["run_no", *(f'"{key}"' for key in keys)])
    query = f'SELECT {chosen} FROM "{name}" WHERE run_no IN ({{}}) ORDER BY {ordered}'  # noqa: S608
    found = False
    for some in chunks(list(numbers), _RUNS_A_QUERY):
        with store.read() as connection:
            rows = driver_rows(connection, query, some)
        if rows:
            found = True
            yield typed(rows, schema)
    if not found:
        yield pl.DataFrame(schema=schema)


def typed(rows: Sequence[Sequence[Any]], schema: dict[str, Any]) -> pl.DataFrame:
    """Rows under a schema; a 0 or 1 where a boolean is wanted becomes one."""
    loose = {name: pl.Int64 if kind == pl.Boolean else kind for name, kind in schema.items()}
    frame = pl.DataFrame(rows, schema=loose, orient="row")
    return frame.with_columns(pl.col(name).cast(pl.Boolean) for name, kind in schema.items() if kind == pl.Boolean)


def view_frame(store: Store, name: str, numbers: Sequence[int], columns: Sequence[str] | None = None) -> pl.DataFrame:
    """As `view_frames`, in one frame."""
    return pl.concat(list(view_frames(store, name, numbers, columns)), rechunk=False)


__all__ = ["POLARS", "labels_text", "run_numbers", "runs_frame", "typed", "view_frame", "view_frames", "view_schema"]
