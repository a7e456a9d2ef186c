"""When a running engine has to be stopped. Pure: progress goes in with its time, a verdict comes out.

In: `Progress` several times a minute at least, and the bounds of the cell. Out: None, or one `Verdict` naming the rule, its bound and what
was seen. Who sends signals, and only to the process we own, is the runner.

Each phase has its own bound, on time without progress. In one-shot mode the engine prints nothing between its start and the
first token, which can take minutes, so nobody can tell load from prefill and the longer bound holds (`start`); there, the engine's CPU time or bytes it has read growing is progress (generations.md, "Behaviour"). In decode only a
token or output is: an engine that spins without a token is hung. A phone that was frozen or asleep (the engine with it) is not the engine's
fault: time that passed between two calls far apart counts as one ordinary interval.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bmoe_proto.v1 import telemetry_pb2 as pb

Phase = Literal["load", "start", "prefill", "decode", "idle"]

LOAD_S = 600.0
PREFILL_S = 600.0
DECODE_S = 120.0
GRACE_S = 10.0

# Busy with nothing: less CPU than this in a second of silence is no sign of work (a spinning poll loop is more, a sleeping one less).
_CPU_SHARE = 0.02
_READ_BYTES = 64 * 1024
IN_A_ROW = 3
"""Sensors lie once in a while: a temperature or level must be over its bound at this many readings in a row."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Seconds, degrees, percent, bytes; None switches a rule off."""

    load_s: float | None = LOAD_S
    prefill_s: float | None = PREFILL_S
    decode_s: float | None = DECODE_S
    total_s: float | None = None
    max_cpu_temp_c: float | None = None
    min_battery_pct: float | None = None
    min_free_bytes: int | None = None
    grace_s: float = GRACE_S
    longest_step_s: float = 15.0  # more between two calls means the phone slept

    @classmethod
    def of(cls, ask: pb.WatchdogAsk, limits: pb.Limits | None = None) -> Bounds:
        """Bounds of a cell: what it asks for, defaults for the rest; a bound of 0 switches its rule off.

        The plan's battery and disk limits hold during a cell too; the stricter one stands.
        """

        def pick(name: str, default: float | None) -> float | None:
            value = getattr(ask, name) if ask.HasField(name) else default  # type: ignore[arg-type]
            return value if value is None or value > 0 else None

        battery = [pick("min_battery_pct", None)]
        free: int | None = None
        if limits is not None:
            battery.append(limits.min_battery_pct if limits.HasField("min_battery_pct") else None)
            free = limits.min_free_bytes if limits.HasField("min_free_bytes") else None
        levels = [level for level in battery if level is not None]
        return cls(
            load_s=pick("load_s", LOAD_S),
            prefill_s=pick("prefill_s", PREFILL_S),
            decode_s=pick("decode_s", DECODE_S),
            total_s=pick("total_s", None),
            max_cpu_temp_c=pick("max_cpu_temp_c", None),
            min_battery_pct=max(levels) if levels else None,
            min_free_bytes=free,
            grace_s=ask.grace_s if ask.HasField("grace_s") else GRACE_S,
        )


