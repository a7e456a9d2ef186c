"""`bmoe run`: submit a plan, or one benchmark, to phones; follow it to its end; show it.

The phone does the work and keeps the record: Ctrl-C here, or this host going away, stops nothing there. `bmoe cancel`
does. Phones that are away get the plan when a collector next reaches them.
"""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from bmoe_proto.v1 import telemetry_pb2 as pb

from bmoe_collector.commands.pairing import reach_for
from bmoe_collector.common import (
    EXIT_NO,
    DbOption,
    JsonOption,
    OutsideError,
    UserError,
    counted,
    emit,
    open_db,
    open_ingestor,
    read_small,
    say,
)
from bmoe_collector.fleet import follow, names, queue
from bmoe_collector.fleet.collector import Collector
from bmoe_collector.fleet.progress import Progress, lines
from bmoe_collector.fleet.single import Single, plan_of, split_flags
from bmoe_collector.host import HostHome
from bmoe_collector.probe.prepare import announce
from bmoe_collector.reach.routes import Reach, Sighting, best_routes
from bmoe_collector.reach.states import state_of
from bmoe_collector.store.engine import Store

EPILOG = "With --model, everything after `--` is passed to the engine: bmoe run --model qwen3 -n 256 -- --cache-mb 2048"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("run", epilog=EPILOG)(run)


def run(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="PLAN.toml | -- ENGINE FLAGS", help="A plan, or with --model the engine's flags."),
    ] = None,
    model: Annotated[str, typer.Option("--model", "-m", help="Model by name: one benchmark instead of a plan.")] = "",
    engine: Annotated[
        str, typer.Option("--engine", help="Engine by its configured name; else the phone's default.")
    ] = "",
    prompt: Annotated[list[str] | None, typer.Option("--prompt", "-p", help="Prompt; several make a session.")] = None,
    prompt_file: Annotated[str | None, typer.Option("--prompt-file", help="Prompt from a file, `-` for stdin.")] = None,
    n_predict: Annotated[int, typer.Option("-n", min=0, help="Tokens to generate; 0 leaves it to the engine.")] = 0,
    flag: Annotated[
        list[str] | None, typer.Option("--flag", help='Engine flags, e.g. --flag "--cache-mb 2048".')
    ] = None,
    trace: Annotated[
        list[str] | None, typer.Option("--trace", help="Also record: route,compute,compute_layers,io.")
    ] = None,
    label: Annotated[list[str] | None, typer.Option("--label", help="KEY=VALUE, kept with the run.")] = None,
    env: Annotated[list[str] | None, typer.Option("--env", help="KEY=VALUE for the engine's environment.")] = None,
    name: Annotated[str, typer.Option("--name", help="Name of the cell; else the model's.")] = "",
    device: Annotated[
        list[str] | None, typer.Option("--device", "-d", help="Phone (name, uuid, serial, local:SOCKET).")
    ] = None,
    tag: Annotated[str | None, typer.Option("--tag", help="Every paired phone with this tag.")] = None,
    everyone: Annotated[bool, typer.Option("--all", help="Every paired phone.")] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Submit only; `bmoe collect` brings the record.")] = False,
    json: JsonOption = False,
    db: DbOption = None,
) -> None:
    """Run a benchmark or a plan on phones, follow it, show it. Exit 1 when a run of it is not ok."""
    given = words or []
    if model:
        prompts = [text.encode() for text in prompt or []]
        if prompt_file is not None:
            prompts.append(_read_prompt(prompt_file))
        plan = plan_of(
            Single(
                model=model,
                engine=engine,
                prompts=prompts,
                n_predict=n_predict,
                flags=split_flags(flag or [], given),
                traces=trace or [],
                labels=label or [],
                environment=env or [],
                name=name,
            )
        )
    else:
        plan = _load(given)
    store, host = open_db(db), HostHome()
    with reach_for(host, store.store_id, device or []) as reach:
        outcome = submit_and_follow(
            store, host, reach, plan, devices=device or [], tag=tag, everyone=everyone, detach=detach, quiet=json
        )
    if json:
        emit(outcome)
    elif outcome["runs"]:
        show(store, outcome, db)
        if plan.question_json:
            say(f"what the plan asked: bmoe compare --question {plan.plan_id[:8]}")
    store.close()
    if not outcome["ok"]:
        raise typer.Exit(EXIT_NO)


def submit_and_follow(
    store: Store,
    host: HostHome,
    reach: Reach,
    plan: pb.Plan,
    *,
    devices: list[str],
    tag: str | None = None,
    everyone: bool = False,
    detach: bool = False,
    quiet: bool = False,
    goes_on: bool = True,
) -> dict[str, Any]:
    """Submit to the chosen phones and, unless `detach`, drain them until all of it is stored.

    `goes_on`: whether the phones go on with it when this process is interrupted, which is then said.
    Returns `plan`, `run` (the one run of a plan of one cell on one phone), `runs`, `queued` and `ok`.
    """
    sightings = reach.sightings()
    uuids = names.choose_phones(store, host, sightings, devices, tag, everyone)
    sent, queued = _submit(store, reach, best_routes(sightings), plan, uuids, stays=not detach)
    answer: dict[str, Any] = {"plan": plan.plan_id, "phones": [uuid.hex() for uuid in sent], "queued": queued}
    if detach or not sent:
        return {**answer, "run": None, "runs": [], "ok": True}
    found = _follow(store, reach, plan, sent, quiet=quiet, goes_on=goes_on)
    last = follow.last_attempts(found)
    runs = [
        {"run": cell.run_id, "phone": cell.uuid, "cell": cell.cell, "attempt": cell.attempt, "outcome": cell.outcome}
        for cell in last
    ]
    whole = len(last) >= len(plan.cells) * len(sent)
    ok = whole and all(cell.outcome == "ok" for cell in last)
    return {**answer, "run": runs[0]["run"] if len(runs) == 1 else None, "runs": runs, "ok": ok}


