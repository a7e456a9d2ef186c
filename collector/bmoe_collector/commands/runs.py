"""`bmoe runs [filters]`: stored runs as a table, JSON, CSV or Markdown.

In: filters (query/runs.py) and names of columns (query/fields.py). Out: one row a run, newest first, at most --limit.
"""

from __future__ import annotations

from contextlib import closing
from typing import Annotated, Any

import typer

from bmoe_collector.common import DbOption, JsonOption, UserError, emit, open_db, say

ModelOption = Annotated[str | None, typer.Option("--model", help="A part of the model's name.")]
DeviceOption = Annotated[
    str | None, typer.Option("--device", help="A part of the phone's name or model, a tag, or the start of its uuid.")
]
EngineOption = Annotated[
    str | None, typer.Option("--engine", help="A part of the engine's version or name, or the start of its sha256.")
]
PlanOption = Annotated[str | None, typer.Option("--plan", help="A part of the plan's name, or the start of its id.")]
CellOption = Annotated[str | None, typer.Option("--cell", help="The plan's cell, its whole name.")]
OutcomeOption = Annotated[
    list[str] | None,
    typer.Option(
        "--outcome",
        help="ok, partial, failed, killed, aborted, skipped, lost or started; again for another one.",
    ),
]
SinceOption = Annotated[
    str | None, typer.Option("--since", metavar="WHEN", help="Started since: 45m, 3h, 2d, 2w ago, or a date.")
]
UntilOption = Annotated[
    str | None, typer.Option("--until", metavar="WHEN", help="Started before: 45m, 3h, 2d, 2w ago, or a date.")
]
WhereOption = Annotated[
    str | None,
    typer.Option("--where", metavar="EXPR", help="An expression: 'cache_mb>=2000 and overlap=1'; names: --fields."),
]
LabelOption = Annotated[
    list[str] | None,
    typer.Option("--label", metavar="KEY=VALUE", help="Has this label; KEY alone: has that key. May be repeated."),
]
VerdictOption = Annotated[
    list[str] | None, typer.Option("--verdict", metavar="CODE", help="Has this verdict. May be repeated.")
]
WithoutOption = Annotated[
    list[str] | None, typer.Option("--without", metavar="CODE", help="Has not this verdict. May be repeated.")
]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("runs", help="Stored runs, filtered.")(runs)


def runs(
    model: ModelOption = None,
    device: DeviceOption = None,
    engine: EngineOption = None,
    plan: PlanOption = None,
    cell: CellOption = None,
    outcome: OutcomeOption = None,
    since: SinceOption = None,
    until: UntilOption = None,
    where: WhereOption = None,
    label: LabelOption = None,
    verdict: VerdictOption = None,
    without: WithoutOption = None,
    columns: Annotated[
        str | None,
        typer.Option(metavar="NAME,NAME…", help="Columns to show; +NAME adds to the usual ones. Names: --fields."),
    ] = None,
    sort: Annotated[
        str | None, typer.Option(metavar="NAME,NAME…", help="Sort by these; -NAME largest first. Else newest first.")
    ] = None,
    limit: Annotated[int, typer.Option(help="At most so many runs; 0: all.")] = 50,
    fields: Annotated[bool, typer.Option("--fields", help="List the names with their units and meaning.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="CSV, safe to open in a spreadsheet.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="A Markdown table.")] = False,
    json: JsonOption = False,
    db: DbOption = None,
) -> None:
    """Stored runs, filtered."""
    from bmoe_collector.query.runs import Selection, list_runs

    if json + csv + markdown > 1:
        raise UserError("choose one of --json, --csv and --markdown")
    if limit < 0:
        raise UserError("--limit counts runs: 0 (all) or more")
    if fields:
        _fields(json=json, csv=csv, markdown=markdown)
        return
    selection = Selection(
        model, device, engine, plan, cell, outcome or (), since, until, where, label or (), verdict or (), without or (),
        sort=_words(sort), limit=limit,
    )  # fmt: skip
    with closing(open_db(db, reads=True)) as store:
        page = list_runs(store, selection, _columns(columns))
    _print(page.columns, page.rows, json=json, csv=csv, markdown=markdown, chosen=columns is not None)
    if page.more:
        say(f"the first {limit}; --limit 0 shows all")
    elif not page.rows and not (json or csv or markdown):
        say("no stored run matches")


def _columns(text: str | None) -> list[str]:
    from bmoe_collector.query.runs import USUAL

    words = _words(text)
    if not words:
        return list(USUAL)
    added = [word.startswith("+") for word in words]
    if all(added):
        return [*USUAL, *(word[1:] for word in words)]
    if any(added):
        raise UserError("--columns: either names, or names that are all added to the usual ones with +")
    return words


def _words(text: str | None) -> list[str]:
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def _print(
    columns: tuple[str, ...],
    rows: list[tuple[Any, ...]],
    *,
    json: bool,
    csv: bool,
    markdown: bool,
    chosen: bool = True,
) -> None:
    """Print the rows; columns that were not `chosen` by name give way where a terminal has no room for them."""
    from bmoe_collector.query import tables

    if json:
        emit([dict(zip(columns, row, strict=True)) for row in rows])
    elif csv:
        print(tables.to_csv(columns, rows), end="")
    elif markdown:
        print(tables.to_markdown(columns, rows), end="")
    elif rows:
        shown = [tuple(_for_eyes(name, value) for name, value in zip(columns, row, strict=True)) for row in rows]
        heads = tuple(_HEADS.get(name, name) for name in columns)
        left_out = tables.print_table(
            heads,
            shown,
            wide=("model", "device", "cell", "labels", "verdicts", "meaning"),
            gives_way=() if chosen else ("labels", "ttft s", "device", "hit %", "cell"),
        )
        if left_out:
            say(f"no room for {', '.join(left_out)}: a wider terminal, --columns or a pipe shows them")


_HEADS = {
    "run_id": "run",
    "started": "when",
    "model_name": "model",
    "cache_hit_pct": "hit %",
    "ttft_s": "ttft s",
    "tok_s": "tok/s",
}


def _for_eyes(name: str, value: Any) -> Any:
    """Ids short, times local, as a terminal has room for."""
    if value is None:
        return "–" if name not in {"cell", "labels", "verdicts"} else ""
    if name == "run_id":
        return str(value)[:12]
    if name == "started":
        from datetime import datetime

        return datetime.fromisoformat(str(value)).astimezone().strftime("%Y-%m-%d %H:%M")
    return value


def _fields(*, json: bool, csv: bool, markdown: bool) -> None:
    from bmoe_collector.query.fields import aliases, fields

    short: dict[str, list[str]] = {}
    for alias, name in aliases().items():
        short.setdefault(name, []).append(alias)
    rows: list[tuple[Any, ...]] = [
        (field.name, " ".join(short.get(field.name, [])), field.kind, field.unit, field.source, field.doc)
        for field in fields().values()
    ]
    rows.append(("label.KEY", "", "str", "", "made", "the value of a label"))
    rows.append(("verdict", "", "str", "", "made", "filters alone: verdict = CODE, verdict != CODE"))
    _print(("name", "also", "type", "unit", "from", "meaning"), rows, json=json, csv=csv, markdown=markdown)
