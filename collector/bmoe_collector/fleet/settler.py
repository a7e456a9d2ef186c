"""What follows a run's end, away from the drain: its streams become files, it is judged.

In: runs whose record or files grew after their end. Out: artifacts, facts and verdicts. One thread for all phones: what it
does can wait, what phones send cannot. A run that awaits files is given some seconds to get them, since judging it before
and after would be the same work twice. What fails is told and tried again, since the database may be away for a while; what a
process does not get to is found again by `Ingestor.unsettled`.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from bmoe_collector.ingest.ingestor import Ingestor, Unsettled

KEEP_READERS = 16
"""Most runs whose output is held meanwhile; that of others is read from the database again."""
TRIES = 3
"""After so many a run is not waited for any more, but still tried, every `RETRY_MOST_S`."""
RETRY_MOST_S = 60.0
STOP_S = 20.0
"""How long `stop` goes on with what waits."""


@dataclass(slots=True)
class _Waiting:
    run: Unsettled
    due: float  # monotonic
    tries: int = 0


class Settler(threading.Thread):
    """Settles runs in the order in which they fall due, until `stop`."""

    def __init__(
        self,
        ingestor: Ingestor,
        files_s: float,
        settled: Callable[[bytes], None],
        failed: Callable[[bytes, Exception, int], None] = lambda *_: None,
    ) -> None:
        """`files_s` is what a run is given to get its files. `settled` is called when nothing of a phone is pending,
        `failed` when something could not be done, with how often by now.
        """
        super().__init__(name="settle", daemon=True)
        self._ingestor = ingestor
        self._files_s = files_s
        self._settled = settled
        self._failed = failed
        self._changed = threading.Condition()
        self._waiting: dict[str, _Waiting] = {}
        self._of_phone: Counter[str] = Counter()
        self._until: float | None = None  # monotonic; set by `stop`

    def add(self, run: Unsettled) -> None:
        """Settle a run, soon or when its files had their time; one that waits already is settled once."""
        due = time.monotonic() + (self._files_s if run.awaits_files else 0.0)
        with self._changed:
            before = self._waiting.pop(run.run_id, None)
            if before is not None:
                self._count(before, -1)
                grew = run if run.grew else before.run
                run = replace(run, grew=grew.grew, reader=grew.reader)
            if sum(each.run.reader is not None for each in self._waiting.values()) >= KEEP_READERS:
                run = replace(run, reader=None)
            self._put(_Waiting(run, due))

    def pending(self, uuid: bytes) -> int:
        """How many runs of a phone are not settled yet."""
        with self._changed:
            return self._of_phone[uuid.hex()]

    def stop(self) -> None:
        """Settle what waits, for a while, and end."""
        with self._changed:
            self._until = time.monotonic() + STOP_S
            self._changed.notify_all()
        if self.is_alive():
            self.join()

    def run(self) -> None:
        """One after the other."""
        while (item := self._next()) is not None:
            uuid, done = bytes.fromhex(item.run.agent_uuid), True
            try:
                self._ingestor.settle(item.run)
            except Exception as error:
                # whatever it is, it must not keep other runs from being settled
                self._again(item)
                self._failed(uuid, error, item.tries + 1)
                done = False
            with self._changed:
                self._count(item, -1)
                last = not self._of_phone[item.run.agent_uuid]
            if done and last:
                self._settled(uuid)

    def _next(self) -> _Waiting | None:
        """Wait for one that is due; None when it is time to end."""
        with self._changed:
            while True:
                first = min(self._waiting.values(), key=lambda each: each.due, default=None)
                now = time.monotonic()
                if self._until is not None and (first is None or now > self._until):
                    return None
                if first is not None and (first.due <= now or self._until is not None):
                    return self._waiting.pop(first.run.run_id)
                self._changed.wait(None if first is None else first.due - now)

    def _again(self, item: _Waiting) -> None:
        """Wait longer each time; `stop` does not wait for it."""
        with self._changed:
            if self._until is None and item.run.run_id not in self._waiting:
                due = time.monotonic() + min(2.0**item.tries, RETRY_MOST_S)
                self._put(_Waiting(replace(item.run, reader=None), due, item.tries + 1))

    def _put(self, item: _Waiting) -> None:
        self._waiting[item.run.run_id] = item
        self._count(item, 1)
        self._changed.notify_all()

    def _count(self, item: _Waiting, change: int) -> None:
        """Under the lock: what is waited for."""
        if item.tries < TRIES:
            self._of_phone[item.run.agent_uuid] += change
