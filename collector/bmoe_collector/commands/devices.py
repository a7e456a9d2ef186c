"""`bmoe devices`: every phone adb shows or that is known, in which state, and what to do; names and tags.

A phone seen twice (USB and Wi-Fi) is one line with two places; the state is that of the best way to it.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import typer
from bmoe_proto.v1 import telemetry_pb2 as pb

from bmoe_collector.commands.pairing import reach_for
from bmoe_collector.common import DbOption, JsonOption, UserError, emit, open_db, say
from bmoe_collector.fleet import names
from bmoe_collector.host import HostHome
from bmoe_collector.reach.adb import AdbError
from bmoe_collector.reach.routes import LOCAL, Reach, Sighting, best_routes
from bmoe_collector.reach.states import ADVICE, state_of, storage_problem
from bmoe_collector.store.engine import Store


def register(app: typer.Typer) -> None:
    """Add the command with its sub-commands."""
    devices = typer.Typer(
        help="Phones: what adb sees, what their agents say; names and tags.", invoke_without_command=True
    )
    devices.callback()(listing)
    devices.command("name")(name)
    devices.command("tag")(tag)
    app.add_typer(devices, name="devices")


def listing(
    context: typer.Context,
    device: Annotated[list[str] | None, typer.Option("--device", "-d", help="Also local:SOCKET.")] = None,
    json: JsonOption = False,
    db: DbOption = None,
) -> None:
    """Show all phones."""
    if context.invoked_subcommand is not None:
        return
    store, host = open_db(db), HostHome()
    with reach_for(host, store.store_id, device or []) as reach:
        found = look(store, host, reach)
    if json:
        emit(found)
    else:
        _show(found)


def name(
    phone: Annotated[str, typer.Argument(metavar="PHONE", help="Name, uuid prefix or serial.")],
    new: Annotated[str, typer.Argument(metavar="NAME", help="Empty takes the name away.")],
    json: JsonOption = False,
    db: DbOption = None,
) -> None:
    """Call a phone NAME."""
    store = open_db(db)
    uuid = names.find_phone(store, HostHome(), phone).hex()
    names.set_name(store, uuid, new)
    if json:
        emit({"phone": uuid, "name": new})
    else:
        say(f"{uuid[:12]} is called {new}" if new else f"{uuid[:12]} has no name of yours any more")


def tag(
    phone: Annotated[str, typer.Argument(metavar="PHONE", help="Name, uuid prefix or serial.")],
    changes: Annotated[list[str], typer.Argument(metavar="+TAG|-TAG...", help="Put `--` before the first -TAG.")],
    json: JsonOption = False,
    db: DbOption = None,
) -> None:
    """Put a phone into groups, or take it out."""
    for change in changes:
        if change[:1] not in {"+", "-"} or len(change) < 2:
            raise UserError(f"{change}: +TAG adds, -TAG removes")
    store = open_db(db)
    uuid = names.find_phone(store, HostHome(), phone).hex()
    add = [change[1:] for change in changes if change[0] == "+"]
    have = names.change_tags(store, uuid, add, [change[1:] for change in changes if change[0] == "-"])
    if json:
        emit({"phone": uuid, "tags": have})
    else:
        say(f"{uuid[:12]}: {' '.join(have) or 'no tags'}")


def look(store: Store, host: HostHome, reach: Reach) -> list[dict[str, Any]]:
    """One object a phone (or a transport on which none was found), each asked with a deadline."""
    try:
        sightings = reach.sightings()
        problem = reach.adb_problem
    except AdbError as error:
        sightings, problem = [], str(error)
    if problem:
        say(f"adb: {problem}")
    given, tagged, called = names.names(store), names.tags(store), names.called(store)
    found: list[dict[str, Any]] = []
    routes = best_routes(sightings)
    with ThreadPoolExecutor(max(1, min(16, len(routes))), "ask") as pool:
        for uuid, answer in zip(routes, pool.map(lambda ways: _ask(reach, ways), routes.values()), strict=True):
            places = [way.where for way in routes[uuid]]
            found.append({"uuid": uuid.hex(), "places": places, **answer})
    # a paired phone that cannot be reached is told by the places it was reached at before
    away = {phone.uuid: phone for phone in host.phones() if phone.uuid not in routes}
    for sighting in sightings:
        if sighting.state != "reachable":
            known_as = next(
                (uuid for uuid, phone in away.items() if phone.places[:1] == (sighting.where,)), sighting.uuid
            )
            found.append(_line(known_as.hex() or None, [sighting.where], sighting.state, sighting.detail))
            away.pop(known_as, None)
    found.extend(_line(uuid.hex(), list(phone.places), "away", "") for uuid, phone in away.items())
    for line in found:
        line["name"] = given.get(line["uuid"] or "") or line.get("name") or called.get(line["uuid"] or "")
        line["tags"] = tagged.get(line["uuid"] or "", [])
        line["advice"] = ADVICE.get(line["state"], "")
        if line["state"] == "away" and line["places"] and all(place.startswith(LOCAL) for place in line["places"]):
            line["advice"] = "its agent is on this machine: `bmoe-agent serve`"
    return found


def _line(uuid: str | None, places: list[str], state: str, detail: str, **more: Any) -> dict[str, Any]:
    return {"uuid": uuid, "places": places, "state": state, "detail": detail, **more}


def _ask(reach: Reach, ways: list[Sighting]) -> dict[str, Any]:
    """What the agent says of itself, over the first way on which it answers."""
    failed: list[tuple[str, str]] = []
    for way in ways:
        try:
            with contextlib.closing(reach.open(way)) as client:
                return _told(client.status(), client.hello)
        except Exception as error:
            failed.append(state_of(error))
    state, detail = failed[0]
    return {"state": state, "detail": detail}


def _told(status: pb.StatusReply, hello: pb.HelloReply) -> dict[str, Any]:
    full = storage_problem(status)
    return {
        "state": "storage_full" if full else "ready",
        "detail": full,
        "name": status.device.name,
        "agent_version": hello.agent_version,
        "doing": status.state,
        "plan": status.plan_name or None,
        "cell": status.cell or None,
        "cell_index": status.cell_index if status.cells else None,
        "cells": status.cells or None,
        "tokens": status.tokens if status.run_id else None,
        "tok_s": status.tok_s if status.HasField("tok_s") else None,
        "backlog_bytes": status.backlog_bytes,
        "free_bytes": status.free_bytes,
        "spool_bytes": status.spool_bytes,
        "quota_bytes": status.quota_bytes,
        "kept_for_store": status.kept_for_store.hex() or None,
        "engines": list(status.engines),
        "models": list(status.models),
        "gates": list(status.gates),
        "unreadable": dict(status.unreadable),
    }


def _show(found: list[dict[str, Any]]) -> None:
    from rich.table import Table
    from rich.text import Text

    from bmoe_collector.show import words
    from bmoe_collector.show.console import console
    from bmoe_collector.show.safe import escape

    if not found:
        say("no phone: plug one in with USB debugging on, or `adb connect HOST:PORT`")
        return
    table = Table("phone", "uuid", "at", "state", "doing", "backlog", "tags", "to do", box=None)
    for line in found:
        cells = [
            line["name"] or "–",
            (line["uuid"] or "–")[:12],
            " ".join(line["places"]),
            line["state"],
            line.get("doing") or "–",
            words.size(line.get("backlog_bytes")),
            " ".join(line["tags"]),
            line["advice"] or line["detail"],
        ]
        table.add_row(*(Text(escape(cell)) for cell in cells))
    console().print(table)
