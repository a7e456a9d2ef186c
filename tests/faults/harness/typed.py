"""What is typed on the host before anything goes wrong: `bmoe` commands, one after the other in one process.

In: commands. Out: what they print and their codes, as of the command that is installed; what they import is imported once. As a
program it answers a line of JSON on stdin, {"arguments": [...], "stdin": TEXT}, with {"code": N, "stdout": TEXT, "stderr": TEXT}.
"""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


class Typed:
    """The process, from the start to `close`."""

    def __init__(self, env: Mapping[str, str], log: Path) -> None:
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, __file__],
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )

    def __call__(self, *arguments: str, stdin: str = "") -> str:
        """Run one command to its end; what it prints. Raises AssertionError when its code is not 0."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"arguments": arguments, "stdin": stdin}) + "\n")
        self._process.stdin.flush()
        said = json.loads(self._process.stdout.readline())
        assert said["code"] == 0, f"bmoe {arguments}: {said}"
        return str(said["stdout"])

    def close(self) -> None:
        """No more commands."""
        self._process.kill()
        self._process.communicate()


def _run(arguments: list[str], stdin: str) -> dict[str, int | str]:
    from bmoe_collector.cli import main

    out, err = io.StringIO(), io.StringIO()
    sys.stdin = io.StringIO(stdin)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    return {"code": code, "stdout": out.getvalue(), "stderr": err.getvalue()}


def _answer() -> None:
    import bmoe_collector.commands.pairing
    import bmoe_collector.commands.run  # noqa: F401 - before they are asked for

    for line in sys.stdin:
        print(json.dumps(_run(**json.loads(line))), flush=True)


if __name__ == "__main__":
    _answer()
