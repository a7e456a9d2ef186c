"""Who writes next: one writer at a time, first come first served, and small transactions of many threads committed as one.

An SQLite database has one writer, and waiting for it in SQLite is polling: with many threads some wait for long. So the
threads of a process queue here first; among processes SQLite decides. What makes a commit dear is the sync to the disk:
`Together` has the thread whose turn it is do the work of all that wait, and commit once. A server has many writers and
joins commits by itself: there every work is a transaction of its own, and the queue keeps a process from taking all of its
connections.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

T = TypeVar("T")
LONGEST_S = 0.25
"""How long others are taken in before a commit: what it costs is in no proportion any more, and they wait for their answers."""


class Turn:
    """Some places that are handed on in the order of asking."""

    def __init__(self, places: int = 1) -> None:
        """With one place it is a lock."""
        self._lock = threading.Lock()
        self._free = places
        self._waiting: deque[threading.Lock] = deque()
        self._urgent: deque[threading.Lock] = deque()

    @contextlib.contextmanager
    def taken(self, *, urgent: bool = False) -> Iterator[None]:
        """Wait for a place, `urgent` ones before all others, and have it until the end of a `with`."""
        mine: threading.Lock | None = None
        with self._lock:
            if self._free:
                self._free -= 1
            else:
                mine = threading.Lock()
                mine.acquire()
                (self._urgent if urgent else self._waiting).append(mine)
        try:
            if mine is not None:
                mine.acquire()
            yield
        finally:
            self._give_back(mine)

    def _give_back(self, mine: threading.Lock | None) -> None:
        """Hand a place on; who was interrupted while it waited (Ctrl-C) has none, and waits no more."""
        with self._lock:
            for queue in (self._urgent, self._waiting):
                if mine is not None and mine in queue:
                    queue.remove(mine)
                    return
            waiting = self._urgent or self._waiting
            if waiting:
                waiting.popleft().release()
            else:
                self._free += 1


@dataclass(slots=True)
class _Asked:
    """Work of one thread."""

    work: Callable[[Connection], Any]
    told: threading.Event = field(default_factory=threading.Event)
    leads: bool = False  # its thread is woken to do the next transaction, not because its work is done
    result: Any = None
    error: BaseException | None = None


class Together:
    """Runs work of many threads in few transactions, each as if it were alone: what one raises undoes only that one's."""

    def __init__(self, begin: Callable[[], contextlib.AbstractContextManager[Connection]], *, alone: bool) -> None:
        """`begin` opens a transaction that commits at its end; with `alone` every work gets one of its own."""
        self._begin = begin
        self._alone = alone
        self._lock = threading.Lock()
        self._waiting: deque[_Asked] = deque()
        self._led = False  # some thread is doing, or woken to do, the next transaction

    def run(self, work: Callable[[Connection], T]) -> T:
        """Do `work` in a transaction; when this returns it is committed. Raises what it raises, or what the commit does."""
        if self._alone:
            with self._begin() as connection:
                return work(connection)
        asked = _Asked(work)
        with self._lock:
            self._waiting.append(asked)
            asked.leads, self._led = not self._led, True
        if not asked.leads:
            asked.told.wait()
        if asked.leads:
            self._lead(asked)
        if asked.error is not None:
            raise asked.error
        result: T = asked.result
        return result

    def _lead(self, own: _Asked) -> None:
        """One transaction, with this thread's own work in it; then somebody who waits does the next."""
        done: list[_Asked] = []
        try:
            with self._begin() as connection:
                for asked in self._until_late():
                    done.append(asked)
                    _safely(connection, asked)
        except BaseException as error:
            # nothing of it is committed, whatever each had found
            for asked in done or [own]:
                asked.error, asked.result = error, None
        with self._lock:
            if own in self._waiting:  # not even begun
                self._waiting.remove(own)
            if self._waiting:
                self._waiting[0].leads = True
                self._waiting[0].told.set()
            else:
                self._led = False
        for asked in done:
            if asked is not own:
                asked.leads = False
                asked.told.set()

    def _until_late(self) -> Iterator[_Asked]:
        late = time.monotonic() + LONGEST_S
        while True:
            with self._lock:
                if not self._waiting:
                    return
                asked = self._waiting.popleft()
            yield asked
            if time.monotonic() > late:
                return


def _safely(connection: Connection, asked: _Asked) -> None:
    """Do one work so that what it raises leaves the others' standing."""
    connection.exec_driver_sql("SAVEPOINT one")
    try:
        asked.result = asked.work(connection)
    except Exception as error:
        asked.error = error
        try:
            connection.exec_driver_sql("ROLLBACK TO one")
        except DBAPIError:  # the database has undone all of it by itself, for want of space say
            raise error from None
    connection.exec_driver_sql("RELEASE one")
