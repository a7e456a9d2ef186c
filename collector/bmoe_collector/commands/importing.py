"""`bmoe import PATH...`: files of an engine's output into the database, one JSON object per run."""

from __future__ import annotations

from typing import Annotated

import typer

from bmoe_collector.common import DbOption, JsonOption, OutsideError, UserError, emit, open_db, say


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
        known = "known" if run.already and not run.added else "enriched" if run.already else "new"
        files = f"{len(run.files)} file{'s' if len(run.files) != 1 else ''}"
        print(f"{run.run[:12]}  {run.outcome:<8} {run.tokens:>6} tokens {run.turns:>3} turns  {known}: {files}")
    for run in result.runs:
        for problem in run.problems if run.added else ():
            where = f"{problem['file']}:{problem['line']}" if problem.get("line") else problem.get("file", run.run[:12])
            say(f"{run.run[:12]}: {where}: {problem['what']}")
    for path, why in result.loose:
        say(f"{path}: kept, belongs to no run: {why}")
    if not result.runs:
        say("no run of an engine was found there")
