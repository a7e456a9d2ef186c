"""The simulated engine: a loaded model, its cache and the generations made on it.

Comes in: options, settings, requests. Goes out: rows to a callback, files through the sinks, a `Summary` for each
generation. One-shot and session mode share it.
"""

import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from bmoe_sim import model as models
from bmoe_sim import summary as texts
from bmoe_sim.argv import Options, RefusedError
from bmoe_sim.burn import Burner
from bmoe_sim.faults import reach
from bmoe_sim.memory import Memory, anonymous
from bmoe_sim.output import complain
from bmoe_sim.router import Router, Routing
from bmoe_sim.row import Row, Summary
from bmoe_sim.settings import Settings
from bmoe_sim.sinks import Sinks
from bmoe_sim.streamer import Batch, Streamer
from bmoe_sim.timing import Cost, PrefillCost, Timing
from bmoe_sim.words import Pieces

_MIB = 1 << 20
_PROBE_EVERY = 30  # decodes between two looks at dense residency: the engine throttles it too
_PREFILL_ROUTED_MOST = 256  # positions routed for a long prompt that nobody traces
_CHUNK = 1 << 20
_LATE_S = 0.25

Emit = Callable[[Row, bytes, bytes, bytes, bool], None]
"""(row, the token's bytes, text delta, reasoning delta, reset)."""
Wait = Callable[[float], bool]
"""Wait until a CLOCK_MONOTONIC time; True when the generation was cancelled."""


@dataclass
class Request:
    """One generation."""

    seed_text: bytes
    n_prompt: int
    n_predict: int
    think: bool
    n_kept: int = 0  # context kept from before this turn


def sleep_until(deadline: float) -> bool:
    """A `Wait` nobody can cancel."""
    left = deadline - time.monotonic()
    if left > 0:
        time.sleep(left)
    return False


