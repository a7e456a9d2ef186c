"""Whether a plan can be taken, and what will go wrong with it here: known when it is handed in instead of at 3 a.m. Pure.

In: a plan, the agent's configuration, the gates this phone cannot read. Out: reasons to refuse it, and warnings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from bmoe_proto.asking import cell_problems, gate_problems, too_big, unwatched
from bmoe_proto.v1 import telemetry_pb2 as pb

from bmoe_agent.config import Config, ConfigError


def problems(plan: pb.Plan) -> list[str]:
    """Why this plan cannot be taken."""
    found: list[str] = []
    if not re.fullmatch(r"[0-9a-f]{32}", plan.plan_id):
        found.append("a plan's id is 32 hex digits")
    if not plan.cells:
        found.append("the plan has no cells")
    if [cell.index for cell in plan.cells] != list(range(len(plan.cells))):
        found.append("cells must be numbered from 0 in the order they run")
    for cell in plan.cells:
        wrong = cell_problems(cell) + [problem for ask in cell.gates for problem in gate_problems(ask)]
        wrong += filter(None, [too_big(plan, cell)])
        found.extend(f"cell {cell.index} ({cell.name}): {problem}" for problem in wrong)
    return found


def warnings(plan: pb.Plan, config: Config, unreadable: Mapping[str, str]) -> list[str]:
    """What will make cells fail, gates give up or bounds go unwatched here; `unreadable` is gates and why they cannot be read."""
    found: dict[str, None] = {}
    for cell in plan.cells:
        try:
            config.engine(cell.engine)
            config.model(cell.model)
        except ConfigError as error:
            found[str(error)] = None
        for ask in cell.gates:
            if why := unreadable.get(ask.gate):
                found[f"gate {ask.gate} cannot be read on this phone: {why}"] = None
        found.update(dict.fromkeys(_unwatched(cell.watchdog, "watchdog", unreadable)))
    found.update(dict.fromkeys(_unwatched(plan.limits, "limits", unreadable)))
    return list(found)


def _unwatched(asked: pb.WatchdogAsk | pb.Limits, where: str, unreadable: Mapping[str, str]) -> list[str]:
    return [
        f"{where}: {bound} cannot be watched on this phone: {why}"
        for bound, why in unwatched(asked, unreadable).items()
    ]
