"""What a plan asks of the host before a cell: apps stopped, the screen kept on. Requests, and what came of them in words.

In: what the cell asks, answers of the loop on the phone. Out: `Done`s for the record. The screen is given back by the loop
itself when it ends, so also when the link goes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from bmoe_proto.v1 import telemetry_pb2 as pb

from bmoe_collector.probe.frames import Frame, refusal
from bmoe_collector.probe.script import command

_PACKAGE = re.compile(r"^[A-Za-z][A-Za-z0-9_]*(\.[A-Za-z0-9_]+)+$")
TOLD = ("battery_pct", "charging", "screen_on", "cpu_temp_c", "awake", "battery_temp_c", "thermal_status")
"""Values the agent is told; it believes them for a minute."""
_OURS = "com.termux"


class Teller(Protocol):
    """What of the agent's client is used."""

    def tell(self, run_id: bytes, note: pb.Note) -> bool:
        """Keep a note."""


Ask = Callable[[Sequence[tuple[str, str]]], list[Frame]]


@dataclass(frozen=True, slots=True)
class Done:
    """One wish of a plan and what came of it; `code` is what the agent waits for."""

    code: str
    done: bool
    text: str
    facts: dict[str, Any] = field(default_factory=dict)


def announce(client: Teller) -> None:
    """Tell the agent that a host is here that prepares cells, so that the first one waits for it."""
    tell_values(client, {})


def tell_values(client: Teller, values: Mapping[str, Any]) -> None:
    """Tell the agent what its gates and its watchdog may ask, and that somebody looks."""
    facts = {name: values[name] for name in TOLD if values.get(name) is not None}
    text = json.dumps({**facts, "host_probe": True, "source": "host"})
    client.tell(b"", pb.Note(code="host_values", text="told by a host", facts_json=text))


def stop_apps(names: Sequence[str], ask: Ask) -> Done:
    """`am force-stop` for each. The agent's own app is refused, and so is what is no package's name."""
    said: dict[str, str] = {}
    wanted = []
    for name in dict.fromkeys(names):
        if not _PACKAGE.match(name):
            said[name] = "not a package's name"
        elif name == _OURS or name.startswith(_OURS + "."):
            said[name] = "is the agent's own app"
        else:
            wanted.append(name)
    answers = ask([("do", command("am", "force-stop", name)) for name in wanted]) if wanted else []
    for name, frame in zip(wanted, answers, strict=True):
        said[name] = failure(frame) or "stopped"
    failed = {name: what for name, what in said.items() if what != "stopped"}
    text = ", ".join(f"{name}: {what}" for name, what in said.items())
    return Done("stop_apps", not failed, text, {"apps": said})


def screen(on: bool, ask: Ask, *, asleep: bool = False) -> Done:
    """Keep the screen on, or give it back as it was."""
    words = f"on {'asleep' if asleep else 'awake'}" if on else "off"
    frame = ask([("screen", words)])[0]
    failed = failure(frame)
    text = failed or ("kept on while the phone is fed and this host is connected" if on else "as it was before")
    return Done("screen_on", not failed, text, {"on": on})


def failure(frame: Frame) -> str:
    """Why a command did not do what it should; empty when it did. Android's commands may fail with status 0."""
    said = frame.data.decode("utf-8", "replace").strip()
    if frame.status:
        return refusal(said) if said else f"ended with {frame.status}"
    bad = re.search(r"(?im)^.*(error|exception|denial|denied|failure|unknown command).*$", said)
    return bad[0].strip()[:200] if bad else ""
