"""How long things take: drawn from a seed, and consistent with the bytes that were really read.

Comes in: a streamer's batch and how many tokens it confirmed. Goes out: `Cost` in milliseconds, each term already
rounded to the three decimals the CSV carries, so that the contract's identities hold in the file itself:

    serial   wall = io + mgmt + compute              io = summed latencies / lanes
    overlap  wall = stall + mgmt + compute           io = summed latencies, which may exceed wall

`drain`, `ra_issue` and `ra_wd` are slices of compute, `adopt` one of mgmt (contract: Per-token rows). A streamed token
takes 0.55 / tok_s of compute and, if every expert misses, 0.9 / tok_s of flash; a plain mmap run 1 / tok_s.
"""

import math
import random
from dataclasses import dataclass

from bmoe_sim.argv import Options
from bmoe_sim.model import Model
from bmoe_sim.settings import Settings
from bmoe_sim.streamer import Batch


@dataclass(slots=True)
class Cost:
    """One decode, in milliseconds."""

    wall: float = 0.0
    io: float = 0.0
    compute: float = 0.0
    stall: float = 0.0
    mgmt: float = 0.0
    cpu: float = 0.0
    drain: float = 0.0
    adopt: float = 0.0
    ra_issue: float = 0.0
    ra_wd: float = 0.0
    overhead: float = 0.0
    draft: float = 0.0


@dataclass(slots=True)
class PrefillCost:
    """One prompt, in seconds; the names are the contract's prefill_* keys."""

    seconds: float = 0.0
    cpu: float = 0.0
    read_mib: float = 0.0
    io: float = 0.0
    stall: float = 0.0
    mgmt: float = 0.0


def _r(value: float) -> float:
    return round(value, 3)


class Timing:
    """Draws costs; one per process, its random numbers its own."""

    def __init__(self, model: Model, options: Options, settings: Settings) -> None:
        self._o = options
        self._s = settings
        self._rng = random.Random(f"timing {settings.seed}")
        self._drift = 0.0
        self._base_ms = 1000.0 / settings.tok_s
        # what one token reads when everything misses: the yardstick of flash time
        self._all_miss = max(1, model.cycle_bytes(max(1, options.n_expert_used)))

    def _factor(self) -> float:
        # An AR(1) in the log: tokens inside a run are correlated, as published runs are (0.11 to 0.50).
        self._drift = 0.3 * self._drift + self._s.noise * self._rng.gauss(0.0, 1.0) * 0.954
        return math.exp(self._drift)

    def _latencies(self, batch: Batch) -> float:
        """Give every read its latency; their sum in milliseconds."""
        total = 0.0
        per_byte = 0.9 * self._base_ms * 1e6 * self._o.io_threads / self._all_miss
        for read in batch.reads:
            ns = int(read.read_bytes * per_byte * math.exp(self._rng.gauss(0.0, 0.25))) + 1
            read.latency_ns = ns
            total += ns
        return total / 1e6

    def _stalled(self, lanes_ms: float) -> float:
        # Never hidden whole: the first missed expert's read starts after routing (contract: stall_ms).
        return lanes_ms * self._rng.uniform(0.35, 0.6)

    def decode(self, batch: Batch, group: int, *, drafted: int, clamp: bool = False, effect: float = 1.0) -> Cost:
        """The cost of one decode that confirmed `group` tokens after drafting `drafted`; `effect` scales its compute."""
        o = self._o
        cost = Cost()
        busy = self._latencies(batch)
        lanes = busy / o.io_threads
        cost.io = _r(busy if o.overlap else lanes)
        cost.stall = _r(self._stalled(lanes)) if o.overlap else 0.0
        compute = self._base_ms * (0.55 if o.moe_stream else 1.0) * self._factor() * (1.0 + 0.15 * (group - 1)) * effect
        if o.compute_trace:
            compute *= 1.1 if o.compute_layers else 2.5  # the barriers' own cost
        if o.moe_stream:
            cost.mgmt = _r(0.02 * lanes + 0.0002 * self._base_ms)
        if batch.adopted:
            cost.adopt = _r(0.1 * lanes)
            cost.mgmt = _r(cost.mgmt + cost.adopt)
        if o.route_ahead:
            cost.ra_issue = _r(0.01 * compute)
            cost.ra_wd = _r(0.005 * compute)
        if o.overlap:
            cost.drain = _r(0.03 * lanes)
        cost.compute = _r(max(compute, cost.drain + cost.ra_issue + cost.ra_wd))
        waited = cost.stall if o.overlap else cost.io
        cost.wall = _r(waited + cost.mgmt + cost.compute)
        if clamp:
            cost.mgmt = _r(cost.wall - waited + 0.2)
            cost.compute = 0.0
            cost.drain = cost.ra_issue = cost.ra_wd = 0.0
        cost.cpu = _r(min(compute * o.threads * 0.93 + 0.15 * busy, cost.wall * (o.threads + o.io_threads)))
        if drafted and o.spec == "mtp":
            cost.draft = _r(0.08 * self._base_ms * drafted)
        elif o.spec == "ngram":
            cost.draft = 0.002
        cost.overhead = _r(0.004 * self._base_ms * self._rng.uniform(0.5, 1.5) + cost.draft)
        return cost

    def measured(self, batch: Batch, *, read_ms: float, compute_ms: float, cpu_ms: float) -> Cost:
        """The cost of a decode that really computed: what the clock said."""
        each = int(read_ms * 1e6 / len(batch.reads)) if batch.reads else 0
        for read in batch.reads:
            read.latency_ns = each
        cost = Cost(io=_r(read_ms), compute=_r(compute_ms), cpu=_r(cpu_ms))
        cost.stall = cost.io if self._o.overlap else 0.0
        cost.wall = _r(cost.io + cost.compute)
        return cost

    def prefill(self, batch: Batch, n_prompt: int) -> PrefillCost:
        """The cost of a prompt of `n_prompt` tokens."""
        cost = PrefillCost(read_mib=batch.read_bytes / (1 << 20))
        seconds = self._s.prefill_s
        if seconds is None:
            seconds = n_prompt * self._base_ms / 1e4 * self._factor()
        busy = self._latencies(batch) / 1e3
        if batch.reads and busy > 0:
            # The prompt's reads fill at most half of it: scale them rather than let them exceed the time there was.
            lanes = busy / self._o.io_threads
            scale = min(1.0, 0.5 * seconds / lanes)
            for read in batch.reads:
                read.latency_ns = int(read.latency_ns * scale)
            lanes *= scale
            cost.io = lanes * self._o.io_threads if self._o.overlap else lanes
            cost.stall = self._stalled(lanes) if self._o.overlap else 0.0
            cost.mgmt = 0.02 * lanes
        cost.seconds = seconds
        cost.cpu = (seconds - cost.mgmt) * 0.9 * self._o.threads
        return cost

    def major_faults(self) -> int:
        """How many major faults this decode had: geometric about the mean that was set."""
        mean = self._s.majflt
        if mean <= 0:
            return 0
        return int(math.log(max(self._rng.random(), 1e-12)) / math.log(mean / (1.0 + mean)))
