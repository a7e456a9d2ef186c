"""Leases: which collector drains which phone, so that several hosts can share one database.

In: the store, a name (a phone's uuid) and who asks. Out: a `Lease` or None. A lease runs out by itself; its `token`
grows with every change of holder, so that one who was asleep can tell that the lease is no longer his. What depends on a
lease is committed together with `keep`, which fails when somebody else has it.

Hosts' clocks differ, so that on a server its own clock counts; an SQLite file is one host's, whose clock may be set.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

from sqlalchemy import Connection, bindparam, delete, insert, select, text, update
from sqlalchemy.exc import IntegrityError

from bmoe_collector.store.engine import Store, wall_ns
from bmoe_collector.store.schema import LEASES

NS_PER_S = 1_000_000_000
CLOCK_WAS_SET_S = 120.0
"""A lease that runs out later than this was taken before the clock was set back: it runs out as if it were taken now."""
BUSY_S = 2.0
"""How long to wait for a lease that somebody is committing under."""


_CLOCK = text("SELECT CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000000 AS bigint)")
_KEEP = update(LEASES).where(
    LEASES.c.name == bindparam("of"), LEASES.c.holder == bindparam("by"), LEASES.c.token == bindparam("with")
)


@dataclass(frozen=True, slots=True)
class Lease:
    """Held until `until_wall_ns` unless renewed."""

    name: str
    holder: str
    token: int
    until_wall_ns: int
    left_s: float = field(default=0.0, compare=False)  # of the moment it was looked at


def new_holder() -> str:
    """A name for this process: host, pid and a random part."""
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"


def acquire(store: Store, name: str, holder: str, seconds: float, now_ns: int | None = None) -> Lease | None:
    """Take or renew a lease; None when somebody else holds it.

    Raises DBAPIError when somebody's transaction has it for longer than `BUSY_S` (on a server).
    """
    try:
        with store.write(urgent=True) as connection:
            if store.dialect == "postgresql":
                connection.execute(text(f"SET LOCAL lock_timeout = {int(BUSY_S * 1000)}"))
            row = connection.execute(select(LEASES).where(LEASES.c.name == name).with_for_update()).first()
            now = _now(connection, now_ns)
            until = now + int(seconds * NS_PER_S)
            if row is None:
                connection.execute(insert(LEASES).values(name=name, holder=holder, token=1, until_wall_ns=until))
                return Lease(name, holder, 1, until, seconds)
            of_this = update(LEASES).where(LEASES.c.name == name)
            if row.holder != holder and row.until_wall_ns > now:
                if row.until_wall_ns > now + CLOCK_WAS_SET_S * NS_PER_S:
                    connection.execute(of_this.values(until_wall_ns=until))
                return None
            token = int(row.token) + (row.holder != holder)
            connection.execute(of_this.values(holder=holder, token=token, until_wall_ns=until))
            return Lease(name, holder, token, until, seconds)
    except IntegrityError:  # somebody inserted it between our look and our insert
        return None


def renew(store: Store, holder: str, names: Sequence[str], seconds: float, now_ns: int | None = None) -> set[str]:
    """Renew many that `holder` has taken, at once; the names of those that were renewed.

    Not those that somebody else has taken since, that were given back, or that a transaction has locked now (on a server).
    """
    if not names:
        return set()
    mine = select(LEASES.c.name).where(LEASES.c.name.in_(names), LEASES.c.holder == holder, LEASES.c.until_wall_ns > 0)
    with store.write(urgent=True) as connection:
        free = connection.execute(mine.with_for_update(skip_locked=True)).scalars().all()
        until = _now(connection, now_ns) + int(seconds * NS_PER_S)
        connection.execute(update(LEASES).where(LEASES.c.name.in_(free)).values(until_wall_ns=until))
    return set(free)


def holder_of(store: Store, name: str, now_ns: int | None = None) -> Lease | None:
    """Who holds it now."""
    with store.read() as connection:
        row = connection.execute(select(LEASES).where(LEASES.c.name == name)).first()
        now = _now(connection, now_ns)
    if row is None or row.until_wall_ns <= now:
        return None
    until = int(row.until_wall_ns)
    return Lease(row.name, row.holder, int(row.token), until, (until - now) / NS_PER_S)


def keep(connection: Connection, lease: Lease, seconds: float, now_ns: int | None = None) -> bool:
    """Renew a lease in the transaction whose writes depend on it; False when somebody else has taken it.

    After True nobody can take it before that transaction has ended: it should be the last that the transaction does.
    """
    until = _now(connection, now_ns) + int(seconds * NS_PER_S)
    ours = {"of": lease.name, "by": lease.holder, "with": lease.token}
    return connection.execute(_KEEP, {**ours, "until_wall_ns": until}).rowcount == 1


def _now(connection: Connection, now_ns: int | None) -> int:
    if now_ns is not None:
        return now_ns
    if connection.dialect.name == "postgresql":
        return int(connection.execute(_CLOCK).scalar_one()) * 1000
    return wall_ns()


def release(store: Store, lease: Lease) -> None:
    """Give it back; no effect when it is no longer ours. The row stays, so that the token keeps growing."""
    with store.write() as connection:
        connection.execute(
            update(LEASES)
            .where(LEASES.c.name == lease.name, LEASES.c.holder == lease.holder, LEASES.c.token == lease.token)
            .values(until_wall_ns=0)
        )


def forget(store: Store, before_wall_ns: int) -> int:
    """Delete leases that ran out before a moment; returns how many."""
    with store.write() as connection:
        return connection.execute(delete(LEASES).where(LEASES.c.until_wall_ns < before_wall_ns)).rowcount
