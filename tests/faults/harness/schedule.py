"""From a seed to a schedule: what phones are asked to measure, and what goes wrong when.

In: a seed and the scale of timers. Out: a `Schedule`; the same seed is always the same one. Two faults of one part never
overlap (an agent that is stopped is not also killed), faults of different parts do.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

TOK_S = 25
LONG_S = 14.0
"""A long hold at default timers: beyond the 12 s after which a silent phone is called frozen."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One fault: how often it is drawn, which parts it occupies, and whether it may be held long."""

    weight: int
    parts: tuple[str, ...]
    of_phone: bool = True
    long: bool = True
    needs: str = ""  # "wifi", "small", "postgresql", "sqlite": only there


KINDS: dict[str, Kind] = {
    "collector_kill": Kind(4, ("collector",), of_phone=False),
    "collector_stop": Kind(2, ("collector",), of_phone=False),
    "collector_term": Kind(1, ("collector", "database", "server"), of_phone=False),  # it may finish what it commits
    "collector_second": Kind(2, ("second",), of_phone=False),
    "forwards_removed": Kind(3, ("server",), of_phone=False, long=False),
    "server_kill": Kind(2, ("server",), of_phone=False, long=False),
    "server_replaced": Kind(2, ("server",), of_phone=False, long=False),
    "server_stop": Kind(1, ("server",), of_phone=False),
    "adbd_kill": Kind(3, ("adbd",)),
    "adbd_stop": Kind(2, ("adbd",)),
    "agent_kill": Kind(5, ("agent",)),
    "agent_stop": Kind(3, ("agent",)),
    "agent_term": Kind(1, ("agent",)),
    "engine_kill": Kind(2, ("engine",), long=False),
    "engine_stop": Kind(1, ("engine",)),
    "launcher_kill": Kind(1, ("engine",), long=False),
    "phone_freeze": Kind(3, ("agent", "engine", "adbd")),
    "reboot": Kind(2, ("agent", "engine", "adbd")),
    "tail_torn": Kind(2, ("agent",)),
    "tail_flipped": Kind(2, ("agent",)),
    "clock_jump": Kind(2, ("clock",), long=False),
    "host_clock_jump": Kind(2, ("clock",), of_phone=False, long=False),
    "link_down": Kind(2, ("link",)),
    "wifi_delay": Kind(2, ("link",), needs="wifi"),
    "wifi_loss": Kind(3, ("link",), needs="wifi"),
    "wifi_stall": Kind(3, ("link",), needs="wifi"),
    "wifi_half": Kind(3, ("link",), needs="wifi"),
    "wifi_cut": Kind(2, ("link",), needs="wifi"),
    "disk_full": Kind(12, ("disk",), needs="small"),
    "database_kill": Kind(4, ("database",), of_phone=False, needs="postgresql"),
    "database_stop": Kind(2, ("database",), of_phone=False, needs="postgresql"),
    "database_restart": Kind(3, ("database",), of_phone=False, needs="postgresql"),
    "database_read_only": Kind(4, ("database",), of_phone=False, needs="postgresql"),
    "database_disk_read_only": Kind(4, ("database",), of_phone=False, needs="postgresql"),
    "database_disk_full": Kind(3, ("database",), of_phone=False, needs="postgresql"),
    "database_locked": Kind(2, ("database",), of_phone=False, needs="sqlite"),
}
ENGINE_FAULTS = ("kill", "crash", "torn", "noise", "overflow:300000", "half_char", "fatal", "exit:3")


@dataclass(frozen=True, slots=True)
class Step:
    """One fault: when after the plan was handed over, for how long, of which phone (-1 for the host's)."""

    at_s: float
    hold_s: float
    fault: str
    phone: int
    amount: float  # 0 to 1, what a fault makes of it

    def __str__(self) -> str:
        """`1.2+0.5 agent_kill 0`."""
        who = "" if self.phone < 0 else f" {self.phone}"
        return f"{self.at_s:.1f}+{self.hold_s:.1f} {self.fault}{who}"


