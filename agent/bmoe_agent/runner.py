"""One attempt of one cell, from nothing to its last frame.

In: a plan, one of its cells, the number of the attempt. Out: `Ended`, and a run in the spool that tells everything.

The order is the law's: the run is durable as started before the engine is executed (law 4); then gates, pre-heat, entry
state, launch, watch (runner_watch), and the end (runner_close). A cell that is never launched is a run too.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from bmoe_proto.v1 import telemetry_pb2 as pb

from bmoe_agent import engine as engines
from bmoe_agent import launch, leftovers, oomkills, runner_close
from bmoe_agent.config import ConfigError, EngineConfig
from bmoe_agent.context import Context
from bmoe_agent.gates import baseline
from bmoe_agent.launch_argv import RefusedError, command
from bmoe_agent.phase import Phases
from bmoe_agent.prepared import wait_for_hosts
from bmoe_agent.residency import model as models
from bmoe_agent.residency.look import Residency
from bmoe_agent.runner_live import AgentStopping, CellCancelled, Ended, Live, effective_sampling
from bmoe_agent.runner_watch import Watch
from bmoe_agent.sampling import Observer, Sampler
from bmoe_agent.session import Session
from bmoe_agent.spool import SpoolError
from bmoe_agent.tail import Tail
from bmoe_agent.watchdog import IN_A_ROW

_PREHEAT_BLOCK = b"\0" * (1 << 20)


def run_attempt(
    context: Context,
    plan: pb.Plan,
    cell: pb.Cell,
    attempt: int,
    *,
    cancelled: Callable[[], str],
    opened: Callable[[Live | None], None] = lambda _: None,
    wake_lock: str = "",
) -> Ended:
    """Run one attempt of a cell to its end. Raises `AgentStopping` when the agent is told to stop meanwhile.

    `opened` is told the run while it is open, so that what hosts tell can be added to it; `wake_lock` is what came of
    asking for one.
    """
    live = _open(context, plan, cell, attempt, cancelled)
    context.set_now(
        state="gating",
        plan_id=plan.plan_id,
        plan_name=plan.name,
        cell=cell.name,
        cell_index=cell.index,
        cells=len(plan.cells),
        run_id=live.run_id,
        phase="",
        tokens=0,
        tok_s=None,
        send_during_cells=plan.send_during_cells,
    )
    opened(live)
    try:
        try:
            _start(live, plan, wake_lock)
        except CellCancelled:
            live.ended_by_us = "user"
        if live.launched:
            Watch(live).run()
        return runner_close.close(live)
    except AgentStopping:
        live.writer.seal()
        raise
    except BaseException:
        abort_unwatched(live)
        raise
    finally:
        opened(None)
        live.close_files()


def abort_unwatched(live: Live) -> None:
    """Our own failure, or a disk's: an engine must not run unwatched. The run is closed from disk afterwards."""
    with contextlib.suppress(OSError, SpoolError):
        live.note("agent_error", traceback.format_exc(limit=-8)[-4000:])
    if live.process is not None:
        launch.end(live.process, grace_s=5.0)
    with contextlib.suppress(OSError, SpoolError):
        live.writer.seal()


def record_unrun(context: Context, plan: pb.Plan, cell: pb.Cell, attempt: int, *, gate: str, why: str) -> Ended:
    """Put a cell on record that the end of its plan keeps from running (`gate` is "limit" or "abort"): every cell has a run."""
    live = _open(context, plan, cell, attempt, lambda: "")
    try:
        live.writer.append("run_started", _run_started(live, plan), context.clock.boot_ns())
        live.gate = pb.GateReport(gate=gate, asked=why, state="gave_up", policy="skip")
        live.writer.append("gate", live.gate, context.clock.boot_ns())
        return runner_close.close(live)
    finally:
        live.close_files()


def _open(context: Context, plan: pb.Plan, cell: pb.Cell, attempt: int, cancelled: Callable[[], str]) -> Live:
    run_id = secrets.token_bytes(16)
    observer = Observer()
    return Live(
        context=context,
        plan_id=plan.plan_id,
        cell=cell,
        attempt=attempt,
        run_id=run_id,
        writer=context.spool.open_run(run_id, why="start"),
        directory=context.run_directory(run_id),
        cancelled=cancelled,
        observer=observer,
        limits=plan.limits,
        sampling=effective_sampling(cell.sampling),
    )


