"""`bmoe db`: the database itself. `upgrade` brings it to this version, `check` looks for what is wrong, `vacuum` tidies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bmoe_collector.common import (
    DbOption,
    JsonOption,
    OutsideError,
    UserError,
    counted,
    database_url,
    emit,
    open_db,
    say,
)

ArtifactsOption = Annotated[
    str | None, typer.Option("--artifacts", metavar="URL", help="Where files are kept; else BMOE_ARTIFACTS.")
]


def register(app: typer.Typer) -> None:
    """Add the group."""
    group = typer.Typer(help="The database itself.", no_args_is_help=True)
    group.command("upgrade")(upgrade)
    group.command("check")(check)
    group.command("vacuum")(vacuum)
    group.command("reparse")(reparse)
    app.add_typer(group, name="db")


def upgrade(json: JsonOption = False, db: DbOption = None) -> None:
    """Bring the tables to this version, keeping what is in them; make them where there are none."""
    from bmoe_collector.store.engine import HEAD, StoreError, StoreTooNewError, make_engine, version_of
    from bmoe_collector.store.migrate import upgrade as migrate

    engine = make_engine(database_url(db))
    try:
        found = version_of(engine)
        if found is not None and found > HEAD:
            raise StoreTooNewError(f"it is at version {found}, this program knows {HEAD}: install a newer bmoe-fleet")
        before, after = migrate(engine)
    except StoreError as error:
        raise OutsideError(str(error)) from error
    finally:
        engine.dispose()
    if json:
        emit({"before": before, "after": after})
    else:
        shown = engine.url.render_as_string()
        print(f"{shown}: at {after} already" if before == after else f"{shown}: {before or 'empty'} -> {after}")


def check(
    deep: Annotated[bool, typer.Option("--deep", help="Also read every stored file and verify its hash.")] = False,
    artifacts: ArtifactsOption = None,
    json: JsonOption = False,
    db: DbOption = None,
) -> None:
    """Look for damage: tables, the database's structure, blocks and cursors, files. Exit 1 when something is wrong."""
    from bmoe_collector.store.artifacts import default_artifacts
    from bmoe_collector.store.retention import check as look

    store = open_db(db, reads=True)
    try:
        report = look(store, default_artifacts(store, artifacts), deep=deep)
    finally:
        store.close()
    if json:
        emit({"ok": not report.problems, "problems": report.problems, "counts": report.counts})
    else:
        for problem in report.problems:
            print(problem)
        counts = ", ".join(f"{number} {name}" for name, number in report.counts.items())
        print(f"{'sound' if not report.problems else 'not sound'}: {counts}")
    if report.problems:
        raise typer.Exit(1)


def vacuum(
    archive: Annotated[
        str | None, typer.Option("--archive", metavar="URL", help="Move traces of old, complete runs there.")
    ] = None,
    older_than: Annotated[
        float | None, typer.Option("--older-than", metavar="DAYS", min=0, help="Which runs are old; with --archive.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")] = False,
    artifacts: ArtifactsOption = None,
    json: JsonOption = False,
    db: DbOption = None,
) -> None:
    """Remove files that no run names, move old traces to an archive if asked, compact the tables.

    Nothing is removed that is not somewhere else too: a file leaves only after its copy in the archive was read back,
    and runs that are not complete, raw records and rows are never touched.
    """
    from bmoe_collector.store.artifacts import ArtifactError, Artifacts, default_artifacts
    from bmoe_collector.store.retention import vacuum as tidy

    if (archive is None) != (older_than is None):
        raise UserError("--archive and --older-than go together")
    store = open_db(db, reads=True)
    try:
        report = tidy(
            store,
            default_artifacts(store, artifacts),
            archive=Artifacts(archive if "://" in archive else str(Path(archive).absolute())) if archive else None,
            older_than_days=older_than,
            dry_run=dry_run,
        )
    except ArtifactError as error:
        raise OutsideError(str(error)) from error
    finally:
        store.close()
    if json:
        emit({"removed": report.removed, "archived": report.archived, "freed_bytes": report.freed_bytes})
    else:
        would = "would be " if dry_run else ""
        print(
            f"{counted(len(report.removed), 'file')} that no run names {would}removed, {len(report.archived)} {would}archived, "
            f"{report.freed_bytes / 2**20:.1f} MiB"
        )


def reparse(
    runs: Annotated[list[str] | None, typer.Argument(metavar="[RUN...]", help="Run ids; none with --all.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Every stored run.")] = False,
    artifacts: ArtifactsOption = None,
    json: JsonOption = False,
    db: DbOption = None,
) -> None:
    """Make all rows of runs again from their raw records, as after an upgrade of the parser, and judge them again."""
    from sqlalchemy import select

    from bmoe_collector.ingest.rebuild import reparse as again
    from bmoe_collector.store.artifacts import ArtifactError, default_artifacts
    from bmoe_collector.store.find import RunNotFoundError, find_runs
    from bmoe_collector.store.schema import RUNS

    if bool(runs) == every:
        raise UserError("name the runs, or say --all")
    store = open_db(db, reads=True)
    done: list[str] = []
    try:
        if every:
            with store.read() as connection:
                wanted = [
                    str(run) for run in connection.execute(select(RUNS.c.run_id).order_by(RUNS.c.run_no)).scalars()
                ]
        else:
            wanted = find_runs(store, runs or [])
        files = default_artifacts(store, artifacts)
        for run_id in wanted:
            try:
                again(store, files, run_id)
                done.append(run_id)
            except ArtifactError as error:
                say(f"{run_id[:12]}: left as it is: {error}")
    except RunNotFoundError as error:
        raise UserError(str(error)) from error
    finally:
        store.close()
    if json:
        emit({"runs": done, "failed": [run for run in wanted if run not in done]})
    else:
        print(f"{len(done)} of {counted(len(wanted), 'run')} made again")
    if len(done) != len(wanted):
        raise OutsideError(f"{len(wanted) - len(done)} runs could not be made again")
