"""How long help takes, as whole processes, beside an interpreter that does nothing: imports are what it costs.

`bmoe --help` must answer in under 0.2 s. The agent's help is a ratio alone: on a phone, where an interpreter starts in its own
time, it is what a person and a start script wait for.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROUNDS = 15
SECONDS = 0.2
AGENT_TIMES = 10
BIN = Path(sys.executable).parent


def run() -> list[dict[str, Any]]:
    """The best of interleaved rounds of each."""
    commands = {
        "nothing": [sys.executable, "-c", "pass"],
        "bmoe": [BIN / "bmoe", "--help"],
        "agent": [BIN / "bmoe-agent", "--help"],
        "runs": [BIN / "bmoe", "runs", "--help"],
    }
    best = dict.fromkeys(commands, float("inf"))
    for _ in range(ROUNDS):
        for name, command in commands.items():
            began = time.perf_counter()
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
            best[name] = min(best[name], time.perf_counter() - began)
            if name != "nothing" and not done.stdout:
                raise AssertionError(f"{name} said nothing")
    nothing = best["nothing"]

    def row(what: str, value: float, limit: float, name: str) -> dict[str, Any]:
        return {
            "bench": "start",
            "what": what,
            "ratio": round(value, 3),
            "limit": limit,
            "ok": value <= limit,
            "detail": f"{best[name] * 1e3:.0f} ms, an interpreter that does nothing takes {nothing * 1e3:.0f} ms",
        }

    return [
        row("bmoe --help, seconds", best["bmoe"], SECONDS, "bmoe"),
        row("bmoe-agent --help / python -c pass", best["agent"] / nothing, AGENT_TIMES, "agent"),
        row("a command's own help (bmoe runs --help), seconds", best["runs"], 1.0, "runs"),
    ]


if __name__ == "__main__":
    print(*run(), sep="\n")
