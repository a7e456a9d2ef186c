"""What an action is: a fault of `schedule.KINDS` done to a world, and how it is taken back.

In: a world and a step. Out: nothing, or what must be called when the step's time is over. Doing one never fails because
the part is not there (another fault may have been quicker); what it did is what counts.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from faults.harness.schedule import Step
from faults.harness.world import World

Undo = Callable[[], None]
Action = Callable[[World, Step], Undo | None]
ALL: dict[str, Action] = {}


def action(function: Action) -> Action:
    """Make a function the action of its name."""
    ALL[function.__name__] = function
    return function


def send(pid: int, number: int) -> None:
    """A signal for a process that may be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
