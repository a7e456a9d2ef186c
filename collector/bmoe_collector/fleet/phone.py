"""What is known of one phone at this moment: filled by its drainer, read by `bmoe watch`, metrics and `bmoe run`."""

from __future__ import annotations

import threading
import time
from dataclasses import asdict, dataclass, field, replace
from typing import Any

AWAY = frozenset({"away", "no_agent", "offline", "unauthorized", "silent"})
"""States in which there is no way to the phone's agent, when no attempt to take one has failed."""


@dataclass(frozen=True, slots=True)
class PhoneNow:
    """One moment of a phone. Times are this host's."""

    uuid: str
    name: str = ""
    where: str = ""
    state: str = "new"  # bmoe_collector.reach.states.ADVICE
    detail: str = ""
    doing: str = ""  # the agent's own state: "idle", "measuring", ...
    backlog_bytes: int | None = None
    drained: bool = False
    held_alive: bool = False  # another collector holds it and was seen to renew its lease
    last_heard_wall_s: float | None = None
    batches: int = 0
    bytes: int = 0
    runs_ended: int = 0
    artifacts: int = 0
    reconnects: int = 0
    failures: int = 0  # in a row, since it last answered
    problems: tuple[str, ...] = field(default=())

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class PhoneBoard:
    """All phones' `PhoneNow`; every change wakes whoever waits."""

    def __init__(self) -> None:
        """Empty."""
        self._phones: dict[bytes, PhoneNow] = {}
        self._changed = threading.Condition()

    def get(self, uuid: bytes) -> PhoneNow:
        """What is known of one phone."""
        with self._changed:
            return self._phones.get(uuid) or PhoneNow(uuid.hex())

    def all(self) -> list[PhoneNow]:
        """What is known of all."""
        with self._changed:
            return sorted(self._phones.values(), key=lambda phone: (phone.name, phone.uuid))

    def update(self, uuid: bytes, **changes: Any) -> PhoneNow:
        """Replace fields of a phone."""
        with self._changed:
            before = self._phones.get(uuid) or PhoneNow(uuid.hex())
            after = replace(before, **changes)
            self._phones[uuid] = after
            if after != before:
                self._changed.notify_all()
            return after

    def heard(self, uuid: bytes, **changes: Any) -> PhoneNow:
        """Like `update`, after something came from the phone."""
        return self.update(uuid, last_heard_wall_s=time.time(), **changes)

    def add(self, uuid: bytes, **counts: int) -> None:
        """Count up."""
        with self._changed:
            before = self._phones.get(uuid) or PhoneNow(uuid.hex())
            sums = {name: getattr(before, name) + more for name, more in counts.items()}
            self._phones[uuid] = replace(before, **sums)
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> None:
        """Return when something changed, or after a while."""
        with self._changed:
            self._changed.wait(timeout_s)
