"""Every fault of `schedule.KINDS`: how it is done, and how it is taken back.

In: a world and a step. Out: nothing, or what must be called to take it back when the step's time is over. Doing one never
fails because the part is not there (another fault may have been quicker); what it did is what counts.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable

from faults.harness.schedule import Step
from faults.harness.world import FaultPhone, World

Undo = Callable[[], None]
Action = Callable[[World, Step], Undo | None]
ACTIONS: dict[str, Action] = {}


def _action(function: Action) -> Action:
    ACTIONS[function.__name__] = function
    return function


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


# ---------------------------------------------------------------- the host


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

    def again() -> None:
        world.collector = world.start_collector()
        world.collector_wanted = True

    return again


@_action
def collector_kill(world: World, step: Step) -> Undo | None:
    return _collector_ends(world, signal.SIGKILL)


@_action
def collector_term(world: World, step: Step) -> Undo | None:
    return _collector_ends(world, signal.SIGTERM)


@_action
def collector_stop(world: World, step: Step) -> Undo | None:
    process = world.collector
    if process is None:
        return None
    _send(process.pid, signal.SIGSTOP)
    return lambda: _send(process.pid, signal.SIGCONT)


@_action
def collector_second(world: World, step: Step) -> Undo | None:
    world.second = second = world.start_collector()

    def gone() -> None:
        second.kill()
        second.wait()
        world.second = None

    return gone


# ---------------------------------------------------------------- adb


@_action
def forwards_removed(world: World, step: Step) -> Undo | None:
    world.server.adb("forward", "--remove-all")
    return None


@_action
def server_kill(world: World, step: Step) -> Undo | None:
    for pid in world.server_pids():
        _send(pid, signal.SIGKILL)
    if world.server.process is not None:
        world.server.process.wait()
        world.server.process = None
    return None


@_action
def server_stop(world: World, step: Step) -> Undo | None:
    pids = world.server_pids()
    for pid in pids:
        _send(pid, signal.SIGSTOP)

    def go_on() -> None:
        for pid in pids:
            _send(pid, signal.SIGCONT)

    return go_on


@_action
def adbd_kill(world: World, step: Step) -> Undo | None:
    phone = world.phones[step.phone]
    phone.kill_adbd()
    return phone.start_adbd


@_action
def adbd_stop(world: World, step: Step) -> Undo | None:
    daemon = world.phones[step.phone].adbd
    if daemon is None:
        return None
    daemon.send_signal(signal.SIGSTOP)
    return lambda: daemon.send_signal(signal.SIGCONT)


# ---------------------------------------------------------------- the phone


def _agent_again(phone: FaultPhone) -> Undo:
    def again() -> None:
        phone.agent.launch()
        phone.agent_wanted = True

    return again


@_action
def agent_kill(world: World, step: Step) -> Undo | None:
    phone = world.phones[step.phone]
    phone.agent_wanted = False
    phone.agent.kill()
    return _agent_again(phone)


@_action
def agent_term(world: World, step: Step) -> Undo | None:
    phone = world.phones[step.phone]
    phone.agent_wanted = False
    if (code := phone.agent.stop()) != 0:
        world.unasked.append(f"the agent of phone {phone.number} ended with {code} on SIGTERM")
    return _agent_again(phone)


@_action
def agent_stop(world: World, step: Step) -> Undo | None:
    process = world.phones[step.phone].agent.process
    if process is None:
        return None
    process.send_signal(signal.SIGSTOP)
    return lambda: process.send_signal(signal.SIGCONT)


@_action
def engine_kill(world: World, step: Step) -> Undo | None:
    """The engine alone, as the phantom killer does; its launcher lives to say so."""
    phone = world.phones[step.phone]
    phone.harmed.add(step.fault)
    for pid in _engines(phone):
        _send(pid, signal.SIGKILL)
    return None


@_action
def engine_stop(world: World, step: Step) -> Undo | None:
    pids = _engines(world.phones[step.phone])
    for pid in pids:
        _send(pid, signal.SIGSTOP)

    def go_on() -> None:
        for pid in pids:
            _send(pid, signal.SIGCONT)

    return go_on


def _engines(phone: FaultPhone) -> list[int]:
    found = []
    for pid in phone.agent.engines():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
            if b"bmoe-sim" in file.read() and not _is_shell(pid):
                found.append(pid)
    return found


def _is_shell(pid: int) -> bool:
    with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
        return file.read().strip() in {"sh", "dash", "bash"}


@_action
def phone_freeze(world: World, step: Step) -> Undo | None:
    phone = world.phones[step.phone]
    phone.freeze(True)
    return lambda: phone.freeze(False)


@_action
def reboot(world: World, step: Step) -> Undo | None:
    phone = world.phones[step.phone]
    phone.harmed.add(step.fault)
    phone.agent_wanted = False
    phone.kill_all()
    if step.amount < 0.4:  # without power: what was not synced is not all there
        _cut_tail(phone, step.amount)

    def up() -> None:
        phone.boot()
        phone.start_adbd()
        _agent_again(phone)()

    return up


@_action
def tail_torn(world: World, step: Step) -> Undo | None:
    phone = world.phones[step.phone]
    again = agent_kill(world, step)
    _cut_tail(phone, step.amount)
    return again


def _cut_tail(phone: FaultPhone, amount: float) -> None:
    path = phone.newest_segment()
    if path is not None and (size := path.stat().st_size):
        phone.harmed.add("tail_torn")
        os.truncate(path, max(1, size - 1 - int(amount * 600)))


@_action
def tail_flipped(world: World, step: Step) -> Undo | None:
    phone = world.phones[step.phone]
    again = agent_kill(world, step)
    path = phone.newest_segment()
    if path is not None and (size := path.stat().st_size):
        phone.harmed.add(step.fault)
        draw = random.Random(step.amount)
        at = size - 1 - draw.randrange(min(size, 600))
        with path.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << draw.randrange(8)]))
    return again


@_action
def clock_jump(world: World, step: Step) -> Undo | None:
    """The wall clock is set; it is not set back."""
    by_s = (step.amount - 0.5) * 20_000
    world.phones[step.phone].clock.write_text(f"{by_s:.3f}")
    return None


@_action
def disk_full(world: World, step: Step) -> Undo | None:
    phone = world.phones[step.phone]
    if not phone.small:
        return None
    phone.harmed.add(step.fault)
    filler = phone.agent.home / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        if step.amount < 0.5:  # nearly: samples are given up, output is not
            facts = os.statvfs(phone.agent.home)
            file.write(bytes(max(0, facts.f_bavail * facts.f_frsize - (1 << 20))))
        else:
            while True:
                file.write(bytes(64 << 10) if os.statvfs(phone.agent.home).f_bavail > 16 else bytes(4096))
    return lambda: filler.unlink(missing_ok=True)


# ---------------------------------------------------------------- the link


@_action
def link_down(world: World, step: Step) -> Undo | None:
    phone = world.phones[step.phone]
    if phone.namespace is None:
        return None
    namespace = phone.namespace
    namespace.link_state(False)
    return lambda: namespace.link_state(True)


@_action
def wifi_delay(world: World, step: Step) -> Undo | None:
    wifi = world.phones[step.phone].wifi
    assert wifi is not None
    wifi.delay_s = 0.05 + step.amount * 0.8
    return wifi.heal


@_action
def wifi_stall(world: World, step: Step) -> Undo | None:
    wifi = world.phones[step.phone].wifi
    assert wifi is not None
    wifi.stalled = True
    return wifi.heal


@_action
def wifi_half(world: World, step: Step) -> Undo | None:
    """What the phone says does not come; then the connection turns out to be gone."""
    wifi = world.phones[step.phone].wifi
    assert wifi is not None
    wifi.deaf = True

    def over() -> None:
        wifi.heal()
        if step.amount < 0.5:
            wifi.cut()

    return over


@_action
def wifi_cut(world: World, step: Step) -> Undo | None:
    wifi = world.phones[step.phone].wifi
    assert wifi is not None
    wifi.refusing = True
    wifi.cut()
    return wifi.heal


# ---------------------------------------------------------------- the database


def _harmed(world: World) -> None:
    world.database_harmed_at = time.monotonic()


@_action
def database_kill(world: World, step: Step) -> Undo | None:
    _harmed(world)
    world.database.kill()
    return _then_start(world)


@_action
def database_restart(world: World, step: Step) -> Undo | None:
    _harmed(world)
    world.database.stop()
    return _then_start(world)


def _then_start(world: World) -> Undo:
    def start() -> None:
        world.database.start()
        _harmed(world)

    return start


@_action
def database_stop(world: World, step: Step) -> Undo | None:
    _harmed(world)
    world.database.signal_all(signal.SIGSTOP)

    def go_on() -> None:
        world.database.signal_all(signal.SIGCONT)
        _harmed(world)

    return go_on


@_action
def database_read_only(world: World, step: Step) -> Undo | None:
    _harmed(world)
    world.database.refuse_writes(True)

    def writable() -> None:
        world.database.refuse_writes(False)
        _harmed(world)

    return writable


@_action
def database_disk_read_only(world: World, step: Step) -> Undo | None:
    _harmed(world)
    world.database.stop()
    world.database.disk_read_only(True)
    world.database.start_fails()

    def writable() -> None:
        world.database.disk_read_only(False)
        world.database.start()
        _harmed(world)

    return writable