@dataclass(frozen=True, slots=True)
class CellAsked:
    """A cell of the plan."""

    name: str
    tokens: int
    trace: bool
    fault: str  # the engine's own, as BMOE_SIM says it


@dataclass(frozen=True, slots=True)
class Schedule:
    """Everything one play is made from."""

    seed: int
    scale: float
    database: str
    phones: int
    wifi: tuple[int, ...]
    small: tuple[int, ...]
    cells: tuple[CellAsked, ...]
    steps: tuple[Step, ...]


def make(seed: int, scale: float) -> Schedule:
    """The schedule of a seed."""
    draw = random.Random(seed)
    database = "postgresql" if draw.random() < 0.4 else "sqlite"
    phones = draw.choice((1, 2, 2, 2))
    wifi = tuple(number for number in range(phones) if draw.random() < 0.4)
    small = tuple(number for number in range(phones) if draw.random() < 0.25)
    long_s = max(LONG_S * scale, 2.5)
    span_s = 5 + 2 * long_s
    cells = _cells(draw, span_s)
    has = {"wifi": wifi, "small": small}
    kinds = [
        name for name, kind in KINDS.items() if not kind.needs or kind.needs == database or has.get(kind.needs, ())
    ]
    weights = [KINDS[name].weight for name in kinds]
    busy: list[tuple[str, int, float, float]] = []
    steps: list[Step] = []
    wanted = draw.randint(4, 9)
    for _ in range(60):
        if len(steps) == wanted:
            break
        name = draw.choices(kinds, weights)[0]
        kind = KINDS[name]
        at_s = draw.uniform(0.2, span_s * 0.9)
        hold_s = draw.uniform(1.0, 1.3) * long_s if kind.long and draw.random() < 0.3 else draw.uniform(0.1, 1.5)
        phone = draw.choice(has.get(kind.needs) or tuple(range(phones))) if kind.of_phone else -1
        taken = [(part, phone, at_s - 0.3, at_s + hold_s + 0.3) for part in kind.parts]
        if not any(_clash(mine, other) for mine in taken for other in busy):
            busy += taken
            steps.append(Step(round(at_s, 2), round(hold_s, 2), name, phone, draw.random()))
    return Schedule(seed, scale, database, phones, wifi, small, cells, tuple(sorted(steps, key=lambda step: step.at_s)))


def _cells(draw: random.Random, span_s: float) -> tuple[CellAsked, ...]:
    count = draw.randint(1, 4)
    cells = []
    for number in range(count):
        tokens = max(10, int(TOK_S * span_s * draw.uniform(0.4, 0.9) / count))
        fault = ""
        if draw.random() < 0.25:
            kind, _, argument = draw.choice(ENGINE_FAULTS).partition(":")
            fault = f"{kind}@{draw.randint(1, tokens)}" + (f":{argument}" if argument else "")
        cells.append(CellAsked(f"cell-{number}", tokens, draw.random() < 0.3, fault))
    return tuple(cells)


def _clash(one: tuple[str, int, float, float], other: tuple[str, int, float, float]) -> bool:
    return one[:2] == other[:2] and one[2] < other[3] and other[2] < one[3]


def plan_text(schedule: Schedule) -> str:
    """The plan file."""
    lines = [f'name = "faults-{schedule.seed}"', 'model = "tiny.gguf"', 'prompt = "faults"', "retries = 2"]
    lines += ['flags = ["--moe-stream", "--cache-mb", "4", "--force-cache"]']
    for cell in schedule.cells:
        lines += ["[[cells]]", f'name = "{cell.name}"', f"n_predict = {cell.tokens}"]
        if cell.trace:
            lines += ['artifacts = ["metrics", "route"]', "traced = true"]
        if cell.fault:
            lines += [f'environment = {{ BMOE_SIM = "fault={cell.fault}" }}']
    return "\n".join(lines) + "\n"
