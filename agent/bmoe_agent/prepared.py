"""What a cell asks of a host before it runs (apps stopped, the screen kept on), and whether a host said that it was done.

In: the open run and what hosts have told. Out: a note for each wish. A host learns of the wishes from the run's own start, which is on
its way to it already: the agent waits for its word, but only when a host that looks after this phone spoke within the last minute, and not long.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from bmoe_proto.v1 import telemetry_pb2 as pb

from bmoe_agent.runner_live import Live

WAIT_S = 20.0
_LOOK_S = 0.25


def wait_for_hosts(live: Live, check: Callable[[], None], wait_s: float = WAIT_S) -> None:
    """Wait for the host's word on each wish, and put wishes and words on record. `check` may raise to end the waiting."""
    cell, context = live.cell, live.context
    wishes: dict[str, Any] = {"stop_apps": list(cell.stop_apps), "screen_on": cell.screen_on}
    wishes = {name: value for name, value in wishes.items() if value}
    if not wishes:
        return
    here = context.gates.told.heard_within(context.clock.boot_ns())
    deadline = time.monotonic() + (wait_s if here else 0.0)
    while True:
        said = {name: facts for name in wishes if (facts := _said(context.told.get(name), live.run_id)) is not None}
        left = deadline - time.monotonic()
        if len(said) == len(wishes) or left <= 0:
            break
        check()
        context.pause(min(left, _LOOK_S))
    for name, value in wishes.items():
        facts = said.get(name)
        if facts is None:
            why = f"no host said within {wait_s:g} s that it was done" if here else "no host is connected"
            live.note(name, f"asked for, and {why}", {"asked": value, "done": False})
        else:
            live.note(name, context.told[name].text, {"asked": value, "done": bool(facts.get("done"))})


def _said(note: pb.Note | None, run_id: bytes) -> dict[str, Any] | None:
    """The facts of a note about this run; None for one about another, or none."""
    if note is None:
        return None
    try:
        facts = json.loads(note.facts_json or "{}")
    except (ValueError, RecursionError):
        return None
    return facts if isinstance(facts, dict) and facts.get("run_id") == run_id.hex() else None
