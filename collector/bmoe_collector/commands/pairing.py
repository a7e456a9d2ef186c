"""`bmoe pair`, `bmoe unpair`, `bmoe rotate`: this host's secrets, and which store a phone keeps its records for.

The secret is read from a prompt or from stdin, never from argv: other users of a host see argv.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import sys
from dataclasses import replace
from typing import Annotated

import typer

from bmoe_collector.common import DbOption, JsonOption, OutsideError, UserError, emit, open_db, say
from bmoe_collector.fleet import names
from bmoe_collector.host import HostHome, PairedPhone, parse_secret
from bmoe_collector.reach.routes import LOCAL, Reach, Sighting
from bmoe_collector.reach.states import ADVICE, state_of

Where = Annotated[
    str | None,
    typer.Argument(metavar="[PHONE]", help="adb serial, address HOST:PORT, or local:SOCKET; else the only new one."),
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("pair")(pair)
    app.command("unpair")(unpair)
    app.command("rotate")(rotate)


def reach_for(host: HostHome, store_id: str, words: list[str]) -> Reach:
    """A reach that knows the `local:` phones among words; adb is left alone when there are no others."""
    local = [word.removeprefix(LOCAL) for word in words if word.startswith(LOCAL)]
    only_local = bool(words) and len(local) == len(words)
    return Reach(host, bytes.fromhex(store_id), local=local, remembered=not only_local, use_adb=not only_local)


def pair(
    phone: Where = None,
    socket: Annotated[str | None, typer.Option(help="The agent's socket name, if its config.toml sets one.")] = None,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Do not make this store the one it keeps records for.")
    ] = False,
    take_over: Annotated[bool, typer.Option("--take-over", help="Even if it keeps records for another store.")] = False,
    json: JsonOption = False,
    db: DbOption = None,
) -> None:
    """Store a phone's secret (from a prompt or stdin), and have it keep its records for this database."""
    from bmoe_collector.ingest.record import offers_of, put_device

    store, host = open_db(db), HostHome()
    with reach_for(host, store.store_id, [phone] if phone else []) as reach:
        if phone and reach.adb and re.search(r":\d+$", phone):
            reach.adb.connect(phone)
        sighting = _one(reach.sightings(), phone, socket)
        secret = parse_secret(_ask_secret(sighting))
        try:
            client = reach.open(sighting, secret=secret)
        except Exception as error:
            state, detail = state_of(error)
            advice = ADVICE.get(state, "")
            if state == "wrong_secret":
                advice = "this is not the secret of that agent; `bmoe-agent init` on the phone showed it once, and its file `secret` holds it"
            raise OutsideError(f"{sighting.where}: {detail}{f'; {advice}' if advice else ''}") from None
        with contextlib.closing(client):
            uuid = client.hello.agent_uuid
            status = client.status()
            kept = status.kept_for_store
            ours = bytes.fromhex(store.store_id)
            if not read_only and kept != ours:
                if kept and not take_over:
                    raise UserError(
                        f"{sighting.where}: it keeps its records for store {kept.hex()[:12]}, not for this one "
                        f"({store.store_id[:12]}): --read-only reads along, --take-over makes this the one"
                    )
                client.rotate(keep_for_store=ours)
            host.remember(PairedPhone(uuid, secret, sighting.socket, (sighting.where,)))
            with store.write() as connection:
                put_device(connection, status.device, offers_of(status))
    facts = {"phone": uuid.hex(), "name": status.device.name, "where": sighting.where, "reads_only": read_only}
    if json:
        emit(facts)
    else:
        reads = ", which only reads along: it keeps its records for another store" if read_only and kept != ours else ""
        say(f"paired {status.device.name} ({uuid.hex()[:12]}) at {sighting.where}{reads}")


