"""The store from Python: `runs()`, `tokens()`, `samples()`, `turns()`, `compare()`, `sql()` as Polars frames.

In: filters as `bmoe runs` has them, or run ids. Out: frames whose columns are documented in COLUMNS.md. API.md has
examples. `open(db)` gives a `Fleet` that keeps the database open; the functions of the module open it for one call. `db` is a
URL or a SQLite file, else BMOE_DB, else the user's own.

Raises `UserError` for what was asked wrongly and `OutsideError` for a database that cannot be used (`bmoe_collector.common`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypedDict, Unpack

import polars as pl

from bmoe_collector.common import UserError, open_db
from bmoe_collector.metrics_frame import read_metrics
from bmoe_collector.query.frames import run_numbers, runs_frame, view_frame
from bmoe_collector.query.runs import USUAL, Selection
from bmoe_collector.query.sql import run_sql
from bmoe_collector.store.engine import Store
from bmoe_collector.store.find import RunNotFoundError, find_runs

__all__ = ["Comparison", "Filters", "Fleet", "compare", "metrics", "open", "runs", "samples", "sql", "tokens", "turns"]


class Filters(TypedDict, total=False):
    """Which runs; every one that is given must hold. As the options of `bmoe runs`."""

    model: str
    device: str
    engine: str
    plan: str
    cell: str
    outcomes: Sequence[str]
    since: str
    until: str
    where: str
    labels: Sequence[str]
    verdicts: Sequence[str]
    without: Sequence[str]
    sort: Sequence[str]
    limit: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """What `bmoe compare` answers: a sentence, the metrics (ratio of B to A), the counters, why not, and what to know."""

    verdict: str
    comparable: bool
    reasons: tuple[str, ...]
    notes: tuple[str, ...]  # order, warnings, runs left out
    label: str  # "as asked" by a plan's question, or "exploration"
    design: str
    n: tuple[int, int]
    texts_equal: bool | None
    metrics: pl.DataFrame  # metric, ratio, low, high, p, resolved, smallest_resolvable, runs_needed
    counters: pl.DataFrame  # counter, a, b, equal


class Fleet:
    """An open database. Close it, or use it in a `with`."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the connections back."""
        self.store.close()

    def runs(self, columns: Sequence[str] = USUAL, **filters: Unpack[Filters]) -> pl.DataFrame:
        """One row a run, newest first unless `sort` says otherwise; any names of `bmoe runs --fields` as columns."""
        return runs_frame(self.store, Selection(**filters), columns)

    def tokens(
        self, run: str | Sequence[str] | None = None, columns: Sequence[str] | None = None, **filters: Unpack[Filters]
    ) -> pl.DataFrame:
        """One row a token of the named runs, or of those the filters choose: view `v_tokens`."""
        return self._view("v_tokens", run, columns, filters)

    def samples(
        self, run: str | Sequence[str] | None = None, columns: Sequence[str] | None = None, **filters: Unpack[Filters]
    ) -> pl.DataFrame:
        """One row a reading of the kernel, by agent or host: view `v_samples`."""
        return self._view("v_samples", run, columns, filters)

    def turns(
        self, run: str | Sequence[str] | None = None, columns: Sequence[str] | None = None, **filters: Unpack[Filters]
    ) -> pl.DataFrame:
        """One row a generation, decision or rejected request: view `v_turns`."""
        return self._view("v_turns", run, columns, filters)

    def _view(
        self, name: str, run: str | Sequence[str] | None, columns: Sequence[str] | None, filters: Filters
    ) -> pl.DataFrame:
        return view_frame(self.store, name, self._numbers(run, filters), columns)

    def _numbers(self, run: str | Sequence[str] | None, filters: Filters) -> list[int]:
        if run is None and not filters:
            raise UserError(
                "say which runs: ids, or filters; every token of every run may be too much (`limit`, `since`)"
            )
        if filters.get("limit") or filters.get("sort"):
            found = runs_frame(self.store, Selection(**filters), ["run_id"])["run_id"].to_list()
            return run_numbers(self.store, Selection(run_ids=found))
        if run is None:
            return run_numbers(self.store, Selection(**filters))
        try:
            ids = find_runs(self.store, [run] if isinstance(run, str) else list(run))
        except RunNotFoundError as error:
            raise UserError(str(error)) from error
        return run_numbers(self.store, Selection(**filters, run_ids=ids))

    def compare(
        self,
        a: str,
        b: str,
        *,
        metric: str | None = None,
        smallest_effect: float | None = None,
        force: bool = False,
    ) -> Comparison:
        """Compare side B with side A, the baseline; sides as `bmoe compare` takes them."""
        from bmoe_collector.commands.comparing import token_costs
        from bmoe_collector.compare.question import answer_sides

        answer = answer_sides(
            self.store, a, b, token_costs(self.store), force=force, metric=metric, wanted=smallest_effect
        )
        return Comparison(
            verdict=answer.verdict,
            comparable=answer.comparable,
            reasons=answer.reasons,
            notes=answer.notes,
            label=answer.label,
            design=answer.design,
            n=answer.n,
            texts_equal=answer.texts_equal,
            metrics=pl.DataFrame(
                [{name: getattr(metric, name) for name in _METRICS} for metric in answer.metrics], schema=_METRICS
            ),
            counters=pl.DataFrame(
                [{name: row[name] for name in _COUNTERS} for row in answer.counters], schema=_COUNTERS
            ),
        )

    def sql(self, query: str) -> pl.DataFrame:
        """One read-only SELECT over the views of `bmoe sql --views`."""
        result = run_sql(self.store, query)
        names = [name if result.columns.index(name) == at else f"{name}_{at}" for at, name in enumerate(result.columns)]
        return pl.DataFrame(result.rows, schema=names, orient="row", infer_schema_length=None)


