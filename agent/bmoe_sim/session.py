"""Session mode: requests from stdin, control lines on stdout, one model and one warm cache between them.

Comes in: stdin, an engine. Goes out: BMOE_READY, then BMOE_BEGIN and BMOE_DONE, BMOE_DECIDE or BMOE_ERROR for each
request (contract: Session mode), and the exit status. A reader thread queues requests and applies `cancel` at once: one
that arrives while nothing runs is lost. End of input lets the current turn and every queued one finish.
"""

import json
import math
import os
import queue
import random
import threading
import time

from bmoe_sim import requests, summary
from bmoe_sim.engine import Engine, Request
from bmoe_sim.faults import FatalError
from bmoe_sim.output import Output
from bmoe_sim.row import escape
from bmoe_sim.telling import Teller
from bmoe_sim.words import count_tokens

_TEMPLATE_TOKENS = 9  # what a chat template adds to a message


def error_line(request: int, message: str, *, fatal: bool) -> bytes:
    """A BMOE_ERROR line."""
    word = "true" if fatal else "false"
    return b'BMOE_ERROR {"id":%d,"fatal":%s,"msg":"%s"}\n' % (
        request,
        word.encode(),
        escape(message.encode("utf-8", "surrogateescape")),
    )


class Session:
    """Serves requests until close, end of input or a fatal error."""

    def __init__(self, engine: Engine, output: Output) -> None:
        self._engine, self._output = engine, output
        self._teller = Teller(output, engine.settings, lines=True, streaming=engine.o.moe_stream)
        self._queue: queue.SimpleQueue[requests.Command | None] = queue.SimpleQueue()
        self._cancel = threading.Event()
        self._conversation = b""
        self._n_past = 0
        self._answer_tokens = 0
        self._prefix: bytes | None = None

    def run(self) -> int:
        """Serve; the exit status."""
        e = self._engine
        ready = {
            "load_s": round(e.load_s, 3),
            "arch": e.model.arch,
            "n_ctx": e.o.n_ctx,
            "think_ctl": e.settings.think_ctl,
            "n_expert_used": e.o.n_expert_used,
        }
        self._output.write(b"BMOE_READY " + json.dumps(ready, separators=(",", ":")).encode() + b"\n")
        threading.Thread(target=self._read, name="stdin", daemon=True).start()
        while True:
            command = self._queue.get()
            if command is None:
                return 0
            self._output.write(b'BMOE_BEGIN {"id":%d}\n' % command.id)
            self._cancel.clear()  # what came before this turn began is lost
            try:
                if command.cmd == "decide":
                    self._decide(command)
                else:
                    self._generate(command)
            except FatalError as fatal:
                self._output.write(error_line(command.id, str(fatal), fatal=True))
                return 1

    def _read(self) -> None:
        waiting = b""
        while True:
            data = os.read(0, 65536)
            if not data:
                break
            *lines, waiting = (waiting + data).split(b"\n")
            for line in lines:
                if not self._accept(line):
                    return
        if waiting:
            self._accept(waiting)
        self._queue.put(None)

    def _accept(self, line: bytes) -> bool:
        e = self._engine
        command = requests.parse(line, e.o.n_predict, think=e.o.think)
        if command is None:
            return True
        if command.cmd == "cancel":
            self._cancel.set()
        elif command.cmd == "close":
            self._queue.put(None)
            return False
        elif command.cmd == "generate" or (command.cmd == "decide" and not e.settings.old):
            self._queue.put(command)
        return True

    def _wait(self, deadline: float) -> bool:
        return self._cancel.wait(max(0.0, deadline - time.monotonic()))

    def _generate(self, command: requests.Command) -> None:
        e = self._engine
        if not command.prompt:
            self._output.write(error_line(command.id, "empty prompt", fatal=False))
            return
        n_prompt = count_tokens(command.prompt) + _TEMPLATE_TOKENS
        kept, conversation = 0, b""
        if not command.clear_kv:
            # The history is rendered anew: the prompt's cells are kept, the answer's are prefilled again.
            kept = self._n_past - self._answer_tokens
            n_prompt += self._answer_tokens
            conversation = self._conversation
        if kept + n_prompt + command.n_predict > e.o.n_ctx:
            message = (
                f"prompt + n_predict exceeds the session n_ctx ({e.o.n_ctx}); open the session with a larger n_ctx"
            )
            self._output.write(error_line(command.id, message, fatal=False))
            return
        conversation += command.prompt
        request = Request(conversation, n_prompt, max(0, command.n_predict), command.think, kept)
        done = e.generate(request, self._teller.emit, self._wait)
        self._conversation = conversation + done.text
        self._n_past, self._answer_tokens = done.n_past, done.tokens
        self._output.write(summary.done(done, command.id, e.settings))

    def _decide(self, command: requests.Command) -> None:
        e = self._engine
        prefix, suffix = count_tokens(command.prefix), count_tokens(command.suffix)
        n_tokens = prefix + suffix + _TEMPLATE_TOKENS
        firsts = [choice.strip()[:6] for choice in command.choices]
        problem = ""
        if not e.o.decide:
            problem = "decide: the session was opened without --decide"
        elif not command.choices:
            problem = "decide: no choices"
        elif len(set(firsts)) < len(firsts):
            problem = "decide: two choices share their first token"
        elif n_tokens > e.o.n_ctx:
            problem = f"decide: the prompt exceeds the session n_ctx ({e.o.n_ctx})"
        if problem:
            self._output.write(error_line(command.id, problem, fatal=False))
            return
        keeps = e.o.decide_prefix_cache != "off" and command.reuse_prefix
        reused = prefix if keeps and self._prefix == command.prefix else 0
        seed = f"{command.prefix!r} {command.suffix!r}"
        _, cost = e.prefill_batch(e.router(seed), n_tokens - reused, reused, trace=False)
        cancelled = self._wait(time.monotonic() + cost.seconds)
        self._prefix = command.prefix if keeps else None
        scores = [random.Random(f"{seed} {choice!r}").gauss(0.0, 2.0) for choice in command.choices]
        mass = math.log(sum(math.exp(score) for score in scores)) + 0.1  # some mass is always elsewhere
        logp = [None if b"\0" in c else round(s - mass, 6) for c, s in zip(command.choices, scores, strict=True)]
        best = max(range(len(logp)), key=lambda i: -math.inf if logp[i] is None else logp[i] or 0.0)
        device = bool(e.o.prefill_device) and not e.settings.device_idle
        routed = len(e.model.moe_layers) * e.o.n_expert_used * 2 if device and e.o.prefill_routed else 0
        line = {
            "id": command.id,
            "cancelled": cancelled,
            "best": -1 if cancelled else best,
            "choice_logp": [] if cancelled else logp,
            "n_tokens": n_tokens,
            "n_reused": reused,
            "n_prefilled": n_tokens - reused,
            "restore_s": 0.001 if reused else 0.0,
            "store_s": 0.002 if keeps and not reused else 0.0,
            "prefill_s": round(cost.seconds, 3),
            "prefill_cpu_s": round(cost.cpu, 3),
            "prefill_read_mib": round(cost.read_mib, 1),
            "prefill_io_s": round(cost.io, 3),
            "prefill_stall_s": round(cost.stall, 3),
            "prefill_mgmt_s": round(cost.mgmt, 3),
            "prefill_dev_tokens": n_tokens - reused if device else 0,
            "prefill_dev_read_mib": round(cost.read_mib, 1) if device else 0.0,
            "prefill_dev_stall_s": round(0.3 * cost.seconds, 3) if device else 0.0,
            "prefill_dev_routed": routed,
            "prefill_dev_demand": routed // 5,
            "prefix_state_mib": round(prefix * 0.05, 1) if keeps else 0.0,
        }
        self._output.write(b"BMOE_DECIDE " + json.dumps(line, separators=(",", ":")).encode() + b"\n")
