"""The expert streamer: a cache of experts in anonymous memory, filled by real reads of the model file.

Comes in: one batch of routings at a time (the prompt, a token, or a verified group). Goes out: `Batch` with the reads
that were made, the routing rows as the trace has them, and what the cache did. Counters are cumulative for the
process, as the contract's `cache_hit_pct` is.

Accounting follows the contract's "Route trace" section: a batch looks each (layer, expert) up once and reads it once;
every routing that faced a miss keeps residency 0, only the first carries the bytes; a dropped routing is never looked
up. Reads are aligned windows: `expert_bytes` counts what was wanted, `read_bytes` what was pulled.
"""

import mmap
import random
from collections import OrderedDict
from dataclasses import dataclass, field

from bmoe_sim.argv import Options
from bmoe_sim.memory import anonymous
from bmoe_sim.model import Model, Span
from bmoe_sim.router import Router, Routing

_MIB = 1 << 20


@dataclass(slots=True)
class Read:
    """One row of the I/O trace, its latency filled in by the clock."""

    layer: int
    expert: int
    proj: int
    lane: int
    spec: int
    offset: int
    req_bytes: int
    read_bytes: int
    latency_ns: int = 0


@dataclass(slots=True)
class Routed:
    """One row of the route trace."""

    step: int
    layer: int
    slot: int
    expert: int
    weight: float
    residency: int
    expert_bytes: int
    dropped: int


@dataclass(slots=True)
class Batch:
    """What one decode of one or many tokens cost the streamer."""

    reads: list[Read] = field(default_factory=list)
    routed: list[Routed] = field(default_factory=list)
    demand_bytes: int = 0  # routed, where cache hits start
    widest_layer_bytes: int = 0
    adopted: int = 0  # speculative reads waited for by their own commitment

    @property
    def read_bytes(self) -> int:
        """Flash bytes pulled."""
        return sum(r.read_bytes for r in self.reads)


@dataclass(slots=True)
class Counters:
    """Cumulative for the process; a generation reports differences."""

    lookups: int = 0
    hits: int = 0
    evictions: int = 0
    rereads: int = 0
    spec_bytes: int = 0
    spec_experts: int = 0
    spec_useful: int = 0
    routed: int = 0
    dropped: int = 0
    reranked: int = 0
    substituted: int = 0
    ra_committed: int = 0
    ra_passed: int = 0
    ra_slots: int = 0
    ra_agreed: int = 0

    def since(self, before: "Counters") -> "Counters":
        """The difference to an earlier copy."""
        return Counters(*(getattr(self, n) - getattr(before, n) for n in self.__slots__))

    def copy(self) -> "Counters":
        """A snapshot."""
        return Counters(*(getattr(self, n) for n in self.__slots__))


