"""A phone's lease as its drainer has it: taken, kept with every commit, renewed meanwhile, given back.

In: the store. Out: whether the phone is ours now, and on the board why it is not. Time is this host's monotonic clock,
counted from before the database was asked, so that this host gives up before another one may begin.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection

from sqlalchemy import Connection

from bmoe_collector.fleet.phone import PhoneBoard
from bmoe_collector.fleet.trouble import LeaseLostError
from bmoe_collector.store import leases
from bmoe_collector.store.engine import Store, first_line

PATIENCE = 3
"""Attempts at a lease, some seconds apart, that count as one failure: a database that is restarted is back by then."""


class Tenure:
    """One phone's; `take` and what goes with a commit are its drainer's, `renew_all` is the collector's."""

    def __init__(
        self,
        uuid: bytes,
        store: Store,
        holder: str,
        lease_s: float,
        renew_s: float,
        board: PhoneBoard,
        warn: Callable[[str, str, str], None],
    ) -> None:
        """`warn` is told what happened, the state it makes and a sentence."""
        self.name = f"phone:{uuid.hex()}"
        self.lease_s = lease_s
        self._uuid = uuid
        self._store = store
        self._holder = holder
        self._renew_s = renew_s
        self._board = board
        self._warn = warn
        self._lease: leases.Lease | None = None
        self._other: leases.Lease | None = None  # somebody else's, as seen last
        self._until = 0.0  # ours only before it
        self._asked = 0.0  # when the last commit was about to renew it
        self._failures = 0
        self._changing = threading.Lock()  # what was just given back must not be taken again by who renews all

    def take(self) -> bool:
        """Take or renew it; False when somebody else has it, or the database cannot be asked and it ran out."""
        with self._changing:
            return self._take()

    def take_again(self) -> None:
        """Take it if it was not given back meanwhile."""
        with self._changing:
            if self._lease is not None:
                self._take()

    def _take(self) -> bool:
        asked = time.monotonic()
        try:
            lease = leases.acquire(self._store, self.name, self._holder, self.lease_s)
        except Exception as error:
            self.failed(error)
            return self.ours()
        self._failures = 0
        self._lease = lease
        if lease is None:
            held = leases.holder_of(self._store, self.name)
            # one who renews is alive; one who was killed lets it run out, and this host takes over
            alive = held is not None and self._other is not None and held != self._other
            self._other = held or self._other
            before = self._board.get(self._uuid)
            self._board.update(
                self._uuid,
                state="held",
                detail=held.holder if held else "",
                drained=False,
                held_alive=alive or (before.state == "held" and before.held_alive),
            )
            self._until = 0.0
            return False
        self._until = asked + self.lease_s
        return True

    def failed(self, error: Exception) -> None:
        """The database may be away for a while; without a lease nothing is drained."""
        said = first_line(error)
        self._failures += 1
        failures = self._failures // PATIENCE
        self._board.update(self._uuid, state="database", detail=said, drained=False, failures=failures)
        self._warn("database", "database", said)

    def ours(self) -> bool:
        """Whether the phone may be drained now."""
        return self._lease is not None and time.monotonic() < self._until

    def until_free_s(self) -> float:
        """When to ask again for one that another host holds: when it runs out, and often enough to see it renewed."""
        often_s = min(3.0, self._renew_s)
        return often_s if self._other is None else min(often_s, max(self._other.left_s, 0.0) + 0.05)

    def keeping(self) -> Callable[[Connection], None]:
        """What a transaction that depends on the lease as it is now does last; raises LeaseLostError."""
        lease = self._lease if self.ours() else None
        if lease is None:
            raise LeaseLostError("the lease ran out while this host was busy or asleep")

        def keep(connection: Connection) -> None:
            self._asked = time.monotonic()
            if not leases.keep(connection, lease, self.lease_s):
                raise LeaseLostError("another host took the phone over while this one was busy or asleep")

        return keep

    def kept(self) -> None:
        """A transaction that ended with `keeping` was committed."""
        self._until = max(self._until, self._asked + self.lease_s)

    def due(self, share: float = 1.0) -> bool:
        """Whether it is ours and has not been renewed for (a share of) the time after which it should be."""
        since = time.monotonic() - (self._until - self.lease_s)
        return self._lease is not None and since > share * self._renew_s

    def renewed(self, asked: float) -> None:
        """It was renewed by somebody who began to ask at that moment."""
        self._failures = 0
        self._until = max(self._until, asked + self.lease_s)

    def give_back(self) -> None:
        """Let others have it at once."""
        with self._changing:
            lease, self._lease = self._lease, None
            if lease is not None:
                # when it cannot be given back it runs out by itself
                with contextlib.suppress(Exception):
                    leases.release(self._store, lease)


def renew_all(store: Store, holder: str, tenures: Collection[Tenure]) -> None:
    """Renew what is due, and with it what soon will be: one transaction for a shelf of phones, not one each."""
    if not any(tenure.due() for tenure in tenures):
        return
    due = [tenure for tenure in tenures if tenure.due(0.5)]
    asked = time.monotonic()
    try:
        kept = leases.renew(store, holder, [tenure.name for tenure in due], due[0].lease_s)
    except Exception as error:  # each phone is shown with it
        for tenure in due:
            tenure.failed(error)
        return
    for tenure in due:
        if tenure.name in kept:
            tenure.renewed(asked)
        else:
            tenure.take_again()  # somebody else has it, or it is being renewed by a commit
