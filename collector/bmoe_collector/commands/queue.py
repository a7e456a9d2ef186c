"""`bmoe queue` and `bmoe cancel`: plans that wait for phones that are away, and taking back what runs."""

from __future__ import annotations

import contextlib
from typing import Annotated, Any

import typer
from bmoe_proto.calls import AgentClient

from bmoe_collector.commands.pairing import reach_for
from bmoe_collector.common import DbOption, JsonOption, OutsideError, UserError, emit, open_db, say
from bmoe_collector.fleet import names
from bmoe_collector.fleet import queue as waiting
from bmoe_collector.host import HostHome
from bmoe_collector.reach.routes import best_routes


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("queue")(queue)
    app.command("cancel")(cancel)


def queue(
    remove: Annotated[
        list[str] | None, typer.Option("--remove", metavar="PLAN", help="Take a waiting plan out (id prefix).")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Also what was submitted and removed.")] = False,
    json: JsonOption = False,
    db: DbOption = None,
) -> None:
    """Show plans waiting for phones that are away."""
    store = open_db(db)
    for prefix in remove or []:
        hits = [entry for entry in waiting.listing(store) if entry.plan_id.startswith(prefix)]
        if len(prefix) < 4 or not hits:
            raise UserError(f"--remove {prefix}: no plan of that id waits (at least 4 digits)")
        for entry in hits:
            waiting.settle(store, entry.queue_id, "removed", "by hand")
    given = names.called(store)
    entries = waiting.listing(store, everything=everything)
    if json:
        emit([{name: getattr(entry, name) for name in entry.__slots__} for entry in entries])
        return
    from rich.table import Table
    from rich.text import Text

    from bmoe_collector.show.console import console
    from bmoe_collector.show.safe import escape

    table = Table("plan", "name", "cells", "phone", "state", "why", box=None)
    for entry in entries:
        phone = given.get(entry.uuid, entry.uuid[:12])
        cells = [
            entry.plan_id[:8],
            escape(entry.plan_name),
            str(entry.cells),
            escape(phone),
            entry.state,
            escape(entry.why),
        ]
        table.add_row(*map(Text, cells))
    console().print(table if entries else "nothing waits")


def cancel(
    plan: Annotated[
        str | None, typer.Argument(metavar="[PLAN]", help="A plan's id prefix; else whatever runs now.")
    ] = None,
    device: Annotated[
        list[str] | None, typer.Option("--device", "-d", help="Phone (name, uuid, serial, local:SOCKET).")
    ] = None,
    cell: Annotated[
        bool, typer.Option("--cell", help="Only the cell that runs now; the plan goes on with the next.")
    ] = False,
    everyone: Annotated[bool, typer.Option("--all", help="On every paired phone.")] = False,
    json: JsonOption = False,
    db: DbOption = None,
) -> None:
    """Stop what a phone runs; the run is recorded as aborted."""
    store, host = open_db(db), HostHome()
    words, called = device or [], names.called(store)
    answers: list[dict[str, Any]] = []
    with reach_for(host, store.store_id, words) as reach:
        sightings = reach.sightings()
        routes = best_routes(sightings)
        for uuid in names.choose_phones(store, host, sightings, words, None, everyone):
            if uuid not in routes:
                named = called.get(uuid.hex(), uuid.hex()[:12])
                raise OutsideError(f"{named}: not in reach now: `bmoe devices` says why")
            with contextlib.closing(reach.open(routes[uuid][0])) as client:
                plan_id = _plan_id(client, plan) if plan else ""
                reply = client.cancel(plan_id, only_current_cell=cell)
            answers.append({"phone": uuid.hex(), "cancelled": reply.cancelled, "detail": reply.detail})
    for answer in answers:
        said = answer["detail"] or ("cancelled" if answer["cancelled"] else "nothing runs")
        say(
            f"{called.get(answer['phone'], answer['phone'][:12])}: {'' if answer['cancelled'] else 'nothing was cancelled: '}{said}"
        )
    if json:
        emit(answers)


def _plan_id(client: AgentClient, prefix: str) -> str:
    found = [listing.plan_id for listing in client.listing().plans if listing.plan_id.startswith(prefix)]
    if len(found) != 1:
        raise UserError(f"{prefix}: {len(found)} plans on the phone have an id that begins so")
    return found[0]