def _run_started(live: Live, plan: pb.Plan) -> pb.RunStarted:
    context, cell = live.context, live.cell
    return pb.RunStarted(
        plan_id=plan.plan_id,
        plan_name=plan.name,
        plan_sha256=plan.sha256,
        cell=cell,
        attempt=live.attempt,
        device=context.device,
        directory=str(live.directory),
        clock=context.clock.pair(),
        sampling=live.sampling,
        kept_for_store=context.config.kept_for_store,
        plan_text=plan.text,
        question_json=plan.question_json,
        plan_cells=len(plan.cells),
        simulated=context.roots.substituted,
    )


def _start(live: Live, plan: pb.Plan, wake_lock: str) -> None:
    """Everything up to the running engine, or to the reason why there is none."""
    context, cell = live.context, live.cell
    started = _run_started(live, plan)
    problems: list[tuple[str, str]] = []
    engine, environment, model = _resolve(live, started, problems)
    if engine is not None and model is not None:
        try:
            live.command = command(cell, str(engine.path), started.engine, model)
            launch.check_size(live.command.argv, environment)
            started.argv.extend(live.command.argv)
        except RefusedError as error:
            live.launch_error = f"{error.cause} {error}"
        except launch.LaunchError as error:
            live.launch_error = f"refused:flags {error}"
    started.simulated = context.roots.substituted or started.engine.simulated
    # Durable before anything is executed: a phone that dies now leaves a run that says so.
    live.writer.append("run_started", started, context.clock.boot_ns())
    live.writer.sync()
    for code, text in (*problems, *live.command.notes):
        live.note(code, text)
    if live.launch_error:
        live.note("not_launched", live.launch_error)
        return
    if wake_lock != "held":
        live.note("wake_lock", f"not held: {wake_lock or 'not asked for'}")
    wait_for_hosts(live, lambda: _check_interrupts(live))
    live.sampler = Sampler(context.roots)
    # Before the gates, which would wait for what it uses, and after them, since waiting may have taken half an hour.
    if not _deal_with_survivors(live) or not _gates(live):
        return
    _preheat(live)
    if not _deal_with_survivors(live):
        return
    _launch(live, environment, model)


def _resolve(
    live: Live, started: pb.RunStarted, problems: list[tuple[str, str]]
) -> tuple[EngineConfig | None, dict[str, str], Path | None]:
    """Engine, environment and model of the cell; what cannot be had is said in `live.launch_error`."""
    context, cell = live.context, live.cell
    cache = context.home / "cache"
    environment: dict[str, str] = {}
    try:
        engine = context.config.engine(cell.engine)
        environment = launch.clean_environment(cell.environment, ld_library_path=engine.ld_library_path)
        started.environment.update(environment)
    except (ConfigError, launch.LaunchError) as error:
        live.launch_error = str(error)
        return None, environment, None
    try:
        library = {"LD_LIBRARY_PATH": engine.ld_library_path} if engine.ld_library_path else {}
        started.engine.CopyFrom(engines.describe(engine.path, cache, engine.name, library))
    except engines.EngineError as error:
        # It is started all the same when it is there: what the linker says on its stderr belongs in the record.
        started.engine.name, started.engine.path = engine.name, str(engine.path)
        if not os.access(engine.path, os.X_OK) or not engine.path.is_file():
            live.launch_error = str(error)
            return engine, environment, None
        problems.append(("engine_not_asked", str(error)))
    try:
        model = context.config.model(cell.model)
    except ConfigError as error:
        live.launch_error = f"refused:model {error}"
        return engine, environment, None
    started.model.CopyFrom(models.describe(model, cache, cell.model, context.roots))
    live.model = started.model
    return engine, environment, model


