"""`run.json`: what was run and how it ended, written by whoever ran it.

One JSON object: `argv` (list of strings), `exit` (whole number; negative for the signal that ended it; null when nobody
saw), optional `labels` (object). Anything else in it is kept as it is. In: bytes. Out: `RunJson` and what was wrong.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import Any

from bmoe_proto.contract import text

SHORT = {"-m": "--model", "-p": "--prompt", "-n": "--n-predict", "-t": "--threads", "-c": "--ctx-size"}


@dataclass(slots=True)
class RunJson:
    """What a run.json says; `found` is all of it."""

    argv: list[str] | None = None
    exit_code: int | None = None
    signal: int | None = None
    labels: dict[str, str] = field(default_factory=dict)
    found: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def exit_observed(self) -> bool:
        """Whether somebody saw how it ended."""
        return self.exit_code is not None or self.signal is not None

    def flag(self, name: str) -> str | None:
        """The value of a flag in argv, by its long name; the last one stands, as in the engine."""
        value: str | None = None
        argv = self.argv or []
        for at, word in enumerate(argv):
            head, equals, rest = word.partition("=")
            if SHORT.get(head, head) != name:
                continue
            if equals:
                value = rest
            elif at + 1 < len(argv):
                value = argv[at + 1]
        return value

    @property
    def engine(self) -> str | None:
        """Name of the program."""
        return os.path.basename(self.argv[0]) if self.argv else None


def parse(data: bytes) -> RunJson:
    """Read a run.json; what is wrong in it is told in `problems` and stops nothing."""
    run = RunJson()
    try:
        found = json.loads(text.to_utf8(data)[0])
    except (ValueError, RecursionError) as error:
        run.problems.append(f"no JSON: {error}")
        return run
    if not isinstance(found, dict):
        run.problems.append("no JSON object")
        return run
    run.found = found
    argv = found.get("argv")
    if isinstance(argv, list):
        run.argv = [word if isinstance(word, str) else json.dumps(word) for word in argv]
    elif argv is not None:
        run.problems.append("argv is no list")
    code = found.get("exit")
    if isinstance(code, int) and not isinstance(code, bool):
        if code < 0:
            run.signal = -code
        else:
            run.exit_code = code
    elif code is not None:
        run.problems.append(f"exit is no whole number: {code!r}")
    told = found.get("labels")
    if isinstance(told, dict):
        run.labels = {str(key): value if isinstance(value, str) else json.dumps(value) for key, value in told.items()}
    elif told is not None:
        run.problems.append("labels is no object")
    return run