_METRICS: dict[str, Any] = {
    "metric": pl.String, "ratio": pl.Float64, "low": pl.Float64, "high": pl.Float64, "p": pl.Float64,
    "resolved": pl.Boolean, "smallest_resolvable": pl.Float64, "runs_needed": pl.Int64,
}  # fmt: skip
_COUNTERS: dict[str, Any] = {"counter": pl.String, "a": pl.Float64, "b": pl.Float64, "equal": pl.Boolean}


def metrics(file: str | Path, columns: Sequence[str] | None = None) -> pl.DataFrame:
    """A metrics CSV as it is, of any generation, without a database: a row a token, columns as the file names them, and `turn`.

    `columns`: read no others (and `turn`); those the file does not have are null.
    """
    return read_metrics(file, columns)


def open(db: str | None = None) -> Fleet:  # noqa: A001 - fleet = api.open(...)
    """Open a database."""
    return Fleet(open_db(db))


def runs(columns: Sequence[str] = USUAL, *, db: str | None = None, **filters: Unpack[Filters]) -> pl.DataFrame:
    """As `Fleet.runs`."""
    with closing(open(db)) as fleet:
        return fleet.runs(columns, **filters)


def tokens(
    run: str | Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    *,
    db: str | None = None,
    **filters: Unpack[Filters],
) -> pl.DataFrame:
    """As `Fleet.tokens`."""
    with closing(open(db)) as fleet:
        return fleet.tokens(run, columns, **filters)


def samples(
    run: str | Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    *,
    db: str | None = None,
    **filters: Unpack[Filters],
) -> pl.DataFrame:
    """As `Fleet.samples`."""
    with closing(open(db)) as fleet:
        return fleet.samples(run, columns, **filters)


def turns(
    run: str | Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    *,
    db: str | None = None,
    **filters: Unpack[Filters],
) -> pl.DataFrame:
    """As `Fleet.turns`."""
    with closing(open(db)) as fleet:
        return fleet.turns(run, columns, **filters)


def compare(
    a: str,
    b: str,
    *,
    metric: str | None = None,
    smallest_effect: float | None = None,
    force: bool = False,
    db: str | None = None,
) -> Comparison:
    """As `Fleet.compare`."""
    with closing(open(db)) as fleet:
        return fleet.compare(a, b, metric=metric, smallest_effect=smallest_effect, force=force)


def sql(query: str, *, db: str | None = None) -> pl.DataFrame:
    """As `Fleet.sql`."""
    with closing(open(db)) as fleet:
        return fleet.sql(query)