def unpair(
    phone: Annotated[str, typer.Argument(metavar="PHONE", help="Name, uuid prefix, serial or local:SOCKET.")],
    keep: Annotated[
        bool, typer.Option("--here-only", help="Only forget the secret here; the phone is not asked.")
    ] = False,
    json: JsonOption = False,
    db: DbOption = None,
) -> None:
    """Have a phone stop keeping records for this database, and forget its secret here."""
    store, host = open_db(db), HostHome()
    told = False
    with reach_for(host, store.store_id, [phone] if phone.startswith(LOCAL) else []) as reach:
        known = names.called(store)
        sightings = [] if keep and not phone.startswith(LOCAL) else reach.sightings()
        uuid = names.find_phone(store, host, phone, sightings)
        if not keep:
            told = _tell_forget(reach, sightings, uuid)
    if not host.forget(uuid):
        raise UserError(f"{phone}: not paired with this host")
    if json:
        emit({"phone": uuid.hex(), "told": told})
    else:
        say(
            f"forgot {known.get(uuid.hex(), uuid.hex()[:12])}"
            + ("" if told or keep else "; it could not be told: its records wait for this store")
        )


def rotate(
    phone: Annotated[str, typer.Argument(metavar="PHONE", help="Name, uuid prefix, serial or local:SOCKET.")],
    json: JsonOption = False,
    db: DbOption = None,
) -> None:
    """Give a phone a new secret, sealed with the old one; other hosts must pair again."""
    store, host = open_db(db), HostHome()
    with reach_for(host, store.store_id, [phone] if phone.startswith(LOCAL) else []) as reach:
        sightings = reach.sightings()
        uuid = names.find_phone(store, host, phone, sightings)
        known = host.phone(uuid)
        routes = [sighting for sighting in sightings if sighting.uuid == uuid and sighting.state == "reachable"]
        if known is None or not routes:
            raise OutsideError(f"{phone}: not in reach now: `bmoe devices` says why")
        new = secrets.token_bytes(32)
        # kept first: if the answer is lost after the phone took it, both are here to try
        host.remember(replace(known, next_secret=new))
        with contextlib.closing(reach.open(routes[0], secret=known.secret, uuid=uuid)) as client:
            client.rotate(new)
        host.remember(replace(known, secret=new, next_secret=b""))
    if json:
        emit({"phone": uuid.hex(), "rotated": True})
    else:
        named = names.called(store).get(uuid.hex(), uuid.hex()[:12])
        say(f"{named} has a new secret; it is stored here and on the phone only")


def _one(sightings: list[Sighting], phone: str | None, socket: str | None) -> Sighting:
    """The sighting meant; a phone with an unusual socket name is tried under the name given."""
    if socket is not None:
        for sighting in sightings:
            if (
                sighting.transport is not None
                and sighting.transport.state == "device"
                and phone in {None, sighting.where}
            ):
                return replace(sighting, socket=socket, state="unpaired", uuid=b"")
    wanted = [sighting for sighting in sightings if phone in {None, sighting.where}]
    found = [sighting for sighting in wanted if sighting.socket and (phone or sighting.state == "unpaired")]
    if len(found) == 1:
        return found[0]
    if found:
        listed = ", ".join(f"{sighting.where} ({sighting.socket})" for sighting in found)
        raise UserError(f"{len(found)} agents are in reach: name one, or its socket with --socket: {listed}")
    if wanted:
        where, state = wanted[0].where, wanted[0].state
        raise OutsideError(
            f"{where}: {state}: {wanted[0].detail or ADVICE.get(state, '')}; {ADVICE.get(state, '')}".rstrip("; ")
        )
    raise OutsideError(
        f"{phone or 'no phone'}: adb shows no such device: plug it in, or `bmoe pair HOST:PORT` over Wi-Fi"
    )


def _ask_secret(sighting: Sighting) -> str:
    if sys.stdin.isatty():
        import getpass

        return getpass.getpass(f"secret of the agent at {sighting.where}: ")
    return sys.stdin.readline()


def _tell_forget(reach: Reach, sightings: list[Sighting], uuid: bytes) -> bool:
    for sighting in sightings:
        if sighting.uuid == uuid and sighting.state == "reachable":
            try:
                with contextlib.closing(reach.open(sighting)) as client:
                    client.rotate(forget=True)
            except Exception as error:
                say(f"{sighting.where}: {state_of(error)[1]}")
            else:
                return True
    return False
