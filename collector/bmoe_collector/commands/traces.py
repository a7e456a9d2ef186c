"""`bmoe trace route|compute|io FILE|RUN --view …`: what the engine's decode traces say.

In: a trace file, or a run whose trace is in the artifact store. Out: a table, or the view as one JSON object.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from bmoe_collector.common import DbOption, JsonOption, UserError, counted, emit, open_db, say

if TYPE_CHECKING:
    from bmoe_collector.traces.read import Selection, Trace, View

_Subject = Annotated[
    str, typer.Argument(metavar="FILE|RUN", help="A trace file, or a run id (a unique prefix will do).")
]
_Phase = Annotated[str, typer.Option(help="prefill, decode or all.")]
_Turn = Annotated[int | None, typer.Option(help="Only this turn of a session.")]
_Steps = Annotated[
    str | None, typer.Option(metavar="A-B", help="Only these steps, positions in the context, both included.")
]
_Layers = Annotated[str | None, typer.Option(metavar="A-B", help="Only these layers, both included.")]
_With = Annotated[
    bool, typer.Option("--with-metrics", help="Show the time of each token beside what was traced of it.")
]
_Metrics = Annotated[
    Path | None, typer.Option(metavar="FILE", help="The metrics CSV to join; else the run's own rows.")
]
_Budgets = Annotated[
    str | None,
    typer.Option(
        metavar="MIB,MIB…",
        help="Cache budgets for the curve; else five shares of the working set. A run's own is added.",
    ),
]
_Rows = Annotated[int, typer.Option(help="Rows to print in the terminal; 0 prints all.")]

ROUTE_VIEWS = "sanity, matrix, hot, reuse, overlap, workset, cache, entropy, bytes or curve."


def register(app: typer.Typer) -> None:
    """Add the command."""
    group = typer.Typer(no_args_is_help=True, help="Route, compute and I/O traces from a file or a run.")
    group.command("route", help="What the router asked for, and what was resident.")(route)
    group.command("compute", help="Where the graph's time and major faults went.")(compute)
    group.command("io", help="How flash was read.")(io)
    app.add_typer(group, name="trace")


def route(
    subject: _Subject,
    view: Annotated[str, typer.Option(help=ROUTE_VIEWS)] = "sanity",
    phase: _Phase = "",
    turn: _Turn = None,
    steps: _Steps = None,
    layers: _Layers = None,
    budgets: _Budgets = None,
    with_metrics: _With = False,
    metrics: _Metrics = None,
    rows: _Rows = 40,
    json: JsonOption = False,
    db: DbOption = None,
) -> None:
    """Answer from a route trace."""
    phase = phase or ("all" if view in {"sanity", "cache", "bytes", "curve"} else "decode")
    chosen = _selection(phase, turn, steps, layers)
    _answer("route", subject, view, chosen, with_metrics, metrics, rows, json, db, _budgets(budgets))


def compute(
    subject: _Subject,
    view: Annotated[str, typer.Option(help="ops, layers or faults.")] = "ops",
    phase: _Phase = "all",
    turn: _Turn = None,
    steps: _Steps = None,
    layers: _Layers = None,
    with_metrics: _With = False,
    metrics: _Metrics = None,
    rows: _Rows = 40,
    json: JsonOption = False,
    db: DbOption = None,
) -> None:
    """Answer from a compute trace of either granularity."""
    _answer("compute", subject, view, _selection(phase, turn, steps, layers), with_metrics, metrics, rows, json, db)


def io(
    subject: _Subject,
    view: Annotated[str, typer.Option(help="latency, size, lanes or adjacency.")] = "latency",
    phase: _Phase = "all",
    turn: _Turn = None,
    steps: _Steps = None,
    layers: _Layers = None,
    with_metrics: _With = False,
    metrics: _Metrics = None,
    rows: _Rows = 40,
    json: JsonOption = False,
    db: DbOption = None,
) -> None:
    """Answer from an I/O trace."""
    _answer("io", subject, view, _selection(phase, turn, steps, layers), with_metrics, metrics, rows, json, db)


def _answer(
    kind: str,
    subject: str,
    view: str,
    chosen: Selection,
    with_metrics: bool,
    metrics: Path | None,
    rows: int,
    json: bool,
    db: str | None,
    budgets: tuple[float, ...] = (),
) -> None:
    from bmoe_collector.traces.views import ABOUT, VIEWS

    if view not in VIEWS[kind]:
        raise UserError(f"no view `{view}` of a {kind} trace: choose one of {', '.join(VIEWS[kind])}")
    if budgets and view != "curve":
        raise UserError("--budgets is for --view curve")
    trace, columns, own_mib, notes = _open(
        kind, subject, with_metrics or metrics is not None, metrics, db, view == "curve"
    )
    if columns is not None:
        from bmoe_collector.traces.join import with_metrics as joined

        found = joined(trace, chosen, columns)
    elif view == "curve":
        from bmoe_collector.traces.curve import curve

        found = curve(trace, chosen, budgets, own_mib=own_mib)
    else:
        found = VIEWS[kind][view](trace, chosen)
    if not len(found.rows) and (outside := _nothing_chosen(trace, chosen)):
        notes = (*notes, outside)
    found = replace(found, notes=(*found.notes, *notes))
    if json:
        emit(found.to_json())
    else:
        _show(found, rows, ABOUT[kind][view] if columns is None else "")


def _nothing_chosen(trace: Trace, chosen: Selection) -> str:
    """What there is, where the selection holds nothing of it; else nothing."""
    import polars as pl

    if trace.rows(chosen, "step").head(1).collect().height:
        return ""
    ends = [
        end for name in ("turn", "layer", "step") for end in (pl.col(name).min(), pl.col(name).max().alias(f"{name}_"))
    ]
    row = trace.frame.select(ends).collect().row(0)
    if row[0] is None:
        return "the trace has no rows"
    told = ", ".join(
        f"{name} {low} to {high}"
        for name, low, high in zip(("turn", "layer", "step"), row[::2], row[1::2], strict=True)
    )
    return f"nothing of the trace is in this selection; it has {told}"


def _open(
    kind: str, subject: str, joins: bool, metrics: Path | None, db: str | None, budget: bool
) -> tuple[Trace, dict[str, list[Any]] | None, float | None, tuple[str, ...]]:
    """The trace, the metrics rows to join, the budget of the run's cache (None where not asked for or not known), notes."""
    from bmoe_collector.traces.read import open_trace

    path = Path(subject)
    if path.is_dir():
        inside = sorted(each.name for each in path.iterdir() if each.suffix in {".csv", ".parquet"})
        raise UserError(f"{path}: is a folder; name the trace in it: {', '.join(inside[:8]) or 'there is none'}")
    columns: dict[str, list[Any]] | None = _file_columns(metrics) if metrics is not None else None
    if path.exists() and path.is_file():
        if joins and columns is None:
            raise UserError(f"{path}: --with-metrics needs --metrics FILE when the trace is a file")
        return open_trace(path, kind), columns, None, ()
    from bmoe_collector.traces.of_run import budget_of, metrics_of, notes_of, run_named, trace_of

    with closing(open_db(db, reads=True)) as store:
        run = run_named(store, subject)
        trace = trace_of(store, run, kind)
        if joins and columns is None:
            columns = metrics_of(run)
        return trace, columns, budget_of(run) if budget else None, notes_of(run)


