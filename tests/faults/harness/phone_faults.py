"""What goes wrong with a phone: its adbd, its agent and engine, its disk and clock, the link to it."""

from __future__ import annotations

import contextlib
import math
import os
import random
import signal
import time

from bmoe_proto import framing
from bmoe_proto.v1 import telemetry_pb2 as pb
from faults.harness.action import Undo, action, send
from faults.harness.schedule import Step
from faults.harness.world import FaultPhone, World


@action
def adbd_kill(world: World, step: Step) -> Undo | None:
    phone = world.phones[step.phone]
    phone.kill_adbd()
    return phone.start_adbd


@action
def adbd_stop(world: World, step: Step) -> Undo | None:
    daemon = world.phones[step.phone].adbd
    if daemon is None:
        return None
    daemon.send_signal(signal.SIGSTOP)
    return lambda: daemon.send_signal(signal.SIGCONT)


def _agent_again(phone: FaultPhone) -> Undo:
    def again() -> None:
        phone.agent.launch()
        phone.agent_wanted = True

    return again


@action
def agent_kill(world: World, step: Step) -> Undo | None:
    phone = world.phones[step.phone]
    phone.agent_wanted = False
    phone.agent.kill()
    return _agent_again(phone)


@action
def agent_term(world: World, step: Step) -> Undo | None:
    phone = world.phones[step.phone]
    phone.agent_wanted = False
    if (code := phone.agent.stop()) != 0:
        world.unasked.append(f"the agent of phone {phone.number} ended with {code} on SIGTERM")
    return _agent_again(phone)


@action
def agent_stop(world: World, step: Step) -> Undo | None:
    process = world.phones[step.phone].agent.process
    if process is None:
        return None
    process.send_signal(signal.SIGSTOP)
    return lambda: process.send_signal(signal.SIGCONT)


@action
def engine_kill(world: World, step: Step) -> Undo | None:
    """The engine alone, as the phantom killer does; its launcher lives to say so."""
    for pid in _engines(world.phones[step.phone]):
        send(pid, signal.SIGKILL)
    return None


@action
def engine_stop(world: World, step: Step) -> Undo | None:
    pids = _engines(world.phones[step.phone])
    for pid in pids:
        send(pid, signal.SIGSTOP)

    def go_on() -> None:
        for pid in pids:
            send(pid, signal.SIGCONT)

    return go_on


@action
def launcher_kill(world: World, step: Step) -> Undo | None:
    """The few lines of shell alone: the engine lives, and nobody is left to see how it ends."""
    for pid in world.phones[step.phone].agent.engines():
        with contextlib.suppress(OSError):
            if _is_shell(pid):
                send(pid, signal.SIGKILL)
    return None


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


@action
def phone_freeze(world: World, step: Step) -> Undo | None:
    phone = world.phones[step.phone]
    phone.freeze(True)
    return lambda: phone.freeze(False)


@action
def reboot(world: World, step: Step) -> Undo | None:
    phone = world.phones[step.phone]
    phone.agent_wanted = False
    phone.kill_all()
    if step.amount < 0.4:  # without power: what was not synced is not all there
        _cut_tail(phone, step.amount, synced=True)

    def up() -> None:
        phone.boot()
        phone.start_adbd()
        _agent_again(phone)()

    return up


@action
def tail_torn(world: World, step: Step) -> Undo | None:
    phone = world.phones[step.phone]
    again = agent_kill(world, step)
    _cut_tail(phone, step.amount)
    return again


def _cut_tail(phone: FaultPhone, amount: float, *, synced: bool = False) -> None:
    """Take some bytes from the end of the newest segment; with `synced`, none that were safe from a loss of power."""
    path = phone.newest_segment()
    if path is not None and (size := path.stat().st_size):
        left = max(_synced(path.read_bytes()) if synced else 1, size - 1 - int(amount * 600))
        if left < size:
            phone.harm(path.parent.name, "tail_torn")
            os.truncate(path, left)


def _synced(data: bytes) -> int:
    """Up to where a segment was synced: a run's start and its end are, before anything follows from them."""
    end = 1
    with contextlib.suppress(framing.FramingError):
        for block in framing.scan(data):
            frames = map(pb.Frame.FromString, block.frames())
            if any(frame.WhichOneof("what") in {"run_started", "run_ended"} for frame in frames):
                end = block.end
    return end


@action
def tail_flipped(world: World, step: Step) -> Undo | None:
    phone = world.phones[step.phone]
    again = agent_kill(world, step)
    path = phone.newest_segment()
    if path is not None and (size := path.stat().st_size):
        phone.harm(path.parent.name, step.fault)
        draw = random.Random(step.amount)
        at = size - 1 - draw.randrange(min(size, 600))
        with path.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << draw.randrange(8)]))
    return again


@action
def clock_jump(world: World, step: Step) -> Undo | None:
    """The wall clock is set; it is not set back."""
    by_s = (step.amount - 0.5) * 20_000
    world.phones[step.phone].clock.write_text(f"{by_s:.3f}")
    return None


@action
def disk_full(world: World, step: Step) -> Undo | None:
    phone = world.phones[step.phone]
    if not phone.small:
        return None
    phone.full_until = math.inf
    phone.harm_all(step.fault)
    filler = phone.agent.home / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        if step.amount < 0.5:  # nearly: samples are given up, output is not
            facts = os.statvfs(phone.agent.home)
            file.write(bytes(max(0, facts.f_bavail * facts.f_frsize - (1 << 20))))
        else:
            while True:
                file.write(bytes(64 << 10) if os.statvfs(phone.agent.home).f_bavail > 16 else bytes(4096))
    phone.harm_all(step.fault)  # what began while it filled

    def room() -> None:
        phone.harm_all(step.fault)
        filler.unlink(missing_ok=True)
        phone.full_until = time.monotonic() + 3

    return room


@action
def link_down(world: World, step: Step) -> Undo | None:
    phone = world.phones[step.phone]
    if phone.namespace is None:
        return None
    namespace = phone.namespace
    namespace.link_state(False)
    return lambda: namespace.link_state(True)


@action
def wifi_delay(world: World, step: Step) -> Undo | None:
    wifi = world.phones[step.phone].wifi
    assert wifi is not None
    wifi.delay_s = 0.05 + step.amount * 0.8
    return wifi.heal


@action
def wifi_loss(world: World, step: Step) -> Undo | None:
    """Packets are lost: what TCP makes of it is pieces that wait for their repetition, and all behind them."""
    wifi = world.phones[step.phone].wifi
    assert wifi is not None
    wifi.lost = 0.05 + step.amount * 0.4
    return wifi.heal


@action
def wifi_stall(world: World, step: Step) -> Undo | None:
    wifi = world.phones[step.phone].wifi
    assert wifi is not None
    wifi.stalled = True
    return wifi.heal


@action
def wifi_half(world: World, step: Step) -> Undo | None:
    """What the phone says does not come, or what it is told, or it has no connection any more and nobody says so."""
    wifi = world.phones[step.phone].wifi
    assert wifi is not None
    wifi.deaf = step.amount < 0.6
    wifi.mute = 0.4 < step.amount < 0.8
    if step.amount >= 0.8:
        wifi.forget()

    def over() -> None:
        wifi.heal()
        if step.amount < 0.3 or step.amount >= 0.8:  # then the connection turns out to be gone
            wifi.cut()

    return over


@action
def wifi_cut(world: World, step: Step) -> Undo | None:
    wifi = world.phones[step.phone].wifi
    assert wifi is not None
    wifi.refusing = True
    wifi.cut()
    return wifi.heal
