"""Plans: a TOML file of what to measure, read, expanded into cells in their order, checked before anything starts.

`document` reads the file, `order` says which cell runs when, `expand` makes the wire's Plan, `check` says what speaks against
it, `shipped/` has the sweeps people run. The phone gets the expanded cells and the text.
"""

from __future__ import annotations

from pathlib import Path

from bmoe_proto.v1 import telemetry_pb2 as pb


def load_plan(source: str | Path) -> pb.Plan:
    """The expanded plan of a file, or of a shipped plan's name, ready to submit.

    Raises:
        UserError: it cannot be read, or `check` refuses it; every reason on a line of its own.
    """
    from bmoe_collector.common import UserError
    from bmoe_collector.plans.check import check
    from bmoe_collector.plans.document import read_plan
    from bmoe_collector.plans.expand import expand

    document = read_plan(source)
    plan = expand(document)
    found = check(document, plan)
    if found.errors:
        raise UserError("\n  ".join([f"{document.source}: this plan is refused:", *found.errors]))
    return plan
