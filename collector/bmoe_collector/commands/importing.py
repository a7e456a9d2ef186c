"""`bmoe import PATH...`: files of an engine's output into the database, one JSON object per run."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from bmoe_collector.common import DbOption, JsonOption, OutsideError, UserError, counted, emit, open_db, say
from bmoe_collector.show.safe import escape

if TYPE_CHECKING:
    from bmoe_collector.importer.imports import Imported


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("import")(import_)


def import_(
    paths: Annotated[list[str], typer.Argument(metavar="PATH...", help="Files or directories.", show_default=False)],
    label: Annotated[
        list[str] | None, typer.Option("--label", metavar="KEY=VALUE", help="A label for every run; can be repeated.")
    ] = None,
    artifacts: Annotated[
        str | None, typer.Option("--artifacts", metavar="URL", help="Where files are kept; else BMOE_ARTIFACTS.")
    ] = None,
    json: JsonOption = False,
    db: DbOption = None,
) -> None:
    """Take files of an engine's output into the database.

    Takes stdout, stderr, metrics CSVs of every generation, traces, .metrics sidecars and run.json, recognised by their
    content. A directory with run.json or generic names (stdout, metrics, route) is one run, otherwise files that share
    a stem are. The same files again change nothing; more files of a run that is stored enrich it. What is not
    understood is listed with the reason, and kept.
    """
    from bmoe_collector.importer import import_paths
    from bmoe_collector.store.artifacts import ArtifactError, default_artifacts

    labels: dict[str, str] = {}
    for each in label or []:
        key, equals, value = each.partition("=")
        if not equals or not key.strip():
            raise UserError(f"--label {each}: write it as KEY=VALUE")
        labels[key.strip()] = value
    store = open_db(db)
    try:
        result = import_paths(store, default_artifacts(store, artifacts), paths, labels)
    except FileNotFoundError as error:
        raise UserError(f"{error.filename}: there is no such file or directory") from None
    except ArtifactError as error:
        raise OutsideError(str(error)) from error
    finally:
        store.close()
    for run in result.runs:
        if json:
            emit(run.to_json())
            continue
        files = f"{_state(run)}: {counted(len(run.files), 'file')}"
        tokens, turns = counted(run.tokens, "token"), counted(run.turns, "turn")
        print(f"{run.run[:12]}  {run.outcome:<8} {tokens:>13} {turns:>9}  {files:<17} {escape(_place(run.files))}")
    for run in result.runs:
        for problem in run.problems if run.added else ():
            where = f"{problem['file']}:{problem['line']}" if problem.get("line") else problem.get("file", run.run[:12])
            say(f"{run.run[:12]}: {where}: {problem['what']}")
    for path, why in result.loose:
        say(f"{path}: kept, belongs to no run: {why}")
    for path, why in result.unread:
        say(f"{path}: cannot be read: {why}")
    if not result.runs:
        say("no run of an engine was found there")
    elif not json:
        states = Counter(_state(run) for run in result.runs)
        told = ", ".join(f"{states[state]} {state}" for state in ("new", "enriched", "known") if states[state])
        loose = f"; {counted(len(result.loose), 'file')} of no run" if result.loose else ""
        say(f"{counted(len(result.runs), 'run')}: {told}{loose}")


def _state(run: Imported) -> str:
    return "known" if run.already and not run.added else "enriched" if run.already else "new"


def _place(files: Sequence[str]) -> str:
    """Where a run's files are: the file, or the folder they share."""
    return (
        files[0] if len(files) == 1 else os.path.commonpath([os.path.dirname(os.path.abspath(file)) for file in files])
    )