@dataclass(frozen=True, slots=True)
class Progress:
    """What is known of the engine now; counters since its start, None for what this phone cannot read."""

    phase: Phase
    bytes_out: int = 0
    tokens: int = 0
    cpu_s: float | None = None
    read_bytes: int | None = None
    cpu_temp_c: float | None = None
    battery_pct: float | None = None
    charging: bool | None = None
    free_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why the engine is to be stopped: telemetry.proto WatchdogReport without what was done about it."""

    rule: str
    bound: float
    seen: float
    unit: str
    action: str = "sigterm"
    detail: str = ""

    def report(self, action: str = "") -> pb.WatchdogReport:
        """As a message of the record."""
        return pb.WatchdogReport(
            rule=self.rule,
            bound=self.bound,
            seen=self.seen,
            unit=self.unit,
            action=action or self.action,
            detail=self.detail,
        )


class Watchdog:
    """One attempt of one cell. After its first verdict it asks for SIGKILL once the grace is over."""

    def __init__(self, bounds: Bounds, now_s: float) -> None:
        self.bounds = bounds
        self._now = now_s
        self._awake_s = 0.0  # time passed as far as the engine could have used it
        self._progress_at = 0.0
        self._phase: Phase | None = None
        self._seen: Progress | None = None
        self._marked_cpu = self._marked_read = 0.0
        self._over = {"temperature": 0, "battery": 0, "disk": 0}
        self._asked: tuple[float, Verdict] | None = None
        self._killed = False

    def feed(self, now_s: float, progress: Progress) -> Verdict | None:
        """Judge the moment `now_s` (boot-clock seconds). A verdict is given once, then once more as SIGKILL after the grace."""
        step = max(0.0, now_s - self._now)
        self._now = now_s
        slept = step > self.bounds.longest_step_s
        self._awake_s += min(step, 1.0) if slept else step
        if self._asked is not None:
            return self._kill(now_s)
        self._note(progress)
        verdict = self._environment(progress) or self._stalled() or self._too_long()
        if verdict is not None:
            self._asked = (now_s, verdict)
        return verdict

    def asked_to_stop(self, now_s: float, verdict: Verdict) -> None:
        """Someone else (the user, a limit of the plan) had SIGTERM sent: the grace runs from now."""
        if self._asked is None:
            self._asked = (now_s, verdict)

    def _kill(self, now_s: float) -> Verdict | None:
        assert self._asked is not None
        at, verdict = self._asked
        if self._killed or now_s - at < self.bounds.grace_s:
            return None
        self._killed = True
        detail = f"still running {now_s - at:.0f} s after SIGTERM"
        return Verdict(verdict.rule, verdict.bound, verdict.seen, verdict.unit, "sigkill", detail)

    def _note(self, progress: Progress) -> None:
        seen, self._seen = self._seen, progress
        cpu_s, read_bytes = progress.cpu_s or 0.0, float(progress.read_bytes or 0)
        if seen is None or progress.phase != self._phase:
            self._phase = progress.phase
            moved = True
        else:
            moved = progress.bytes_out > seen.bytes_out or progress.tokens > seen.tokens or progress.phase == "idle"
        if not moved and self._phase in {"load", "start", "prefill"}:
            silent_s = self._awake_s - self._progress_at
            moved = read_bytes - self._marked_read >= _READ_BYTES or (
                silent_s > 0 and cpu_s - self._marked_cpu >= max(0.05, _CPU_SHARE * silent_s)
            )
        if moved:
            self._progress_at = self._awake_s
            self._marked_cpu, self._marked_read = cpu_s, read_bytes

    def _stalled(self) -> Verdict | None:
        load_s, prefill_s = self.bounds.load_s, self.bounds.prefill_s
        # At the start of a one-shot nobody can tell which of the two it is at: the longer bound decides.
        start_s = None if load_s is None or prefill_s is None else max(load_s, prefill_s)
        limits = {"load": load_s, "start": start_s, "prefill": prefill_s, "decode": self.bounds.decode_s}
        bound = limits.get(self._phase or "")
        silent_s = self._awake_s - self._progress_at
        if bound is None or silent_s <= bound or self._seen is None:
            return None
        rule = "load" if self._phase == "start" else self._phase or ""
        return Verdict(rule, bound, round(silent_s, 3), "s", detail=self._describe(silent_s))

    def _describe(self, silent_s: float) -> str:
        assert self._seen is not None
        phase = "load or prefill" if self._phase == "start" else self._phase
        facts = [f"no progress in {phase} for {silent_s:.0f} s", f"{self._seen.tokens} tokens so far"]
        if self._seen.cpu_s is not None:
            facts.append(f"{self._seen.cpu_s - self._marked_cpu:.2f} s of CPU since")
        if self._seen.read_bytes is not None:
            facts.append(f"{self._seen.read_bytes - self._marked_read:.0f} bytes read since")
        return ", ".join(facts)

    def _too_long(self) -> Verdict | None:
        bound = self.bounds.total_s
        if bound is None or self._awake_s <= bound:
            return None
        return Verdict("total", bound, round(self._awake_s, 3), "s", detail=f"in {self._phase}")

    def _environment(self, progress: Progress) -> Verdict | None:
        low_battery = progress.battery_pct if progress.charging is not True else None
        for rule, bound, seen, unit, above in (
            ("temperature", self.bounds.max_cpu_temp_c, progress.cpu_temp_c, "°C", True),
            ("battery", self.bounds.min_battery_pct, low_battery, "%", False),
            ("disk", self.bounds.min_free_bytes, progress.free_bytes, "bytes", False),
        ):
            if bound is None or seen is None:
                continue
            self._over[rule] = self._over[rule] + 1 if (seen > bound if above else seen < bound) else 0
            if self._over[rule] >= IN_A_ROW:
                return Verdict(
                    rule, float(bound), float(seen), unit, detail=f"{IN_A_ROW} readings in a row, in {progress.phase}"
                )
        return None
