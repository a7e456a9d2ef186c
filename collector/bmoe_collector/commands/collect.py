"""`bmoe collect`: drain phones into the database, for months.

SIGTERM and Ctrl-C end it after what is being committed has been committed; a second one ends it at once. Being killed
at any other moment loses nothing either.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Annotated

import typer

from bmoe_collector.commands.pairing import reach_for
from bmoe_collector.common import DbOption, JsonOption, UserError, counted, emit, open_db, open_ingestor, say
from bmoe_collector.fleet import logs, metrics, names
from bmoe_collector.fleet.collector import Collector, given_up
from bmoe_collector.fleet.drainer import Timers
from bmoe_collector.host import HostHome
from bmoe_collector.reach.states import ADVICE


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("collect")(collect)


def collect(
    device: Annotated[
        list[str] | None, typer.Option("--device", "-d", help="Only this phone (name, uuid, serial, local:SOCKET).")
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="End when every phone in reach has sent what it has now.")
    ] = False,
    until_drained: Annotated[
        bool, typer.Option("--until-drained", help="End when every phone in reach is drained and runs nothing.")
    ] = False,
    port: Annotated[
        int | None,
        typer.Option("--metrics", metavar="PORT", min=1, max=65535, help="Serve Prometheus metrics on loopback."),
    ] = None,
    log: Annotated[str, typer.Option(help="Form of the log on stderr: text or json.")] = "text",
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more.")] = False,
    silence: Annotated[
        float, typer.Option(help="Seconds without a sign of life after which a phone is frozen.")
    ] = 12.0,
    lease: Annotated[float, typer.Option(help="Seconds after which another collector may take a phone over.")] = 20.0,
    json: JsonOption = False,
    db: DbOption = None,
) -> None:
    """Drain all paired phones into the database until stopped."""
    if log not in {"text", "json"}:
        raise UserError(f"--log {log}: text or json")
    if lease < 3 or silence < 1:
        raise UserError("--lease must be at least 3 and --silence at least 1 second")
    logs.set_up(log, verbose=verbose)
    words = device or []
    store, host = open_db(db), HostHome()
    with reach_for(host, store.store_id, words) as reach:
        only = [names.find_phone(store, host, word, reach.sightings()) for word in words] or None
        paired = bool(host.phones())
        if not paired:
            later = "" if once or until_drained else "; those paired later are drained too"
            say(f"no phone is paired with this host: `bmoe pair`{later}")
        timers = Timers(silence_s=silence, lease_s=lease, renew_s=lease / 3)
        collector = Collector(store, open_ingestor(store), reach, only=only, timers=timers)
        server = metrics.serve(collector.board, port) if port is not None else None
        until = collector.drained if once else collector.idle if until_drained else None
        try:
            with stopping(collector):
                collector.run(until)
        finally:
            if server is not None:
                server.shutdown()
                server.server_close()
    phones = collector.board.all()
    store.close()
    if json:
        emit({"phones": [phone.as_dict() for phone in phones]})
    for phone in phones if not json else ():
        ended = counted(phone.runs_ended, "run")
        say(f"{phone.name or phone.uuid[:12]}: {phone.state}, {phone.bytes:,} bytes, {ended} ended")
    if until is not None and paired and not phones:
        say("no paired phone was in reach: `bmoe devices` says why")
    failed = [phone for phone in phones if until is not None and given_up(phone)]
    for phone in failed:
        say(
            f"{phone.name or phone.uuid[:12]} was not drained: {phone.detail or phone.state}; {ADVICE.get(phone.state, '')}"
        )
    if failed:
        raise typer.Exit(3)


@contextlib.contextmanager
def stopping(collector: Collector) -> Iterator[None]:
    """SIGTERM and SIGINT stop the collector; the second SIGINT interrupts as usual."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        collector.stop()

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
