"""One agent on one home: what the service asks of it (`serve/port.py`), its lock, its threads, its end.

In: a home directory. Out: `Supervisor`, and `open_context`. Two threads: the night's, which runs plans, and gRPC's own
small pool. `stop` (SIGTERM, SIGINT) ends the agent and not the engine: a running one-shot cell goes on and is adopted
when the agent is started again; a session's engine finishes the turn it is at and ends.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from bmoe_proto.v1 import telemetry_pb2 as pb

from bmoe_agent import __version__, config, device
from bmoe_agent.context import Clock, Context, boot_id, roots_here
from bmoe_agent.engine_facts import EngineFacts
from bmoe_agent.gates import Gates
from bmoe_agent.night import Night
from bmoe_agent.runner_live import log
from bmoe_agent.sampling import Sampler
from bmoe_agent.serve.port import Measuring, RefusedError
from bmoe_agent.serve.server import Server
from bmoe_agent.serve.service import AgentService
from bmoe_agent.spool import Spool, Who

READABLE_S = 60.0
KEPT_NOTES = 64  # by code, the newest of each; a host has a handful of codes


class SecondAgentError(Exception):
    """Another agent works on this home."""


class HomeLock:
    """One agent per home: a file lock that goes with the process, however it dies."""

    def __init__(self, home: Path) -> None:
        """Take it. Raises `SecondAgentError`, and `ConfigError` where there is no home or not one's own."""
        try:
            self._descriptor = os.open(home / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            raise config.ConfigError(f"{home}: no agent lives here: run bmoe-agent init") from None
        except OSError as error:
            raise config.ConfigError(f"{home / 'lock'}: {error.strerror}: whose home is it?") from None
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            pid = os.read(self._descriptor, 32).decode("ascii", "replace").strip()
            os.close(self._descriptor)
            raise SecondAgentError(
                f"{home}: an agent is running here already (process {pid or 'unknown'}): stop it first"
            ) from None
        os.ftruncate(self._descriptor, 0)
        os.write(self._descriptor, f"{os.getpid()}\n".encode())

    def release(self) -> None:
        """Give it back."""
        os.close(self._descriptor)


def open_context(home: Path) -> Context:
    """Read the home, open the spool. Raises `config.ConfigError`, `roots.TreeError`, `SpoolError`, OSError."""
    settings = config.load(home)
    roots = roots_here()
    clock = Clock(boot_id(roots))
    spool = Spool(
        home / "spool",
        settings.quota_bytes,
        who=Who(settings.uuid, clock.boot_id, __version__),
        kept_for=settings.kept_for_store,
    )
    facts = device.describe(roots, settings.uuid, settings.name, __version__)
    gates = Gates(roots, home)
    gates.sources.probe_ended = spool.wake  # readers that kept still go on
    return Context(settings, roots, clock, spool, gates, device=facts)


class Supervisor:
    """The agent behind the service, and the process around it."""

    def __init__(self, home: Path, *, serve: bool = True) -> None:
        """Take the home, open everything, begin nothing. Raises what the home's trouble raises."""
        self._lock = HomeLock(home)
        try:
            self.context = open_context(home)
        except BaseException:
            self._lock.release()
            raise
        settings = self.context.config
        self.night = Night(self.context)
        self._engine_facts = EngineFacts(self.context.home / "cache", self.context.stop.is_set)
        self._sampling = threading.Lock()
        self._sampler: Sampler | None = None
        self._readable_gates: tuple[list[str], dict[str, str]] = ([], {})
        self._readable_at = -READABLE_S
        self._thread: threading.Thread | None = None
        self._night_failed = False
        self._failed: Callable[[], object] = self.context.ask_to_stop
        self._server: Server | None = None
        if serve:
            service = AgentService(
                self.context.spool, self, agent_uuid=settings.uuid, agent_version=__version__, name=settings.socket
            )
            self._server = Server(service, settings.socket, tcp_port=settings.tcp_port)

    def __enter__(self) -> Self:
        """Start; `__exit__` stops."""
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Listen, then adopt and run. Raises `ServeError` when the socket cannot be had."""
        try:
            if self._server is not None:
                self._server.start(self.context.config.secret, self.context.config.uuid)
        except BaseException:
            self.context.spool.close()
            self._lock.release()
            raise
        self._thread = threading.Thread(target=self._night, name="night")
        self._thread.start()

    def run(self) -> int:
        """Serve until SIGTERM or SIGINT; the exit code."""
        # A handler may run while this thread holds any lock, so all it does is write a byte for this thread to read.
        ear, mouth = os.pipe2(os.O_CLOEXEC)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: os.write(mouth, b"!"))
        self._failed = lambda: os.write(mouth, b"!")
        self.start()
        settings = self.context.config
        print(
            f"agent {settings.uuid.hex()} ({settings.name}) serves on @{settings.socket}", file=sys.stderr, flush=True
        )
        os.read(ear, 1)
        return 3 if self.stop() else 0

    def stop(self) -> bool:
        """Stop everything; returns whether the night had failed."""
        self.context.ask_to_stop()
        if self._thread is not None:
            self._thread.join()
        if self._server is not None:
            self._server.stop()
        self._engine_facts.join()
        with self._sampling:
            if self._sampler is not None:
                self._sampler.close()
                self._sampler = None
        self.context.spool.close()
        self._lock.release()
        return self._night_failed

    def _night(self) -> None:
        try:
            self.night.run()
        except Exception:
            log.exception("the night's thread failed: the agent ends; the service that keeps it alive starts it again")
            self._night_failed = True
            self._failed()

    # ---------------------------------------------------------------- serve/port.py

    def submit(self, plan: pb.Plan) -> pb.SubmitReply:
        """Take a plan, or say why not."""
        return self.night.submit(plan)

    def cancel(self, plan_id: str, *, only_current_cell: bool) -> pb.CancelReply:
        """Cancel a plan or the cell it is at."""
        return self.night.cancel(plan_id, only_current_cell=only_current_cell)

    def listing(self) -> list[pb.PlanListing]:
        """The plans."""
        return self.night.listing()

    def status(self) -> pb.StatusReply:
        """What this agent is and does now. Looks at the sensors only while nothing is being measured."""
        context = self.context
        now = context.now
        reply = pb.StatusReply(
            device=context.device,
            state=now.state,
            plan_id=now.plan_id,
            plan_name=now.plan_name,
            cell=now.cell,
            cell_index=now.cell_index,
            cells=now.cells,
            run_id=now.run_id,
            tokens=now.tokens,
            engines=sorted(context.config.engines),
            clock=context.clock.pair(),
        )
        if now.tok_s is not None and now.measuring:
            reply.tok_s = now.tok_s
        configured = list(context.config.engines.values())
        if now.state in {"idle", "between"}:
            readable, unreadable = self._readable()
            reply.gates.extend(readable)
            reply.unreadable.update(unreadable)
            reply.models.extend(context.config.models())
            reply.engine_facts.extend(self._engine_facts.of(configured))
            reply.sample.CopyFrom(self._idle_sample())
        else:
            reply.engine_facts.extend(self._engine_facts.known(configured))
        return reply

    def state(self) -> str:
        """One word for heartbeats."""
        return self.context.now.state

    def measuring(self) -> Measuring | None:
        """The cell being measured now, or the phone by a gate's speed probe, if anything."""
        now = self.context.now
        if not (now.measuring or self.context.gates.sources.probing):
            return None
        return Measuring(now.measuring, now.send_during_cells)

    def clock(self) -> pb.ClockPair:
        """Boot and wall clock."""
        return self.context.clock.pair()

    def tell(self, run_id: bytes, note: pb.Note) -> bool:
        """Keep what a host says: for the gates and for the open run it belongs to."""
        context = self.context
        facts: object = None
        try:
            facts = json.loads(note.facts_json) if note.facts_json else {}
        except (ValueError, RecursionError):
            log.warning("a host told %r with facts that are no JSON", note.code[:80])
        if isinstance(facts, dict):
            context.gates.told.tell(facts, context.clock.boot_ns())
        context.told.pop(note.code, None)
        context.told[note.code] = note
        while len(context.told) > KEPT_NOTES:
            del context.told[next(iter(context.told))]
        return self.night.tell(run_id, note) if run_id else True

    def secret(self) -> bytes:
        """The shared secret as it is now."""
        return self.context.config.secret

    def rotate(self, new_secret: bytes | None, keep_for_store: bytes | None, *, forget: bool) -> None:
        """Replace the secret and/or the store that records are kept for, durably."""
        if new_secret is not None and len(new_secret) != 32:
            raise RefusedError("a secret has 32 bytes")
        if keep_for_store and len(keep_for_store) != 16:
            raise RefusedError("a store's id has 16 bytes")
        context = self.context
        with context.config_lock:
            settings = context.config
            if keep_for_store or forget:
                kept = b"" if forget else keep_for_store or b""
                config.keep_for_store(context.home, kept)
                settings = replace(settings, kept_for_store=kept)
                context.spool.kept_for = kept
            if new_secret is not None:
                config.replace_secret(context.home, new_secret)
                settings = replace(settings, secret=new_secret)
            context.config = settings

    def _readable(self) -> tuple[list[str], dict[str, str]]:
        """Which gates can be read; asked again after a minute, since a battery may need a program to be started."""
        with self._sampling:
            if time.monotonic() - self._readable_at > READABLE_S:
                self._readable_gates = self.context.gates.readable()
                self._readable_at = time.monotonic()
            return self._readable_gates

    def _idle_sample(self) -> pb.Sample:
        with self._sampling:
            if self._sampler is None:
                self._sampler = Sampler(self.context.roots)
            return self._sampler.sample("idle")
