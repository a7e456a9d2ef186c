"""Derived numbers and verdicts of runs, as written by whoever judges and read by lists and comparisons.

In: plain dicts. Out: rows of `run_facts` and `verdicts`, replaced whole in one transaction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, delete, insert, select

from bmoe_collector.store.engine import Store, plain
from bmoe_collector.store.names import FACT_COLUMNS
from bmoe_collector.store.schema import RUN_FACTS, RUNS, VERDICTS


def put_judgement(
    store: Store,
    run_id: str,
    facts: Mapping[str, Any],
    verdicts: Sequence[tuple[str, str, str]],
) -> bool:
    """Replace a run's facts and its verdicts (code, severity, evidence); False when there is no such run."""
    with store.write() as connection:
        run_no = connection.execute(select(RUNS.c.run_no).where(RUNS.c.run_id == run_id)).scalar()
        if run_no is None:
            return False
        put(connection, int(run_no), facts, verdicts)
        return True


def put(
    connection: Connection, run_no: int, facts: Mapping[str, Any], verdicts: Sequence[tuple[str, str, str]]
) -> None:
    """As `put_judgement`, inside a transaction that is open."""
    connection.execute(delete(RUN_FACTS).where(RUN_FACTS.c.run_no == run_no))
    connection.execute(delete(VERDICTS).where(VERDICTS.c.run_no == run_no))
    known = {name: _fit(facts.get(name), kind) for name, kind in FACT_COLUMNS.items()}
    connection.execute(insert(RUN_FACTS).values(run_no=run_no, facts=plain(dict(facts)), **known))
    rows = [
        {"run_no": run_no, "at": at, "code": code, "severity": severity, "evidence": evidence}
        for at, (code, severity, evidence) in enumerate(verdicts)
    ]
    if rows:
        connection.execute(insert(VERDICTS), rows)


def forget_judgement(connection: Connection, run_no: int) -> None:
    """More of a run is here than it was judged by. Should nobody get to judging it again now, `Ingestor.unsettled` finds it."""
    connection.execute(delete(RUN_FACTS).where(RUN_FACTS.c.run_no == run_no))


def _fit(value: Any, kind: str) -> Any:
    """The value as its column takes it, None when it cannot."""
    if value is None:
        return None
    if kind == "str":
        return str(value)
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, float):
        if value - value != 0:
            return None
        return value if kind == "float" else int(value)
    return value if isinstance(value, int) else None


def verdicts_of(store: Store, run_id: str) -> list[tuple[str, str, str]]:
    """Stored verdicts of a run: code, severity, evidence."""
    with store.read() as connection:
        rows = connection.execute(
            select(VERDICTS.c.code, VERDICTS.c.severity, VERDICTS.c.evidence)
            .join(RUNS, RUNS.c.run_no == VERDICTS.c.run_no)
            .where(RUNS.c.run_id == run_id)
            .order_by(VERDICTS.c.at)
        )
        return [(row[0], row[1], row[2]) for row in rows]


def facts_of(store: Store, run_id: str) -> dict[str, Any]:
    """Stored facts of a run; empty when it was never judged."""
    with store.read() as connection:
        found = connection.execute(
            select(RUN_FACTS.c.facts).join(RUNS, RUNS.c.run_no == RUN_FACTS.c.run_no).where(RUNS.c.run_id == run_id)
        ).scalar()
    return dict(found) if found else {}