class Streamer:
    """The cache and its reads. With streaming off it routes nothing and costs nothing."""

    def __init__(self, model: Model, options: Options, seed: int) -> None:
        self.model = model
        self.options = options
        self.count = Counters()
        self._rng = random.Random(f"streamer {seed}")
        slot = model.slot_bytes()
        self._slot = -(-slot // mmap.PAGESIZE) * mmap.PAGESIZE
        self.slots = options.cache_mb * _MIB // self._slot if options.moe_stream and self._slot else 0
        self._resident: OrderedDict[tuple[int, int], int] = OrderedDict()  # -> slot, oldest first
        self._spec: set[tuple[int, int]] = set()
        self._free: list[int] = list(range(self.slots - 1, -1, -1))
        self._seen: set[tuple[int, int]] = set()
        self._lane = 0
        self._last: dict[int, Routing] = {}
        # Reserved at once, touched a slot at a time: resident memory grows as the cache fills, as the engine's does.
        self._memory = anonymous(self.slots * self._slot) if self.slots else None
        self._staging = anonymous(self._slot) if self._slot else None

    @property
    def cached(self) -> bool:
        """Whether a cache is in use at all."""
        return self.options.moe_stream and self.options.cache_mb > 0 and not self.options.load_all

    @property
    def hit_pct(self) -> float:
        """The cumulative hit rate, -1 without a cache (contract: Per-token lines)."""
        if not self.cached:
            return -1.0
        return 100.0 * self.count.hits / self.count.lookups if self.count.lookups else 0.0

    @property
    def resident_mib(self) -> float:
        """What the cache holds."""
        return len(self._resident) * self._slot / _MIB

    def prefill(self, tokens: list[dict[int, Routing]], first_step: int) -> Batch:
        """The prompt in one batch. The last layer routes only the last token (contract: Route trace)."""
        batch = Batch()
        layers = self.model.moe_layers
        for layer in layers:
            chosen = list(enumerate(tokens, first_step))
            if layer == layers[-1]:
                chosen = chosen[-1:]
            self._layer(batch, layer, [(step, token[layer]) for step, token in chosen], decode=False)
        if tokens:
            self._last = tokens[-1]
        return batch

    def decode(self, tokens: list[dict[int, Routing]], first_step: int, router: Router, *, first: bool) -> Batch:
        """One decode: a token, or the tokens a verify decode confirms."""
        batch = Batch()
        o = self.options
        for depth, layer in enumerate(self.model.moe_layers):
            wanted = [(first_step + i, token[layer]) for i, token in enumerate(tokens)]
            if o.load_all:
                for expert in range(self.model.n_expert):
                    self._read(batch, layer, expert, spec=False)
            if o.route_ahead and self.cached:
                wanted = self._commit(batch, layer, wanted, router, passed=first or depth < o.route_ahead)
            elif self.cached and o.prefetch and layer in self._last:
                # the bet on the token before, as good as the text is steady
                self._speculate(batch, layer, router.blur(self._last[layer], 0.7, self._rng))
            elif self.cached and o.predict_prefetch:
                guess = router.blur(wanted[0][1], 0.85, self._rng)[: o.predict_spec_max]
                self._speculate(batch, layer, guess)
            self._layer(batch, layer, wanted, decode=True)
        self._last = tokens[-1]
        return batch

    def _commit(
        self, batch: Batch, layer: int, wanted: list[tuple[int, Routing]], router: Router, *, passed: bool
    ) -> list[tuple[int, Routing]]:
        if passed:
            self.count.ra_passed += len(wanted)
            return wanted
        out = []
        for step, routing in wanted:
            committed = router.blur(routing, 0.94, self._rng)
            self.count.ra_committed += 1
            self.count.ra_slots += len(routing)
            self.count.ra_agreed += len({e for e, _ in routing} & {e for e, _ in committed})
            batch.adopted += self._speculate(batch, layer, committed)
            out.append((step, committed))
        return out

    def _speculate(self, batch: Batch, layer: int, routing: Routing) -> int:
        read = 0
        for expert, _ in routing:
            if (layer, expert) in self._resident or not self.slots:
                continue
            self.count.spec_experts += 1
            self.count.spec_bytes += self._read(batch, layer, expert, spec=True)
            self._spec.add((layer, expert))
            read += 1
        return read

    def _layer(self, batch: Batch, layer: int, wanted: list[tuple[int, Routing]], *, decode: bool) -> None:
        o, count = self.options, self.count
        size = self.model.expert_bytes(layer)
        answers: dict[int, int] = {}  # expert -> residency, looked up once in a batch
        threshold = o.drop_cold / o.n_expert_used if o.drop_cold and (decode or o.drop_in_prefill) else 0.0
        unique: set[int] = set()
        for step, routing in wanted:
            if decode and o.substitute and self.cached:
                routing = self._substitute(layer, routing)
            for slot, (expert, weight) in enumerate(routing):
                key = (layer, expert)
                unique.add(expert)
                if decode and o.drop_cold:
                    count.routed += 1
                known = answers.get(expert)
                if known is None and threshold and weight < threshold and key not in self._resident:
                    count.dropped += 1 if decode else 0
                    batch.routed.append(Routed(step, layer, slot, expert, weight, 0, 0, 1))
                    continue
                paid = 0
                if known is None:
                    known = self._look_up(key)
                    answers[expert] = known
                    if known == 0:
                        paid = size
                        if not o.load_all or not decode:
                            self._read(batch, layer, expert, spec=False)
                batch.routed.append(Routed(step, layer, slot, expert, weight, known, paid, 0))
        batch.demand_bytes += len(unique) * size
        batch.widest_layer_bytes = max(batch.widest_layer_bytes, len(unique) * size)

    def _substitute(self, layer: int, routing: Routing) -> Routing:
        out: Routing = []
        taken = {expert for expert, _ in routing}
        resident = [e for at, e in self._resident if at == layer and e not in taken]
        for expert, weight in routing:
            self.count.reranked += 1
            if (layer, expert) not in self._resident and resident and self._rng.random() < self.options.substitute:
                self.count.substituted += 1
                expert = resident.pop()
            out.append((expert, weight))
        return out

    def _look_up(self, key: tuple[int, int]) -> int:
        if not self.cached:
            return 0
        self.count.lookups += 1
        if key not in self._resident:
            return 0
        self.count.hits += 1
        self._resident.move_to_end(key)
        if key in self._spec:
            self._spec.discard(key)
            self.count.spec_useful += 1
            return 2
        return 1

    def _slot_for(self, key: tuple[int, int]) -> memoryview:
        if not self.slots or not self.cached:
            assert self._staging is not None
            return memoryview(self._staging)
        if self._free:
            slot = self._free.pop()
        else:
            old, slot = self._resident.popitem(last=False)
            self._spec.discard(old)
            self.count.evictions += 1
        if key in self._seen:
            self.count.rereads += 1
        self._seen.add(key)
        self._resident[key] = slot
        assert self._memory is not None
        return memoryview(self._memory)[slot * self._slot : (slot + 1) * self._slot]

    def _read(self, batch: Batch, layer: int, expert: int, *, spec: bool) -> int:
        memory = self._slot_for((layer, expert))
        total = at = 0
        spans: list[Span] = self.model.expert(layer, expert)
        for proj, span in enumerate(spans):
            pulled = self.model.read(span, memory[at:])
            at += span.window[1]
            lane, self._lane = self._lane, (self._lane + 1) % self.options.io_threads
            batch.reads.append(Read(layer, expert, proj, lane, int(spec), span.offset, span.size, pulled))
            total += pulled
        return total
