"""`bmoe watch`: all phones, live: what each does, its rate, temperature, memory, backlog, and when it was last heard.

Every phone is asked for its status over a connection of its own, every five seconds unless told otherwise; one that
does not answer is shown with its state and the last that was known.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import typer
from bmoe_proto import calls, kernel
from bmoe_proto.v1 import telemetry_pb2 as pb

from bmoe_collector.commands.devices import look
from bmoe_collector.commands.pairing import reach_for
from bmoe_collector.common import DbOption, JsonOption, UserError, emit, open_db
from bmoe_collector.fleet import names
from bmoe_collector.host import HostHome
from bmoe_collector.reach.adb import AdbError
from bmoe_collector.reach.routes import Reach, best_routes
from bmoe_collector.reach.states import state_of


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("watch")(watch)


def watch(
    every: Annotated[float, typer.Option(help="Seconds between two looks.")] = 5.0,
    once: Annotated[bool, typer.Option("--once", help="Look once.")] = False,
    device: Annotated[list[str] | None, typer.Option("--device", "-d", help="Also local:SOCKET.")] = None,
    json: JsonOption = False,
    db: DbOption = None,
) -> None:
    """Show all phones, live. With --json one object a look."""
    if every < 1:
        raise UserError("--every: at least one second; a phone that is measured should be left alone")
    store, host = open_db(db), HostHome()
    called = names.called(store)
    with reach_for(host, store.store_id, device or []) as reach, _Watcher(reach, called) as watcher:
        if json or once or not sys.stdout.isatty():
            while True:
                now = watcher.look(look(store, host, reach) if once else None)
                if json:
                    emit({"wall_s": time.time(), "phones": now})
                else:
                    _print(now)
                if once:
                    return
                time.sleep(every)
        from rich.console import Console
        from rich.live import Live

        out = Console()
        with Live(console=out, screen=True, auto_refresh=False) as live:
            while True:
                live.update(_table(watcher.look(None), out.width), refresh=True)
                time.sleep(every)


class _Watcher:
    """Keeps one connection a phone open between looks."""

    def __init__(self, reach: Reach, called: Mapping[str, str]) -> None:
        """`called` are names of phones by uuid, for those that are away."""
        self._reach = reach
        self._called = called
        self._clients: dict[bytes, calls.AgentClient] = {}
        self._known: dict[bytes, dict[str, Any]] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> _Watcher:
        return self

    def __exit__(self, *_: object) -> None:
        for client in self._clients.values():
            client.close()

    def look(self, first: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
        """What every phone says now; `first` adds what only a full look shows (phones without an agent)."""
        try:
            sightings = self._reach.sightings()
        except AdbError:
            sightings = []
        routes = best_routes(sightings)
        paired = [phone.uuid for phone in self._reach.host.phones()]
        with ThreadPoolExecutor(max(1, min(16, len(paired))), "watch") as pool:
            now = list(pool.map(lambda uuid: self._ask(uuid, routes.get(uuid, [])), paired))
        now.extend(
            {"phone": None, "name": None, "where": line["places"][0], "state": line["state"]}
            for line in first or []
            if line["uuid"] is None
        )
        return now

    def _ask(self, uuid: bytes, ways: list[Any]) -> dict[str, Any]:
        name = self._called.get(uuid.hex())
        known = self._known.get(uuid, {"phone": uuid.hex(), "name": name, "where": None, "last_heard_wall_s": None})
        if not ways:
            return {**known, "state": "away"}
        state = "away"
        for _ in range(2):  # a kept connection may be dead: then a new one
            client = self._clients.get(uuid)
            try:
                if client is None:
                    client = self._clients[uuid] = self._reach.open(ways[0])
                line = {**line_of(client.status()), "phone": uuid.hex(), "where": ways[0].where, "state": "ready"}
                line["last_heard_wall_s"] = time.time()
                self._known[uuid] = line
                return line
            except Exception as error:
                state = state_of(error)[0]
                with self._lock:
                    dead = self._clients.pop(uuid, None)
                if dead is not None:
                    with contextlib.suppress(Exception):
                        dead.close()
        return {**known, "state": state}


def line_of(status: pb.StatusReply) -> dict[str, Any]:
    """The row of one phone; what could not be read is None."""
    values = values_of(status.sample) if status.HasField("sample") else {}
    available = values.get("mem_available_kib")
    return {
        "name": status.device.name,
        "doing": status.state,
        "plan": status.plan_name or None,
        "cell": status.cell or None,
        "cell_index": status.cell_index if status.cells else None,
        "cells": status.cells or None,
        "tokens": status.tokens if status.run_id else None,
        "tok_s": status.tok_s if status.HasField("tok_s") else None,
        "temp_c": values.get("cpu_temp_c"),
        "mem_available_mib": available / 1024 if isinstance(available, int | float) else None,
        "backlog_bytes": status.backlog_bytes,
        "free_bytes": status.free_bytes,
    }


def values_of(sample: pb.Sample) -> Mapping[str, Any]:
    """Kernel values of a status' sample by name; nothing when it cannot be read."""
    with contextlib.suppress(Exception):  # a sample of another version must not blank the whole table
        return kernel.sample_values(sample.text).values
    return {}


NO_PHONE = "no phone is paired with this host: `bmoe pair`; `bmoe devices` shows what adb sees"
WIDE = 110  # columns from which there is room for where each phone was reached
_NUMBERS = ("tokens", "tok/s", "°C", "free RAM", "backlog", "heard")


def _table(phones: list[dict[str, Any]], width: int) -> Any:
    """All phones, a line each. Numbers are never cut, names fold."""
    from rich.table import Table
    from rich.text import Text

    from bmoe_collector.show import words
    from bmoe_collector.show.safe import escape

    if not phones:
        return Text(NO_PHONE)
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("phone", *(("at",) if width >= WIDE else ()), "state", "doing", "cell", *_NUMBERS):
        number = name in _NUMBERS
        table.add_column(name, justify="right" if number else "left", no_wrap=name != "cell", overflow="fold")
    for phone in phones:
        cell = phone.get("cell")
        place = f"{cell} {(phone.get('cell_index') or 0) + 1}/{phone.get('cells')}" if cell else "–"
        heard = phone.get("last_heard_wall_s")
        cells = [
            phone.get("name") or (phone.get("phone") or "–")[:12],
            *([phone.get("where") or "–"] if width >= WIDE else []),
            phone["state"],
            phone.get("doing") or "–",
            place,
            _shown(phone.get("tokens"), "{:d}"),
            _shown(phone.get("tok_s"), "{:.2f}"),
            _shown(phone.get("temp_c"), "{:.0f}"),
            words.mib(phone.get("mem_available_mib")),
            words.size(phone.get("backlog_bytes")),
            "–" if heard is None else f"{max(0.0, time.time() - heard):.0f} s ago",
        ]
        table.add_row(*(Text(escape(text)) for text in cells))
    return table


def _print(phones: list[dict[str, Any]]) -> None:
    from bmoe_collector.show.console import console

    out = console()
    out.print(_table(phones, out.width))
    sys.stdout.flush()


def _shown(value: Any, form: str) -> str:
    return "–" if value is None else form.format(value)
