"""One answer of the doctor: what was looked at, how it stands (`ok`, `warn`, `fail`, `unknown`), what was seen, what to type."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

OK, WARN, FAIL, UNKNOWN = "ok", "warn", "fail", "unknown"


@dataclass(frozen=True, slots=True)
class Check:
    """One answer. `fix` are commands to type as they are, or a sentence that begins with "or"/"on the phone"."""

    name: str
    state: str
    seen: str
    fix: Sequence[str] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """As `--json` shows it."""
        return {"name": self.name, "state": self.state, "seen": self.seen, "fix": list(self.fix)}
