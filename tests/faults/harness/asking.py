"""What a phone's agent says it does, asked again and again: `bmoe-agent status --json` without the start of a program each time.

In: a phone, its agent started or not. Out: what `status` says. A process of its own asks, inside the phone's network: as
`asking.py HOME` it answers every line on stdin with a line of JSON on stdout.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from faults.harness.world import FaultPhone


class Asker:
    """One phone's; `close` ends its process."""

    def __init__(self, phone: FaultPhone) -> None:
        self.phone = phone
        with phone.agent.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*phone.own_prefix, sys.executable, __file__, str(phone.agent.home)],
                env=phone.agent.env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def status(self) -> dict[str, Any]:
        """What the agent does now. An agent that does not answer has no plans; ValueError when the asking process is gone."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return dict(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        """No more questions."""
        self._process.kill()
        self._process.communicate()


def _answer(home: Path) -> None:
    from bmoe_agent.run_here import status

    for _ in sys.stdin:
        try:
            said = status(home)
        except Exception as error:  # whatever it is: it is asked again
            said = {"running": False, "why": str(error)}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    _answer(Path(sys.argv[1]))
