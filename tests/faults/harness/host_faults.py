"""What goes wrong on the host: its collector, its adb server, its database."""

from __future__ import annotations

import contextlib
import math
import signal
import time

from faults.harness.action import Undo, action, send
from faults.harness.schedule import Step
from faults.harness.world import World


def _collector_ends(world: World, number: int) -> Undo:
    world.collector_wanted = False
    if world.collector is not None:
        world.collector.send_signal(number)
        try:
            world.collector.wait(90)
        except Exception:
            world.unasked.append(f"the collector did not end on signal {number}: {world.log_tail()}")
            world.collector.kill()
            world.collector.wait()

    return world.start


@action
def collector_kill(world: World, step: Step) -> Undo | None:
    return _collector_ends(world, signal.SIGKILL)


@action
def collector_term(world: World, step: Step) -> Undo | None:
    return _collector_ends(world, signal.SIGTERM)


@action
def collector_stop(world: World, step: Step) -> Undo | None:
    process = world.collector
    if process is None:
        return None
    send(process.pid, signal.SIGSTOP)
    return lambda: send(process.pid, signal.SIGCONT)


@action
def host_clock_jump(world: World, step: Step) -> Undo | None:
    """The host's wall clock is set; it is not set back."""
    world.clock.write_text(f"{(step.amount - 0.5) * 20_000:.3f}")
    return None


@action
def collector_second(world: World, step: Step) -> Undo | None:
    world.second = second = world.start_collector()

    def gone() -> None:
        second.kill()
        second.wait()
        world.second = None

    return gone


@action
def forwards_removed(world: World, step: Step) -> Undo | None:
    world.server.adb("forward", "--remove-all")
    return None


@action
def server_kill(world: World, step: Step) -> Undo | None:
    for pid in world.server_pids():
        send(pid, signal.SIGKILL)
    if world.server.process is not None:
        world.server.process.wait()
        world.server.process = None
    return None


@action
def server_replaced(world: World, step: Step) -> Undo | None:
    """As a client of another version does it: the server is told to end, and one of its own is started."""
    world.server.adb("kill-server")
    if world.server.process is not None:
        world.server.process.wait(20)
        world.server.process = None
    with contextlib.suppress(AssertionError):  # the collector may have been quicker
        world.server.start()
    return None


@action
def server_stop(world: World, step: Step) -> Undo | None:
    pids = world.server_pids()
    for pid in pids:
        send(pid, signal.SIGSTOP)

    def go_on() -> None:
        for pid in pids:
            send(pid, signal.SIGCONT)

    return go_on


def _harmed(world: World) -> None:
    world.database_harmed_from, world.database_harmed_until = time.monotonic(), math.inf


def _well(world: World) -> None:
    world.database_harmed_until = time.monotonic()


@action
def database_kill(world: World, step: Step) -> Undo | None:
    _harmed(world)
    world.database.kill()
    return _then_start(world)


@action
def database_restart(world: World, step: Step) -> Undo | None:
    _harmed(world)
    world.database.stop()
    return _then_start(world)


def _then_start(world: World) -> Undo:
    def start() -> None:
        world.database.start()
        _well(world)

    return start


@action
def database_stop(world: World, step: Step) -> Undo | None:
    _harmed(world)
    world.database.signal_all(signal.SIGSTOP)

    def go_on() -> None:
        world.database.signal_all(signal.SIGCONT)
        _well(world)

    return go_on


@action
def database_read_only(world: World, step: Step) -> Undo | None:
    _harmed(world)
    world.database.refuse_writes(True)

    def writable() -> None:
        world.database.refuse_writes(False)
        _well(world)

    return writable


@action
def database_disk_read_only(world: World, step: Step) -> Undo | None:
    _harmed(world)
    world.database.stop()
    world.database.disk_read_only(True)
    world.database.start_fails()

    def writable() -> None:
        world.database.disk_read_only(False)
        world.database.start()
        _well(world)

    return writable


@action
def database_disk_full(world: World, step: Step) -> Undo | None:
    """The server goes on until it wants to write; it may go down over it."""
    _harmed(world)
    world.database.fill_disk(True)

    def room() -> None:
        world.database.fill_disk(False)
        _well(world)

    return room


@action
def database_locked(world: World, step: Step) -> Undo | None:
    """Somebody else keeps a transaction open."""
    _harmed(world)
    unlock = world.database.lock()

    def free() -> None:
        unlock()
        _well(world)

    return free
