"""What people call phones: names and tags in the database, and from a word to a phone.

In: a word (name, tag with `+` before it, uuid prefix of at least 4 digits, adb serial, `local:<socket>`). Out: uuids.
Names and tags are shared by every host of a database; secrets are not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from sqlalchemy import delete, insert, select
from sqlalchemy.exc import IntegrityError

from bmoe_collector.common import UserError
from bmoe_collector.host import HostHome
from bmoe_collector.reach.routes import Sighting
from bmoe_collector.store.engine import Store
from bmoe_collector.store.schema import DEVICE_NAMES, DEVICE_TAGS, DEVICES

_NAME = re.compile(r"[^\s+/,:\x00-\x1f][^\s/,\x00-\x1f]{0,63}")


def check_name(name: str, what: str) -> str:
    """Return the name if it can be typed again; `UserError` otherwise."""
    if not _NAME.fullmatch(name) or not name.isprintable() or re.fullmatch(r"[0-9a-f]{4,32}", name):
        raise UserError(
            f"{what} {name!r}: up to 64 printable characters without spaces, commas and slashes, and not hex digits only"
        )
    return name


def names(store: Store) -> dict[str, str]:
    """Names given by people, by uuid."""
    with store.read() as connection:
        return {row.agent_uuid: row.name for row in connection.execute(select(DEVICE_NAMES))}


def tags(store: Store) -> dict[str, list[str]]:
    """Sorted tags by uuid."""
    found: dict[str, list[str]] = {}
    with store.read() as connection:
        for row in connection.execute(select(DEVICE_TAGS).order_by(DEVICE_TAGS.c.tag)):
            found.setdefault(row.agent_uuid, []).append(row.tag)
    return found


def known_devices(store: Store) -> dict[str, dict[str, Any]]:
    """Rows of the devices table by uuid."""
    with store.read() as connection:
        return {row.agent_uuid: dict(row._mapping) for row in connection.execute(select(DEVICES))}  # noqa: SLF001 - SQLAlchemy's public name


def called(store: Store) -> dict[str, str]:
    """What to call a phone, by uuid: the name people gave it, else its own; a phone without either is not there."""
    own = {uuid: str((row.get("facts") or {}).get("name") or "") for uuid, row in known_devices(store).items()}
    return {uuid: name for uuid, name in own.items() if name} | names(store)


def set_name(store: Store, uuid: str, name: str) -> None:
    """Name a phone; an empty name takes it away."""
    try:
        with store.write() as connection:
            connection.execute(delete(DEVICE_NAMES).where(DEVICE_NAMES.c.agent_uuid == uuid))
            if name:
                connection.execute(insert(DEVICE_NAMES).values(agent_uuid=uuid, name=check_name(name, "name")))
    except IntegrityError:
        raise UserError(f"another phone is called {name!r} already: `bmoe devices` shows which") from None


def change_tags(store: Store, uuid: str, add: Sequence[str], remove: Sequence[str]) -> list[str]:
    """Add and remove tags; returns what the phone has then."""
    for tag in add:
        check_name(tag, "tag")
    have = set(tags(store).get(uuid, []))
    with store.write() as connection:
        for tag in set(remove) & have:
            connection.execute(delete(DEVICE_TAGS).where(DEVICE_TAGS.c.agent_uuid == uuid, DEVICE_TAGS.c.tag == tag))
        for tag in set(add) - have:
            connection.execute(insert(DEVICE_TAGS).values(agent_uuid=uuid, tag=tag))
    return sorted((have | set(add)) - set(remove))


def find_phone(store: Store, host: HostHome, word: str, sightings: Sequence[Sighting] = ()) -> bytes:
    """The uuid of the one phone a word means; `UserError` when it is none or several."""
    uuids = {phone.uuid.hex() for phone in host.phones()} | set(known_devices(store))
    given = names(store)
    hits = {uuid for uuid, name in given.items() if name == word}
    if not hits:
        hits = {sighting.uuid.hex() for sighting in sightings if sighting.where == word and sighting.uuid}
    if not hits:
        hits = {uuid for uuid, row in known_devices(store).items() if (row.get("facts") or {}).get("name") == word}
    if not hits and re.fullmatch(r"[0-9a-f]{4,32}", word):
        hits = {uuid for uuid in uuids if uuid.startswith(word)}
    if len(hits) == 1:
        return bytes.fromhex(hits.pop())
    if hits:
        raise UserError(f"{word!r} means {len(hits)} phones: {', '.join(sorted(uuid[:12] for uuid in hits))}")
    if any(sighting.where == word for sighting in sightings):
        raise UserError(f"{word}: not paired: `bmoe pair {word}`")
    known_as = called(store)
    known = sorted(f"{known_as[uuid]} ({uuid[:12]})" if uuid in known_as else uuid[:12] for uuid in uuids)
    raise UserError(f"no phone {word!r} is known here; known: {', '.join(known) or 'none, `bmoe pair` adds one'}")


def choose_phones(
    store: Store,
    host: HostHome,
    sightings: Sequence[Sighting],
    devices: Sequence[str],
    tag: str | None,
    everyone: bool,
) -> list[bytes]:
    """Phones for --device, --tag and --all; without any of them the only paired one. Paired phones alone."""
    paired = [phone.uuid for phone in host.phones()]
    if not paired:
        raise UserError("no phone is paired with this host: `bmoe pair`")
    if everyone:
        return paired
    chosen = [find_phone(store, host, word, sightings) for word in devices]
    if tag is not None:
        tagged = tags(store)
        found = [uuid for uuid in paired if tag in tagged.get(uuid.hex(), [])]
        if not found:
            raise UserError(f"no paired phone has the tag {tag!r}: `bmoe devices tag PHONE +{tag}`")
        chosen += found
    if not chosen:
        reachable = list({sighting.uuid: None for sighting in sightings if sighting.state == "reachable"})
        chosen = paired if len(paired) == 1 else reachable
        if len(chosen) != 1:
            raise UserError(f"{len(paired)} phones are paired: say which with --device, --tag or --all")
    unpaired = [uuid.hex()[:12] for uuid in chosen if uuid not in paired]
    if unpaired:
        raise UserError(f"not paired with this host: {', '.join(unpaired)}: `bmoe pair`")
    return list(dict.fromkeys(chosen))
