"""One answer of the doctor, and how checks are run: in a list of functions, out their answers, whatever breaks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

OK, WARN, FAIL, UNKNOWN = "ok", "warn", "fail", "unknown"
STATES = (OK, WARN, FAIL, UNKNOWN)


@dataclass(frozen=True, slots=True)
class Check:
    """What was looked at, how it stands, what was seen, and what to type when it is not ok."""

    name: str
    state: str
    seen: str
    fix: Sequence[str] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """As `--json` shows it."""
        return {"name": self.name, "state": self.state, "seen": self.seen, "fix": list(self.fix)}


Looker = Callable[[], Iterable[Check]]


def run(lookers: Iterable[tuple[str, Looker]]) -> list[Check]:
    """Run every check. One that fails itself is `unknown` under its name: a doctor that falls over helps nobody."""
    found: list[Check] = []
    for name, look in lookers:
        try:
            found.extend(look())
        except Exception as problem:
            found.append(Check(name, UNKNOWN, f"this check failed itself: {type(problem).__name__}: {problem}"))
    return found
