"""From what a person types to a run: id prefixes, aliases, `last`.

In: a word. Out: the run's number and full id. A prefix has at least 4 digits and must be unique.
"""

from __future__ import annotations

import re

from sqlalchemy import Connection, select, union

from bmoe_collector.store.engine import Store
from bmoe_collector.store.schema import RUN_ALIASES, RUNS

_HEX = re.compile(r"[0-9a-f]{4,32}")


class RunNotFoundError(LookupError):
    """No run of that name, or more than one; `near` has ids that could have been meant."""

    def __init__(self, message: str, near: list[str]) -> None:
        super().__init__(message)
        self.near = near


def find_run(store: Store, word: str) -> str:
    """The full id (32 hex digits) of the run a word means; raises RunNotFoundError."""
    with store.read() as connection:
        return find(connection, word)[1]


def find_runs(store: Store, words: list[str]) -> list[str]:
    """Full ids, in the order asked; raises RunNotFoundError at the first word that is not one run."""
    with store.read() as connection:
        return [find(connection, word)[1] for word in words]


def find(connection: Connection, word: str) -> tuple[int, str]:
    """The run's number and full id; raises RunNotFoundError."""
    wanted = word.strip().lower().replace("-", "")
    if wanted in ("last", "latest"):
        row = connection.execute(
            select(RUNS.c.run_no, RUNS.c.run_id).order_by(RUNS.c.stored_wall_ns.desc(), RUNS.c.run_no.desc()).limit(1)
        ).first()
        if row is None:
            raise RunNotFoundError("no run is stored yet", [])
        return int(row[0]), str(row[1])
    if not _HEX.fullmatch(wanted):
        raise RunNotFoundError(f"{word!r} is no run id: at least 4 of its hex digits are needed", _near(connection, ""))
    # A range instead of LIKE: it uses the index on both databases. "g" follows the last hex digit.
    above = wanted + "g"
    own = select(RUNS.c.run_no, RUNS.c.run_id).where(RUNS.c.run_id >= wanted, RUNS.c.run_id < above)
    other = (
        select(RUNS.c.run_no, RUNS.c.run_id)
        .join(RUN_ALIASES, RUN_ALIASES.c.run_no == RUNS.c.run_no)
        .where(RUN_ALIASES.c.run_id >= wanted, RUN_ALIASES.c.run_id < above)
    )
    rows = connection.execute(union(own, other).limit(8)).all()
    if len(rows) == 1:
        return int(rows[0][0]), str(rows[0][1])
    if rows:
        near = sorted(str(row[1]) for row in rows)
        raise RunNotFoundError(f"{word} means {len(near)} runs or more: {', '.join(near)}", near)
    raise RunNotFoundError(f"no run {word} is stored here", _near(connection, wanted))


def _near(connection: Connection, wanted: str) -> list[str]:
    """Ids closest to a word: those that share its start longest, else the newest."""
    for length in range(min(len(wanted), 8), 1, -1):
        start = wanted[:length]
        rows = connection.execute(
            select(RUNS.c.run_id).where(RUNS.c.run_id >= start, RUNS.c.run_id < start + "g").limit(3)
        ).scalars()
        if found := [str(row) for row in rows]:
            return found
    newest = connection.execute(select(RUNS.c.run_id).order_by(RUNS.c.run_no.desc()).limit(3)).scalars()
    return [str(row) for row in newest]
