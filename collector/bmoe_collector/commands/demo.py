"""`bmoe demo`: one benchmark end to end on this machine, through the same code as a phone.

A temporary agent is made with `bmoe-agent init` and started with `bmoe-agent serve`, the benchmark is submitted to it,
its record is drained into the database and shown. The engine is the stand-in, or a real one: BMOE_CLI=/path with
BMOE_MODEL=/path.gguf. However it ends, nothing keeps running and the temporary home is removed; the run stays stored.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from bmoe_proto import calls

from bmoe_collector.commands import run as running
from bmoe_collector.common import (
    EXIT_NO,
    DbOption,
    JsonOption,
    OutsideError,
    UserError,
    emit,
    open_db,
    open_ingestor,
    say,
)
from bmoe_collector.fleet import follow
from bmoe_collector.fleet.collector import Collector
from bmoe_collector.fleet.single import Single, plan_of, split_flags
from bmoe_collector.host import HostHome, PairedPhone
from bmoe_collector.reach.routes import LOCAL, Reach
from bmoe_collector.store.engine import Store

PROMPT = "Explain in a few sentences why a Mixture-of-Experts model can be bigger than a phone's memory."
STREAMING = ["--moe-stream --cache-mb 8 --force-cache"]
"""What the stand-in is run with unless told otherwise: the configuration people measure most."""
START_S = 60.0
STORE_S = 20.0


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("demo")(demo)


def demo(
    flags: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ENGINE FLAGS]", help="Flags for the engine.")
    ] = None,
    n_predict: Annotated[int, typer.Option("-n", min=1, help="Tokens to generate.")] = 64,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="What to ask.")] = PROMPT,
    json: JsonOption = False,
    db: DbOption = None,
) -> None:
    """Run one benchmark end to end on this machine, store it, show it. Exit 1 when the run is not ok."""
    engine, model = _engine()
    store = open_db(db)
    with _interruptible(), contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bmoe-demo-", ignore_cleanup_errors=True)))
        simulated = engine is None
        if simulated:
            engine = _program("bmoe-sim")
            model = folder / "models" / "demo.gguf"
            model.parent.mkdir()
            _run([str(engine), "--make-model", str(model)])
        assert engine is not None
        assert model is not None
        home = folder / "agent"
        say(f"engine {engine}, model {model}")
        agent = [str(_program("bmoe-agent")), "--home", str(home)]
        _run([agent[0], "init", *agent[1:], "--engine", str(engine), "--models", str(model.parent), "--name", "demo"])
        uuid = bytes.fromhex((home / "uuid").read_text().strip())
        secret = bytes.fromhex((home / "secret").read_text().strip())
        socket = f"bmoe-agent-{uuid.hex()[:12]}"
        host = HostHome(folder / "host")
        host.remember(PairedPhone(uuid, secret, socket))
        stack.enter_context(_serving([agent[0], "serve", *agent[1:]], folder, socket))
        reach = stack.enter_context(Reach(host, bytes.fromhex(store.store_id), local=[socket], use_adb=False))
        with contextlib.closing(reach.open(reach.sightings()[0])) as client:
            client.rotate(keep_for_store=bytes.fromhex(store.store_id))
        plan = plan_of(
            Single(
                model=model.name,
                prompts=[prompt.encode()],
                n_predict=n_predict,
                flags=split_flags(STREAMING if simulated and not flags else [], flags or []),
                labels=["made_by=demo"],
                name="demo",
                environment=["BMOE_SIM=tok_s=40,load_s=0.5,prefill_s=0.3"] if simulated else [],
            )
        )
        try:
            outcome = running.submit_and_follow(
                store, host, reach, plan, devices=[LOCAL + socket], quiet=json, goes_on=False
            )
        except BaseException:
            _cancel(reach)
            _store_what_there_is(store, reach, plan.plan_id)
            raise
    if json:
        emit({"run": outcome["run"]})
    else:
        running.show(store, outcome, db)
    store.close()
    if not outcome["ok"]:
        raise typer.Exit(EXIT_NO)


def _engine() -> tuple[Path | None, Path | None]:
    """The real engine and model of the environment, or none of both."""
    cli, gguf = os.environ.get("BMOE_CLI"), os.environ.get("BMOE_MODEL")
    if not cli and not gguf:
        return None, None
    if not cli or not gguf:
        raise UserError("BMOE_CLI and BMOE_MODEL go together: the engine's path and the model's")
    engine, model = Path(cli).expanduser().absolute(), Path(gguf).expanduser().absolute()
    for path, what in ((engine, "BMOE_CLI"), (model, "BMOE_MODEL")):
        if not path.is_file():
            raise UserError(f"{what}={path}: no such file")
    return engine, model


def _program(name: str) -> Path:
    """One of our own programs: beside this Python, else on the path."""
    beside = Path(sys.executable).parent / name
    found = beside if beside.exists() else shutil.which(name)
    if found is None:
        raise OutsideError(f"{name} is not installed beside {sys.executable} nor on the path")
    return Path(found)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise OutsideError(f"{' '.join(command)}: exit {done.returncode}: {(done.stderr or done.stdout).strip()}")


@contextlib.contextmanager
def _serving(command: list[str], folder: Path, socket: str) -> Iterator[None]:
    """The agent, from its socket's appearing to its end and the end of all it started."""
    log = folder / "agent.log"
    with log.open("wb") as out:
        # a session of its own: Ctrl-C here is for us, and we end it in order
        process = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        deadline = time.monotonic() + START_S
        while f"@{socket}\n" not in Path("/proc/net/unix").read_text(encoding="utf-8", errors="replace"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise OutsideError(f"the agent did not start: {log.read_text(errors='replace')[-2000:].strip()}")
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        _end_leftovers(folder)


def _end_leftovers(folder: Path) -> None:
    """Kill what still names the temporary home in its argv: an engine whose agent had to be killed."""
    mark = os.fsencode(f"{folder}/")
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            with contextlib.suppress(OSError):
                if mark in Path(f"/proc/{entry}/cmdline").read_bytes():
                    os.kill(int(entry), signal.SIGKILL)


def _cancel(reach: Reach) -> None:
    """Have the agent end its engine before it is ended itself."""
    with contextlib.suppress(calls.CallError, OSError), contextlib.closing(reach.open(reach.sightings()[0])) as client:
        client.cancel()
        deadline = time.monotonic() + 10
        while client.status().run_id and time.monotonic() < deadline:
            time.sleep(0.1)


def _store_what_there_is(store: Store, reach: Reach, plan_id: str) -> None:
    """Bring the end of the run that was cut short, so that what is stored of it says how it ended."""
    collector = Collector(store, open_ingestor(store), reach)
    late = threading.Timer(STORE_S, collector.stop)
    late.start()
    try:
        collector.run(collector.idle)
    finally:
        late.cancel()
    for cell in follow.cells(store, plan_id):
        say(f"run {cell.run_id[:12]} is stored as it ended: {cell.outcome}, {cell.tokens} tokens")


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM ends the demo as Ctrl-C does."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
