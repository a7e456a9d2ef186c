"""This phone's own cold record: how fast the speed probe runs, how warm and how capped the phone was then.

In: the agent's home. Out: `Baseline`, kept as `baseline.json` there:

    {"version": 1, "units": n, "threads": n, "single_s": s, "multi_s": s, "single_spread": f, "multi_spread": f,
     "python": "3.14.0", "zlib": "1.3.1", "wall_ns": n, "cpu_temp_c": f|null, "clock_cap_ratio": f|null, "passes": n}

`single_s` and `multi_s` are the lower quartile of the passes (what else ran only ever made one slower), the spreads their
(90th - 10th percentile) ÷ median.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from bmoe_agent.gates import speed

FILE = "baseline.json"
PASSES = 15
_UNSTEADY = 0.15


class BaselineError(Exception):
    """There is no baseline that can be used; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """What the probe took when this phone was cold."""

    version: int
    units: int
    threads: int
    single_s: float
    multi_s: float
    single_spread: float
    multi_spread: float
    python: str
    zlib: str
    wall_ns: int
    cpu_temp_c: float | None
    clock_cap_ratio: float | None
    passes: int

    def warnings(self) -> list[str]:
        """Why it may not be a cold and quiet one."""
        found: list[str] = []
        if self.clock_cap_ratio is not None and self.clock_cap_ratio < 0.999:
            found.append(
                f"clocks were capped to {100 * self.clock_cap_ratio:.0f} % of the hardware's maximum: let the phone cool down and record again"
            )
        if self.cpu_temp_c is not None and self.cpu_temp_c > 45:
            found.append(f"the CPU had {self.cpu_temp_c:.0f} °C: let the phone cool down and record again")
        for name, spread in (("one thread", self.single_spread), ("all threads", self.multi_spread)):
            if spread > _UNSTEADY:
                found.append(f"passes on {name} spread over {100 * spread:.0f} %: something else was running")
        return found

    def save(self, home: Path) -> None:
        """Keep it. Raises OSError."""
        temporary = home / f".{FILE}.{os.getpid()}"
        temporary.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="ascii")
        os.replace(temporary, home / FILE)


def load(home: Path) -> Baseline:
    """The recorded baseline. Raises BaselineError when there is none or it is of another computation."""
    place = home / FILE
    try:
        raw = json.loads(place.read_text(encoding="ascii"))
        found = Baseline(**{one.name: raw[one.name] for one in fields(Baseline)})
        positive = found.units > 0 and found.threads > 0 and found.single_s > 0 and found.multi_s > 0
    except FileNotFoundError:
        raise BaselineError("no cold baseline: run `bmoe-agent baseline` while the phone is cool and idle") from None
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise BaselineError(f"{place}: not a baseline ({problem}): run `bmoe-agent baseline` again") from problem
    if not positive:
        raise BaselineError(f"{place}: numbers that cannot be: run `bmoe-agent baseline` again")
    here = (speed.VERSION, platform.python_version(), zlib.ZLIB_RUNTIME_VERSION)
    if (found.version, found.python, found.zlib) != here:
        raise BaselineError(
            f"{place}: recorded with Python {found.python} and zlib {found.zlib}, this is {here[1]} and {here[2]}: "
            "the same work takes another time; run `bmoe-agent baseline` again"
        )
    return found


def record(
    cpu_temp_c: float | None = None,
    clock_cap_ratio: float | None = None,
    passes: int = PASSES,
    tell: Callable[[int, int], None] | None = None,
) -> Baseline:
    """Measure a baseline now; takes about `passes` · 0.6 s. `tell(done, of)` hears of every pass."""
    count, threads = speed.calibrate(), speed.allowed_cpus()
    alone: list[float] = []
    together: list[float] = []
    for number in range(passes):
        speed.warm_up()
        alone.append(speed.single_s(count))
        together.append(speed.multi_s(count, threads))
        if tell:
            tell(number + 1, passes)
    return Baseline(
        version=speed.VERSION,
        units=count,
        threads=threads,
        single_s=_cold(alone),
        multi_s=_cold(together),
        single_spread=_spread(alone),
        multi_spread=_spread(together),
        python=platform.python_version(),
        zlib=zlib.ZLIB_RUNTIME_VERSION,
        wall_ns=time.time_ns(),
        cpu_temp_c=cpu_temp_c,
        clock_cap_ratio=clock_cap_ratio,
        passes=passes,
    )


def _cold(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 4]


def _spread(values: Sequence[float]) -> float:
    ordered = sorted(values)
    edge = len(ordered) // 10
    return (ordered[-1 - edge] - ordered[edge]) / statistics.median(ordered)
