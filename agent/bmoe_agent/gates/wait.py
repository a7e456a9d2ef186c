"""Waiting for a gate: conditions with a bound, not timers.

In: what is asked, a clock and a way to sleep. Out: a `GateReport`: what was asked, the readings, how long it waited and how it ended:

    held        the condition was met at once (and stayed so for its settle time)
    waited      it was met after a wait
    gave_up     the time was over, or the wait was called off
    unreadable  this phone cannot read it; whether the cell runs is the policy's matter as for gave_up

A condition must hold for `settle_s` on end. With `timeout_s` 0 nothing is waited for: the first reading (or the settle time that it begins)
decides. A source that answers only sometimes is asked again; only one that never answered since the agent started is unreadable at
once: what a host tells may be away for as long as its cable is.

Every reading is in the report. The longer a wait lasts the further they lie apart (a sixtieth of it), so that a night's wait stays some
hundreds of them, and one that costs time of its own, as the speed probe does, takes at most a tenth of the wait: a phone that computes
does not cool down.

Several gates are waited for one after the other. One that held long before the last of them did is looked at once more: what counts
is that all of them hold when the cell begins.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from bmoe_proto.asking import gate_problems
from bmoe_proto.gates import GATES
from bmoe_proto.v1 import telemetry_pb2 as pb

from bmoe_agent.gates import baseline
from bmoe_agent.gates.sources import Reading, Sources, Told
from bmoe_agent.roots import Roots
from bmoe_agent.sampling.observer import boot_ns

COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {"<=": operator.le, ">=": operator.ge, "==": operator.eq}
_SILENT_TRIES = 3
_SILENT_S = 1.0
_APART = 1 / 60
_SHARE = 0.1
_STALE_NS = 30_000_000_000


class Gates:
    """All gates of this phone."""

    def __init__(self, roots: Roots, home: Path, told: Told | None = None, sources: Sources | None = None) -> None:
        self.home = home
        self.sources = sources or Sources(roots, home, told)
        self._answered: set[str] = set()

    @property
    def told(self) -> Told:
        """Where the service puts what a host tells."""
        return self.sources.told

    def read(self, gate: str) -> Reading:
        """Look at one gate now."""
        return self.sources.read(gate)

    def readable(self) -> tuple[list[str], dict[str, str]]:
        """Gates this phone can read, and by name why it cannot read the others. Costs no speed probe."""
        reasons = {gate: self.sources.why_unreadable(gate) for gate in GATES}
        return [gate for gate, why in reasons.items() if not why], {gate: why for gate, why in reasons.items() if why}

    def record_baseline(
        self, passes: int = baseline.PASSES, tell: Callable[[int, int], None] | None = None
    ) -> baseline.Baseline:
        """Measure and keep this phone's cold baseline. Raises OSError when the home cannot be written."""
        found = baseline.record(self.read("cpu_temp_c").value, self.read("clock_cap_ratio").value, passes, tell)
        found.save(self.home)
        return found

    def wait_for_all(
        self,
        asks: Sequence[pb.GateAsk],
        clock_ns: Callable[[], int] = boot_ns,
        sleep: Callable[[float], None] = time.sleep,
        called_off: Callable[[], bool] = lambda: False,
    ) -> Iterator[pb.GateReport]:
        """Every gate in its order, then again those that held too long ago, each within the bound it was given. Never raises.

        A gate that gave up is not asked again: whoever takes the reports decides by its policy whether to go on.
        """
        left_s = [float(ask.timeout_s) for ask in asks]
        held_ns: dict[int, int] = {}
        due = list(range(len(asks)))
        again = False
        while due:
            for place in due:
                ask = pb.GateAsk()
                ask.CopyFrom(asks[place])
                ask.timeout_s = max(0, int(left_s[place]))
                report = self.wait(ask, clock_ns, sleep, called_off, settled=again)
                left_s[place] -= report.waited_ns / 1e9
                held_ns[place] = clock_ns()
                if report.state in {"gave_up", "unreadable"}:
                    del held_ns[place]
                yield report
            due = [place for place, at_ns in sorted(held_ns.items()) if clock_ns() - at_ns > _STALE_NS]
            again = True

    def wait(
        self,
        ask: pb.GateAsk,
        clock_ns: Callable[[], int] = boot_ns,
        sleep: Callable[[float], None] = time.sleep,
        called_off: Callable[[], bool] = lambda: False,
        *,
        settled: bool = False,
    ) -> pb.GateReport:
        """Wait until the condition holds or its time is over; `settled`: when it holds at once, that is enough. Never raises."""
        kind = GATES.get(ask.gate)
        comparison = ask.comparison or (kind.comparison if kind else "<=")
        report = pb.GateReport(
            gate=ask.gate,
            asked=f"{ask.gate} {comparison} {ask.bound:g}",
            bound=ask.bound,
            unit=kind.unit if kind else ask.unit,
            policy=ask.policy or "run-flagged",
        )
        if wrong := gate_problems(ask):
            report.state = "unreadable"
            report.readings.add(boot_ns=clock_ns(), text="; ".join(wrong))
            return report
        holds = COMPARISONS[comparison]
        every_s = kind.every_s if kind else 1.0
        began = now = clock_ns()
        met_since: int | None = None
        unmet = away = False
        answered = ask.gate in self._answered
        silent = 0
        while True:
            looked = now
            reading = self.sources.read(ask.gate)
            _note(report, now, reading)
            if reading.value is not None:
                self._answered.add(ask.gate)
                answered, silent = True, 0
                met = holds(reading.value, ask.bound)
                unmet |= not met
                met_since = None if not met else now if met_since is None else met_since
            else:
                silent, away = silent + 1, True
                met_since = None
            now = clock_ns()
            report.waited_ns = max(0, now - began)
            settle_s = 0 if settled and not unmet else ask.settle_s
            if met_since is not None and now - met_since >= settle_s * 1_000_000_000:
                # Settling alone is no waiting: the condition held from the first reading on.
                report.state = "waited" if unmet or away else "held"
                break
            left_s = ask.timeout_s - (now - began) / 1e9
            settling = met_since is not None and not unmet and answered
            if not answered and silent >= _SILENT_TRIES:
                report.state = "unreadable"
                break
            if called_off() or (left_s <= 0 and not settling):
                report.state = "gave_up" if answered else "unreadable"
                break
            pause_s = _SILENT_S if reading.value is None else every_s
            pause_s = max(pause_s, _APART * (now - began) / 1e9, (1 / _SHARE - 1) * (now - looked) / 1e9)
            if met_since is not None:
                pause_s = min(pause_s, max(0.05, settle_s - (now - met_since) / 1e9))
            elif left_s > 0:
                pause_s = min(pause_s, left_s)
            sleep(pause_s)
            now = clock_ns()
        return report


def _note(report: pb.GateReport, at_ns: int, reading: Reading) -> None:
    report.readings.add(boot_ns=at_ns, value=reading.value, text=reading.text)
    report.source = reading.source or report.source
    if reading.value is not None:
        report.last = reading.value
