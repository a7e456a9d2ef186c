"""Leases: which collector drains which phone, so that several hosts can share one database.

In: the store, a name (a phone's uuid) and who asks. Out: a `Lease` or None. A lease runs out by itself; its `token`
grows with every change of holder, so that one who was asleep can tell that the lease is no longer his.
"""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import dataclass

from sqlalchemy import Connection, delete, insert, select, update
from sqlalchemy.exc import IntegrityError

from bmoe_collector.store.engine import Store, wall_ns
from bmoe_collector.store.schema import LEASES

NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Lease:
    """Held until `until_wall_ns` unless renewed."""

    name: str
    holder: str
    token: int
    until_wall_ns: int


def new_holder() -> str:
    """A name for this process: host, pid and a random part."""
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"


def acquire(store: Store, name: str, holder: str, seconds: float, now_ns: int | None = None) -> Lease | None:
    """Take or renew a lease; None when somebody else holds it."""
    now = wall_ns() if now_ns is None else now_ns
    until = now + int(seconds * NS_PER_S)
    try:
        with store.write() as connection:
            row = connection.execute(select(LEASES).where(LEASES.c.name == name).with_for_update()).first()
            if row is None:
                connection.execute(insert(LEASES).values(name=name, holder=holder, token=1, until_wall_ns=until))
                return Lease(name, holder, 1, until)
            if row.holder != holder and row.until_wall_ns > now:
                return None
            token = int(row.token) + (row.holder != holder)
            connection.execute(
                update(LEASES).where(LEASES.c.name == name).values(holder=holder, token=token, until_wall_ns=until)
            )
            return Lease(name, holder, token, until)
    except IntegrityError:  # somebody inserted it between our look and our insert
        return None


def holder_of(store: Store, name: str, now_ns: int | None = None) -> Lease | None:
    """Who holds it now."""
    now = wall_ns() if now_ns is None else now_ns
    with store.read() as connection:
        row = connection.execute(select(LEASES).where(LEASES.c.name == name)).first()
    if row is None or row.until_wall_ns <= now:
        return None
    return Lease(row.name, row.holder, int(row.token), int(row.until_wall_ns))


def release(store: Store, lease: Lease) -> None:
    """Give it back; no effect when it is no longer ours. The row stays, so that the token keeps growing."""
    with store.write() as connection:
        connection.execute(
            update(LEASES)
            .where(LEASES.c.name == lease.name, LEASES.c.holder == lease.holder, LEASES.c.token == lease.token)
            .values(until_wall_ns=0)
        )


def still_held(connection: Connection, lease: Lease, now_ns: int | None = None) -> bool:
    """Whether the lease is still ours, asked inside the transaction whose writes depend on it."""
    now = wall_ns() if now_ns is None else now_ns
    row = connection.execute(select(LEASES).where(LEASES.c.name == lease.name)).first()
    return row is not None and row.holder == lease.holder and row.token == lease.token and row.until_wall_ns > now


def forget(store: Store, before_wall_ns: int) -> int:
    """Delete leases that ran out before a moment; returns how many."""
    with store.write() as connection:
        return connection.execute(delete(LEASES).where(LEASES.c.until_wall_ns < before_wall_ns)).rowcount
