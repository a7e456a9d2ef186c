"""`bmoe export`: runs, tokens, samples and traces to a file; the store as a Parquet dataset; a community row.

    bmoe export runs|tokens|samples|turns|residency|verdicts|labels [RUN…] [filters] --to FILE.{csv,json,jsonl,parquet}
    bmoe export trace route|compute|io RUN --to FILE
    bmoe export --dataset URL [--traces]
    bmoe export --community RUN [RUN]

In: runs by id or by the filters of `bmoe runs`. Out: a file, whole or not at all; for --community a Markdown table on stdout.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bmoe_collector.commands.runs import (
    CellOption,
    DeviceOption,
    EngineOption,
    LabelOption,
    ModelOption,
    OutcomeOption,
    PlanOption,
    SinceOption,
    UntilOption,
    VerdictOption,
    WhereOption,
    WithoutOption,
)
from bmoe_collector.common import DbOption, JsonOption, UserError, emit, open_db, say

if TYPE_CHECKING:
    from bmoe_collector.query.runs import Selection
    from bmoe_collector.store.engine import Store

TABLES = ("runs", "tokens", "samples", "turns", "residency", "verdicts", "labels")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("export", help="Runs, tokens, samples and traces to files or a Parquet dataset.")(export)


def export(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="WHAT [RUN]...",
            help="runs, tokens, samples, turns, residency, verdicts or labels, of these runs or of the filters;"
            " `trace route|compute|io RUN`; run ids with --community.",
        ),
    ] = None,
    to: Annotated[
        Path | None, typer.Option("--to", metavar="FILE", help="The file: .csv, .json, .jsonl or .parquet.")
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(metavar="NAME,NAME…", help="These columns alone; names: COLUMNS.md, `bmoe sql --views`."),
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Bring a partitioned Parquet dataset up to date: a folder or any fsspec URL."),
    ] = None,
    traces: Annotated[bool, typer.Option("--traces", help="With --dataset: the runs' traces too.")] = False,
    community: Annotated[
        bool,
        typer.Option("--community", help="The community benchmark's Markdown row of two runs, the second reported."),
    ] = False,
    hardware: Annotated[
        str, typer.Option(help="With --community: the class of hardware, never the phone's model.")
    ] = "",
    storage: Annotated[
        str, typer.Option(help="With --community: storage and its raw rate at 512 KiB direct reads.")
    ] = "",
    reference_phone: Annotated[
        bool, typer.Option("--reference-phone", help="With --community: this is the reference phone, with 4 threads.")
    ] = False,
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
    json: JsonOption = False,
    db: DbOption = None,
) -> None:
    """Runs, tokens, samples and traces to files or a Parquet dataset."""
    from bmoe_collector.query.runs import Selection

    named = list(words or ())
    if community + (dataset is not None) + (to is not None) != 1:
        raise UserError("say where to: --to FILE, --dataset URL, or --community")
    filters = Selection(
        model, device, engine, plan, cell, outcome or (), since, until, where, label or (), verdict or (), without or ()
    )
    filtered = filters != Selection()
    if (traces and dataset is None) or ((hardware or storage or reference_phone) and not community):
        raise UserError("--traces goes with --dataset; --hardware, --storage and --reference-phone with --community")
    if to is None and (filtered or columns):
        raise UserError("filters and --columns go with --to: a dataset holds every run, a community row two")
    with closing(open_db(db, reads=True)) as store:
        if dataset is not None:
            if named:
                raise UserError("--dataset exports every run: name none")
            _dataset(store, dataset, traces=traces, json=json)
        elif community:
            _community(store, named, hardware, storage, reference_phone=reference_phone, json=json)
        else:
            assert to is not None
            _file(store, named, to, _words(columns), filters, filtered=filtered, json=json)


def _words(text: str | None) -> list[str] | None:
    found = [word.strip() for word in (text or "").split(",") if word.strip()]
    return found or None


def _file(
    store: Store,
    named: list[str],
    to: Path,
    columns: list[str] | None,
    filters: Selection,
    *,
    filtered: bool,
    json: bool,
) -> None:
    from bmoe_collector.export.files import check_suffix, write_frames

    check_suffix(to)
    what = named[0] if named else ""
    if what == "trace":
        rows = _trace(store, named[1:], to, columns)
    elif what not in TABLES:
        raise UserError(f"what to export: {', '.join(TABLES)}, or trace; not {what or 'nothing'!r}")
    else:
        chosen = _selection(store, named[1:], filters)
        if what == "runs":
            from bmoe_collector.query.fields import fields
            from bmoe_collector.query.frames import runs_frame

            rows = write_frames([runs_frame(store, chosen, columns or list(fields()))], to)
        else:
            from bmoe_collector.query.frames import run_numbers, view_frames

            if len(named) == 1 and not filtered and what in {"tokens", "samples"}:
                say(f"{what} of every run: name runs or filter for fewer")
            rows = write_frames(view_frames(store, f"v_{what}", run_numbers(store, chosen), columns), to)
    if json:
        emit({"file": str(to), "rows": rows})
    else:
        say(f"{to}: {rows} rows")


def _selection(store: Store, words: list[str], filters: Selection) -> Selection:
    from dataclasses import replace

    if not words:
        return filters
    return replace(filters, run_ids=_ids(store, words))


def _ids(store: Store, words: list[str]) -> list[str]:
    from bmoe_collector.commands.show import with_nearest
    from bmoe_collector.store.find import RunNotFoundError, find_runs

    try:
        return find_runs(store, [part for word in words for part in word.split(",") if part])
    except RunNotFoundError as error:
        raise UserError(with_nearest(error)) from error


def _trace(store: Store, words: list[str], to: Path, columns: list[str] | None) -> int:
    from bmoe_collector.export.files import write_lazy
    from bmoe_collector.traces.of_run import KINDS, run_trace

    if len(words) != 2 or words[0] not in KINDS:
        raise UserError(f"say: bmoe export trace {'|'.join(KINDS)} RUN --to FILE")
    trace = run_trace(store, words[1], words[0])
    frame = trace.frame
    if columns:
        unknown = [name for name in columns if name not in frame.collect_schema()]
        if unknown:
            raise UserError(f"a {words[0]} trace has no column {', '.join(unknown)}")
        frame = frame.select(columns)
    for note in trace.notes():
        say(note)
    return write_lazy(frame, to)


def _dataset(store: Store, url: str, *, traces: bool, json: bool) -> None:
    from bmoe_collector.export.dataset import export_dataset

    done = export_dataset(store, url, traces=traces)
    for problem in done.problems:
        say(problem)
    if json:
        emit(
            {
                "dataset": url,
                "runs": done.runs,
                "written": done.written,
                "unchanged": done.unchanged,
                "removed": done.removed,
                "problems": done.problems,
            }
        )
    else:
        say(
            f"{url}: {done.runs} runs, {done.unchanged} unchanged; {done.written} files written, {done.removed} removed"
        )


def _community(
    store: Store, words: list[str], hardware: str, storage: str, *, reference_phone: bool, json: bool
) -> None:
    from bmoe_collector.export.community import Pass, markdown, row, why_not, why_not_together
    from bmoe_collector.store.load import load_run

    ids = _ids(store, words)
    if len(ids) == 1:
        ids = [*_before(store, ids[0]), *ids]
    if len(ids) != 2:
        raise UserError(
            "--community: the protocol is run twice and reports the second: name both runs, the reported one last"
        )
    first, second = (Pass.of(load_run(store, run_id)) for run_id in ids)
    wrong = [
        f"{one.name}: {reason}" for one in (first, second) for reason in why_not(one, reference_phone=reference_phone)
    ]
    wrong += why_not_together(first, second)
    if wrong:
        raise UserError("--community: not by the protocol:\n  " + "\n  ".join(wrong))
    values: dict[str, Any] = row(first, second, hardware=hardware, storage=storage)
    if json:
        emit({"row": values, "runs": ids, "markdown": markdown(values)})
    else:
        print(markdown(values), end="")


def _before(store: Store, run_id: str) -> list[str]:
    """The run of the same plan, phone and model just before a run, as the community plan has it."""
    from sqlalchemy import select

    from bmoe_collector.store.schema import RUNS

    with store.read() as connection:
        mine = connection.execute(select(RUNS).where(RUNS.c.run_id == run_id)).mappings().one()
        if mine["plan_id"] is None or mine["started_wall_ns"] is None:
            return []
        found = connection.execute(
            select(RUNS.c.run_id)
            .where(
                RUNS.c.plan_id == mine["plan_id"],
                RUNS.c.agent_uuid == mine["agent_uuid"],
                RUNS.c.model_name == mine["model_name"],
                RUNS.c.started_wall_ns < mine["started_wall_ns"],
                RUNS.c.outcome == "ok",
            )
            .order_by(RUNS.c.started_wall_ns.desc())
            .limit(1)
        ).scalar()
    return [str(found)] if found else []