def _gates(live: Live) -> bool:
    """Wait for every gate; False when one gave up and the cell is not to run."""
    context = live.context

    def called_off() -> bool:
        return context.stop.is_set() or bool(live.cancelled())

    def sleep(seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0 and not called_off():
            context.pause(min(left, 1.0))

    _cold_record(live)
    for report in context.gates.wait_for_all(live.cell.gates, context.clock.boot_ns, sleep, called_off):
        live.writer.append("gate", report, context.clock.boot_ns())
        _check_interrupts(live)
        if report.state in {"gave_up", "unreadable"} and report.policy != "run-flagged":
            live.gate = report
            return False
    _check_interrupts(live)
    return True


def _cold_record(live: Live) -> None:
    """What the phone's entry state is judged against where no gate asks: its own cold record, when it has one."""
    try:
        cold = baseline.load(live.context.home)
    except baseline.BaselineError:
        return
    facts = {"cpu_temp_c": cold.cpu_temp_c, "clock_cap_ratio": cold.clock_cap_ratio, "wall_ns": cold.wall_ns}
    live.note("baseline", "this phone's own cold record", {name: value for name, value in facts.items() if value})


def _check_interrupts(live: Live) -> None:
    if live.context.stop.is_set():
        raise AgentStopping
    if why := live.cancelled():
        live.note("cancelled", why)
        raise CellCancelled


def _preheat(live: Live) -> None:
    """Keep every core busy for as long as the cell asks, so that the rate under sustained load is what is measured."""
    if live.cell.preheat_s <= 0:
        return
    stop = threading.Event()

    def burn() -> None:
        while not stop.is_set():
            hashlib.sha256(_PREHEAT_BLOCK).digest()  # releases the interpreter's lock

    threads = [threading.Thread(target=burn, name=f"preheat-{n}") for n in range(os.cpu_count() or 1)]
    bound = live.cell.watchdog.max_cpu_temp_c
    hot: list[float] = []
    began = time.monotonic()
    for thread in threads:
        thread.start()
    try:
        while (left := live.cell.preheat_s - (time.monotonic() - began)) > 0 and len(hot) < IN_A_ROW:
            _check_interrupts(live)
            live.context.pause(min(left, 0.5))
            degrees = live.context.gates.read("cpu_temp_c").value if bound else None
            hot = [*hot, degrees] if degrees is not None and degrees > bound else []
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    took_s = time.monotonic() - began
    early = f", and no longer: {hot[-1]:g} °C, the cell's bound is {bound:g} °C" if len(hot) >= IN_A_ROW else ""
    text = f"{len(threads)} threads kept busy for {took_s:.1f} s{early}"
    live.note("preheat", text, {"threads": len(threads), "s": took_s, "asked_s": live.cell.preheat_s})


def _deal_with_survivors(live: Live) -> bool:
    """One engine per phone (law 7): end ours that nobody watches, tell of others. False when one does not go."""
    context = live.context
    paths = [engine.path for engine in context.config.engines.values()]
    for process, working in leftovers.find_engines(paths, Path(context.spool.root)):
        run_id = context.run_of_directory(working)
        if not run_id:
            if process.pid in live.foreign_engines:
                continue
            live.foreign_engines.add(process.pid)
            live.note(
                "foreign_engine",
                f"process {process.pid} runs the same engine and is not ours: it is left alone",
                {"pid": process.pid, "cwd": working},
            )
            continue
        live.note("survivor", f"engine {process.pid} of run {run_id.hex()} was still running and is ended")
        if not launch.end(process, grace_s=5.0):
            live.launch_error = f"engine {process.pid} of run {run_id.hex()} does not end, not even by SIGKILL"
            return False
    return True


def _launch(live: Live, environment: dict[str, str], model: Path | None) -> None:
    context = live.context
    live.record_sample("entry")
    if model is not None:
        open_residency(live, model)
        live.record_residency()
    launch.prepare(live.directory)
    live.phases = Phases(session=live.command.session)
    if live.command.session:
        live.session = Session(live.command.turns)
    context.set_now(state="loading")
    live.observer = Observer()
    looked = context.clock.boot_ns()
    try:
        launched = launch.launch(live.command.argv, environment, live.directory, session=live.command.session)
    except launch.LaunchError as error:
        live.launch_error = str(error)
        live.note(error.code, str(error))
        return
    live.launched = True
    live.process, live.launcher = launched.process, launched.launcher
    if launched.stdin is not None:
        live.stdin = launched.stdin.fileno()
        os.set_blocking(live.stdin, False)
    message = pb.Launched(pid=launched.process.pid, start_ticks=launched.process.start_ticks)
    live.writer.append("launched", message, context.clock.boot_ns())
    live.stdout = Tail(live.directory / "stdout", looked_boot_ns=looked)
    live.stderr = Tail(live.directory / "stderr", looked_boot_ns=looked)
    assert live.sampler is not None
    live.sampler.attach(launched.process.pid)
    live.oom_kills = oomkills.count(context.roots, launched.process.pid)
    live.record_sample("launch")
    live.writer.flush()


def open_residency(live: Live, model: Path) -> None:
    """Prepare looking at the model's pages, unless the cell asks for none; a header nobody understands is told."""
    if not live.sampling.residency_period_ms:
        return
    try:
        live.residency = Residency(models.layout(model), live.context.roots.page_size)
    except (OSError, ValueError) as error:
        live.note("residency", f"not measured in this run: {error}")