def _file_columns(path: Path) -> dict[str, list[Any]]:
    from bmoe_collector.metrics_frame import read_metrics
    from bmoe_collector.traces.join import METRICS

    frame = read_metrics(path)
    if "step" not in frame.columns:
        raise UserError(f"{path}: is no metrics CSV: it has no `step` column")
    return {name: frame[name].to_list() for name in ("turn", "step", *METRICS) if name in frame.columns}


def _selection(phase: str, turn: int | None, steps: str | None, layers: str | None) -> Selection:
    from bmoe_collector.traces.read import Selection

    phases = {"all": None, "prefill": 0, "decode": 1}
    if phase not in phases:
        raise UserError(f"--phase {phase}: say prefill, decode or all")
    return Selection(phases[phase], turn, _range("--steps", steps), _range("--layers", layers))


def _range(option: str, text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    low, _, high = text.partition("-")
    if not low.isdigit() or (high and not high.isdigit()) or int(high or low) < int(low):
        raise UserError(f"{option} {text}: say A-B with whole numbers, the smaller first, or a single number")
    return int(low), int(high or low)


def _budgets(text: str | None) -> tuple[float, ...]:
    if text is None:
        return ()
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"--budgets {text}: say mebibytes, separated by commas: 500,1000,2000") from None
    if not all(0 < value < 1e9 for value in found):
        raise UserError(f"--budgets {text}: every budget must be above 0")
    return found


def _show(view: View, limit: int, about: str) -> None:
    from rich.table import Table
    from rich.text import Text

    from bmoe_collector.show.console import console as made

    console = made()
    if about:
        console.print(Text(about, style="dim"))
    for name, value in view.facts.items():
        console.print(Text(f"{name:<24} {_cell(value)}"))
    shown = view.rows if limit <= 0 else view.rows[:limit]
    if shown:
        # numbers are never cut: a heading breaks at its words, a cell keeps its width
        table = Table(box=None, header_style="bold", pad_edge=False)
        cells = [[_cell(value) for value in row.values()] for row in shown]
        needed = 0
        for at, (name, value) in enumerate(shown[0].items()):
            width = max(min(max(len(row[at]) for row in cells), 40), *(len(word) for word in name.split("_")))
            needed += width + 2
            side: Literal["left", "right"] = "left" if isinstance(value, str | list) else "right"
            table.add_column(Text(name.replace("_", " ")), justify=side, min_width=width)
        for row in cells:
            table.add_row(*map(Text, row))
        console.print(table, width=max(console.width, needed), crop=False)
    if len(view.rows) > len(shown):
        say(f"{counted(len(view.rows) - len(shown), 'more row')}: --rows 0 prints all, --json has them")
    for note in view.notes:
        say(f"note: {note}")


def _cell(value: Any) -> str:
    from bmoe_collector.show.safe import escape

    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 10000 else f"{value:,.0f}"
    if isinstance(value, dict):
        return " ".join(f"{name}={_cell(item)}" for name, item in value.items())
    if isinstance(value, list):
        return " ".join(_cell(item) for item in value)
    return escape(value)
