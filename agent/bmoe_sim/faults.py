"""What goes wrong on request (settings.py lists the faults).

Comes in: the settings and the place reached. Goes out: nothing, a pause, an exception the engine would report, or the
end of the process by the signal asked for.
"""

import mmap
import os
import signal
import time

from bmoe_sim.memory import anonymous
from bmoe_sim.output import complain
from bmoe_sim.settings import Settings

_SIGNALS = {"crash": signal.SIGABRT, "segv": signal.SIGSEGV, "kill": signal.SIGKILL, "term": signal.SIGTERM}


class FatalError(Exception):
    """The context is compromised: the session ends, a one-shot run fails."""


def reach(settings: Settings, at: int | str) -> None:
    """Do what was asked for at this place: a token's number, `load` or `prefill`."""
    for fault in settings.faults:
        if fault.at != str(at):
            continue
        if fault.kind == "pause":
            time.sleep(fault.arg or 1.0)
        elif fault.kind == "hang":
            while True:
                signal.pause()
        elif fault.kind == "oom":
            _eat(int(fault.arg or 64))
            die(signal.SIGKILL)
        elif fault.kind in _SIGNALS:
            if fault.kind == "crash":
                complain("ggml.c: GGML_ASSERT(simulated) failed")
            die(_SIGNALS[fault.kind])
        elif fault.kind == "exit":
            complain("bmoe: terminating as told")
            os._exit(int(fault.arg if fault.arg is not None else 1))
        elif fault.kind == "fatal":
            raise FatalError("llama_decode failed (simulated)")


def die(number: signal.Signals) -> None:
    """End by a signal, whatever its handling was."""
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        if number in {signal.SIGABRT, signal.SIGSEGV}:
            _no_core()
    os.kill(os.getpid(), number)
    signal.pause()


def _no_core() -> None:
    import resource  # only where a crash was asked for

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _eat(mib: int) -> None:
    memory = anonymous(mib << 20)
    for at in range(0, len(memory), mmap.PAGESIZE):
        memory[at] = 1