class Engine:
    """A loaded model. Raises RefusedError or ModelError while loading, FatalError while generating."""

    def __init__(self, options: Options, settings: Settings, copies: str) -> None:
        self.o, self.settings = options, settings
        began = time.monotonic()
        reach(settings, "load")
        self.model = models.load(options.model)
        self._resolve()
        self.model.map()
        self.model.open(direct=options.odirect)
        self._dense = self._load_dense()
        self.streamer = Streamer(self.model, options, settings.seed)
        self.timing = Timing(self.model, options, settings)
        self.sinks = Sinks(self.model, options, settings, copies)
        self.memory = Memory()
        self.burner = Burner(options.threads, settings.burn_mib, pin=settings.pin) if settings.burn else None
        self.turn = 0
        self.token = 0  # of the process, for faults
        self._decodes = 0
        self._dense_frac = -1.0
        sleep_until(began + settings.load_s)
        self.load_s = max(settings.load_s, time.monotonic() - began) if settings.burn else settings.load_s
        if options.moe_stream:
            complain(
                f"bmoe: expert streaming ON  n_expert={self.model.n_expert} o_direct={int(self.model.o_direct)} "
                f"io_threads={options.io_threads} cache={options.cache_mb} MiB shards={len(self.model.paths)}"
            )
            cycle_mib = self.model.cycle_bytes(options.n_expert_used) / _MIB
            if 0 < options.cache_mb < cycle_mib:
                complain(
                    f"warning: the cache ({options.cache_mb} MiB) is smaller than one token's routed bytes "
                    f"({cycle_mib:.0f} MiB): the hit rate will be near zero"
                )

    def _resolve(self) -> None:
        o, model = self.o, self.model
        complain(
            f"llama_model_loader: loaded meta data with {model.n_keys} key-value pairs and {model.n_tensors} tensors "
            f"from {o.model} (version GGUF V3 (latest))"
        )
        complain("bmoe-sim: this is a simulator; no number it prints was measured on a model")
        o.n_expert_used = min(o.n_expert_used or model.n_expert_used, model.n_expert)
        if o.moe_stream and not model.experts:
            raise RefusedError(1, f"error: expert streaming: architecture '{model.arch}' has no experts to stream")
        if o.cache_auto:
            slots = -(-model.slot_bytes() * model.n_expert * len(model.moe_layers) // _MIB) + 1
            room = int(Memory().read().get("mem_available_mib", 0.0)) - o.cache_floor_mb
            o.cache_mb = max(1, min(slots, room if room > 0 else slots, o.cache_ceil_mb or slots))

    def _load_dense(self) -> object:
        """Bring the dense weights where the policy wants them; what it returns keeps the memory alive."""
        model, policy = self.model, self.o.dense_weights
        if not self.o.moe_stream or policy == "mmap":
            return None
        if policy == "warm":
            model.touch(model.dense)
            return None
        size = sum(span.size for span in model.dense)
        held = anonymous(max(size, 1))
        view = memoryview(held)
        at = 0
        fds = [os.open(p, os.O_RDONLY | os.O_CLOEXEC) for p in model.paths]
        for span in model.dense:
            for done in range(0, span.size, _CHUNK):
                part = min(_CHUNK, span.size - done)
                at += os.preadv(fds[span.shard], [view[at : at + part]], span.offset + done)
        for fd in fds:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
        complain(f"bmoe: dense-weights={policy} — {size // _MIB} MiB in {len(model.dense)} anon buffers")
        return held

    def _text_seed(self, request: Request) -> str:
        o = self.o
        # Greedy text is the prompt's alone; settings that only change how weights are fetched keep it, lossy ones do not.
        lossy = [o.n_expert_used, o.drop_cold, o.drop_renorm if o.drop_cold else True, o.substitute, o.route_ahead]
        luck: object = ""
        if o.temp > 0:
            luck = random.SystemRandom().random() if o.seed == 4294967295 else o.seed
        return f"{request.seed_text!r} {lossy} {luck}"

    def prefill_batch(
        self, router: Router, n_prompt: int, first_step: int, *, trace: bool
    ) -> tuple[Batch, PrefillCost]:
        """Stream a prompt's experts and price it."""
        batch = Batch()
        if self.o.moe_stream and n_prompt:
            routed = n_prompt if self.sinks.route and trace else min(n_prompt, _PREFILL_ROUTED_MOST)
            first = first_step + n_prompt - routed
            batch = self.streamer.prefill([router.token() for _ in range(routed)], first)
        elif n_prompt:
            self.model.touch(self.model.all_spans())
        return batch, self.timing.prefill(batch, n_prompt)

    def router(self, seed: str) -> Router:
        """The routing of a text."""
        return Router(f"{self.settings.seed} {seed}", self.model.moe_layers, self.model.n_expert, self.o.n_expert_used)

    def generate(self, request: Request, emit: Emit, wait: Wait = sleep_until) -> Summary:
        """Prefill and decode, calling `emit` for every token; the turn is counted when it comes back."""
        o, settings = self.o, self.settings
        began = time.monotonic()
        reach(settings, "prefill")
        seed = self._text_seed(request)
        pieces = Pieces(seed, settings.text)
        router = self.router(seed)
        before = self.streamer.count.copy()
        s = Summary(request.n_prompt, self.load_s, self.turn, budget_mib=float(o.cache_mb))
        batch, s.prefill = self.prefill_batch(router, request.n_prompt, request.n_kept, trace=True)
        here = request.n_kept + request.n_prompt
        self.sinks.batch(
            batch, turn=self.turn, phase=0, last_step=here - 1, compute_ms=s.prefill.seconds * 500, majflt=0
        )
        self._device(s)
        after_prefill = self.streamer.count.copy()
        deadline = began + s.prefill.seconds
        s.cancelled = wait(deadline)
        text = reasoning = b""
        spec = random.Random(f"drafts {settings.seed} {seed}")
        index = 0
        while index < request.n_predict and not s.cancelled:
            group, drafted = self._draft(spec, request.n_predict - index)
            said: list[bytes] = []
            for i in range(group):
                last = index + i == request.n_predict - 1
                half = settings.fault("half_char", self.token + i + 1) is not None
                piece = None if 0 < settings.eog <= index + i else pieces.next(last=last, half=half)
                if piece is None:
                    break
                said.append(piece)
            if not said:
                break
            cost, batch = self._decode(router, len(said), here + index, drafted, first=index == 0)
            s.decodes += 1
            s.drafted += drafted
            s.drafted_steps += drafted > 0
            s.demand_bytes += batch.demand_bytes
            s.widest_layer_bytes = max(s.widest_layer_bytes, batch.widest_layer_bytes)
            deadline += (cost.wall + cost.overhead) / 1e3
            if not self.burner:
                s.cancelled = wait(deadline)
            elif wait(0.0):
                s.cancelled = True
            late = time.monotonic() - deadline
            if late > _LATE_S:
                deadline += late  # stopped, frozen or starved: go on at pace, never catch up in a burst
            majflt = self.timing.major_faults()
            self.sinks.batch(
                batch,
                turn=self.turn,
                phase=1,
                last_step=here + index + len(said) - 1,
                compute_ms=cost.compute,
                majflt=majflt,
            )
            memory = self.memory.read()
            for i, piece in enumerate(said):
                index += 1
                self.token += 1
                reach(settings, self.token)
                row = Row(index, request.n_predict, self.streamer.hit_pct, self.turn, float(o.cache_mb))
                for name, mib in memory.items():
                    setattr(row, name, mib)
                row.mtp_batch = len(said)
                if i == 0:
                    self._charge(row, cost, batch, majflt)
                thinks = index <= settings.reason and o.chatml and settings.think_ctl != "none" and request.think
                reset = index == settings.reset
                if reset:
                    reasoning, text = reasoning + text + piece, b""
                    delta_text, delta_reasoning = b"", reasoning
                elif thinks:
                    reasoning += piece
                    delta_text, delta_reasoning = b"", piece
                else:
                    text += piece
                    delta_text, delta_reasoning = piece, b""
                s.add(row)
                emit(row, piece, delta_text, delta_reasoning, reset)
                if self.sinks.csv:
                    arm = settings.arm(self.token - 1) if settings.arms else ()
                    self.sinks.csv.write(row.csv(*arm))
        s.text, s.reasoning = text, reasoning
        s.overhead_ms += 0.05 if s.tokens else 0.0  # the tail after the last token, which no row carries
        s.n_past = here + s.tokens
        s.hit_pct, s.resident_mib = self.streamer.hit_pct, self.streamer.resident_mib
        s.count = self.streamer.count.since(after_prefill)
        churn = self.streamer.count.since(before)
        s.count.evictions, s.count.rereads = churn.evictions, churn.rereads
        self._rows(s)
        if self.sinks.csv:
            self.sinks.csv.write(texts.trailer(s, settings))
        self.turn += 1
        return s

    def _draft(self, rng: random.Random, left: int) -> tuple[int, int]:
        """(tokens the next decode confirms, tokens drafted for it)."""
        o = self.o
        most = min(o.draft, left - 1)
        if o.spec == "off" or most < 1 or (o.spec == "ngram" and rng.random() >= 0.35):
            return 1, 0
        rate = 0.75 if o.spec == "mtp" else 0.9
        accepted = 0
        while accepted < most and rng.random() < rate:
            accepted += 1
        return 1 + accepted, most

    def _decode(self, router: Router, group: int, step: int, drafted: int, *, first: bool) -> tuple[Cost, Batch]:
        began, cpu = time.monotonic(), time.process_time()
        batch = Batch()
        if self.o.moe_stream:
            tokens: list[dict[int, Routing]] = [router.token() for _ in range(group)]
            batch = self.streamer.decode(tokens, step, router, first=first)
        self._decodes += 1
        if not self.burner:
            clamp = any(self.settings.fault("clamp", self.token + i + 1) for i in range(group))
            effect = self.settings.arm_effect if self.settings.arms and self.settings.arm(self.token)[0] else 1.0
            return self.timing.decode(batch, group, drafted=drafted, clamp=clamp, effect=effect), batch
        read_done = time.monotonic()
        self.burner.token()
        now = time.monotonic()
        read_ms = (read_done - began) * 1e3 if batch.reads else 0.0
        cost = self.timing.measured(
            batch,
            read_ms=read_ms,
            compute_ms=(now - began) * 1e3 - read_ms,
            cpu_ms=(time.process_time() - cpu) * 1e3,
        )
        return cost, batch

    def _charge(self, row: Row, cost: Cost, batch: Batch, majflt: int) -> None:
        """A group's whole cost goes to its first row (contract: mtp_batch)."""
        row.wall_ms, row.io_ms, row.compute_ms = cost.wall, cost.io, cost.compute
        row.stall_ms, row.mgmt_ms, row.cpu_ms = cost.stall, cost.mgmt, cost.cpu
        row.drain_ms, row.adopt_ms = cost.drain, cost.adopt
        row.ra_issue_ms, row.ra_wd_ms = cost.ra_issue, cost.ra_wd
        row.loop_overhead_ms, row.mtp_draft_ms = cost.overhead, cost.draft
        row.read_bytes = batch.read_bytes
        row.majflt = majflt
        row.majflt_mib = majflt * os.sysconf("SC_PAGE_SIZE") / _MIB
        if self.o.moe_stream:
            if self._decodes % _PROBE_EVERY == 0 and row.rss_anon_mib + row.swap_mib > 0:
                self._dense_frac = row.rss_anon_mib / (row.rss_anon_mib + row.swap_mib)
            row.dense_resident_frac = self._dense_frac

    def _device(self, s: Summary) -> None:
        if not self.o.prefill_device or self.settings.old or self.settings.device_idle:
            return
        s.dev_tokens = s.n_prompt
        s.dev_nodes = 20 * self.model.n_layer
        if self.o.moe_stream:
            s.dev_read_mib = s.prefill.read_mib
            s.dev_stall_s = 0.3 * s.prefill.seconds

    def _rows(self, s: Summary) -> None:
        """The row-gathered tables' account, and the failed reads that were asked for."""
        failed = self.settings.any_fault("failrows")
        if not self.o.moe_stream or not (failed or (self.o.row_stream and self.model.row_table_bytes)):
            return
        s.row_table_mib = max(1.0, self.model.row_table_bytes / _MIB)
        s.row_rows = s.n_prompt + s.tokens
        s.row_reads = s.row_rows
        s.row_read_mib = s.row_reads * 4096 / _MIB
        s.row_errors = int(failed.arg or 1) if failed else 0