def _submit(
    store: Store, reach: Reach, routes: dict[bytes, list[Sighting]], plan: pb.Plan, uuids: list[bytes], *, stays: bool
) -> tuple[list[bytes], list[str]]:
    """Hand the plan over where a phone answers, queue it where none does; `stays`: this host looks after the cells too."""
    sent: list[bytes] = []
    queued: list[str] = []
    called = names.called(store)
    for uuid in uuids:
        why, named = "away", called.get(uuid.hex(), uuid.hex()[:12])
        for route in routes.get(uuid, []):
            try:
                with contextlib.closing(reach.open(route)) as client:
                    if stays and route.transport is not None:
                        announce(client)
                    reply = client.submit(plan)
            except Exception as error:
                why = ": ".join(state_of(error))
                continue
            if reply.refused:
                raise UserError(f"{route.where} does not take it: " + "; ".join(reply.refused))
            for warning in reply.warnings:
                say(f"{route.where}: {warning}")
            sent.append(uuid)
            if not stays:
                say(
                    f"{named}: took plan {plan.plan_id[:8]}, {counted(len(plan.cells), 'run')}; `bmoe collect` brings the "
                    f"record, `bmoe cancel {plan.plan_id[:8]} -d '{named}'` stops it"
                )
            break
        else:
            queue.enqueue(store, plan, uuid, why)
            queued.append(uuid.hex())
            say(f"{named}: {why}: queued; a running `bmoe collect` submits it when the phone comes")
    return sent, queued


def _follow(
    store: Store, reach: Reach, plan: pb.Plan, uuids: list[bytes], *, quiet: bool, goes_on: bool
) -> list[follow.CellNow]:
    """Drain the phones (or watch another collector do it) until the plan has ended and is stored."""
    collector = Collector(store, open_ingestor(store), reach, only=uuids)
    follower = follow.PlanFollower(store, reach, collector, plan.plan_id, uuids)
    given = names.called(store)
    collector.start()
    try:
        with Progress(quiet).on() as progress:
            while not follower.finished():
                phones = [collector.board.get(uuid) for uuid in uuids]
                progress.show(lines(phones, follow.cells(store, plan.plan_id), given, len(plan.cells)))
                time.sleep(0.5)
    except KeyboardInterrupt:
        if goes_on:
            say(
                f"no longer following; the plan goes on: `bmoe collect` brings its record, `bmoe cancel {plan.plan_id[:8]}` stops it"
            )
        raise
    finally:
        collector.stop()
        collector.join()
    for uuid, state in follower.states.items():
        if state in {"cancelled", "stopped"}:
            say(
                f"{given.get(uuid.hex(), uuid.hex()[:12])}: the plan was {state}: {follower.why.get(uuid, '')}".rstrip(
                    ": "
                )
            )
    return follow.cells(store, plan.plan_id)


def show(store: Store, outcome: dict[str, Any], db: str | None) -> None:
    """Show the one run, or a table of all."""
    if outcome["run"]:
        from bmoe_collector.commands import show as showing

        showing.show(outcome["run"], db=db)
        return
    from rich.table import Table
    from rich.text import Text

    from bmoe_collector.show.console import console
    from bmoe_collector.show.safe import escape

    given = names.called(store)
    rates = {cell.run_id: cell.tok_s for cell in follow.cells(store, outcome["plan"])}
    table = Table("run", "phone", "cell", "attempt", "outcome", "tok/s", box=None)
    for run_ in outcome["runs"]:
        rate = rates.get(run_["run"])
        cells = [
            run_["run"][:12],
            given.get(run_["phone"], run_["phone"][:12]),
            run_["cell"],
            str(run_["attempt"]),
            run_["outcome"],
            "–" if rate is None else f"{rate:.2f}",
        ]
        table.add_row(*(Text(escape(cell)) for cell in cells))
    console().print(table)


def _load(given: list[str]) -> pb.Plan:
    if len(given) != 1:
        raise UserError("name one PLAN.toml, or --model for a single benchmark; `bmoe run --help` shows both")
    from bmoe_collector.plans import load_plan
    from bmoe_collector.plans.document import shipped

    if not Path(given[0]).is_file():
        hint = f"; `bmoe plan init plan.toml --like {given[0]}` makes one" if given[0] in shipped() else ""
        raise UserError(f"{given[0]}: no such plan file{hint}")

    plan = load_plan(given[0])
    if not isinstance(plan, pb.Plan):
        raise OutsideError(f"{given[0]}: not a plan")
    return plan


def _read_prompt(path: str) -> bytes:
    if path == "-":
        return sys.stdin.buffer.read()
    try:
        return read_small(Path(path))
    except OSError as error:
        raise UserError(f"--prompt-file {path}: {error.strerror}") from None
