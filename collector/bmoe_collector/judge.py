"""Facts and verdicts of stored runs, computed from the record and stored with it.

In: a store and run ids. Out: rows of `run_facts` and `verdicts`. Called when a run ends or is imported, and again by
`bmoe judge` when the rules improve; the same record gives the same result (law 1).

A new run can spoil or clear its siblings, so the contamination of its whole group is judged again. Groups are runs of one
model on one phone that belong together: cells of one plan; imported files of one folder; else single runs of one day.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, delete, insert, or_, select
from sqlalchemy.exc import OperationalError

from bmoe_collector.meaning.derive import derive
from bmoe_collector.meaning.facts import facts_of
from bmoe_collector.record import RunRecord
from bmoe_collector.store.engine import Store
from bmoe_collector.store.facts import put_judgement
from bmoe_collector.store.load import load_run
from bmoe_collector.store.schema import LABELS, RUN_FACTS, RUNS, VERDICTS
from bmoe_collector.verdicts import Sibling, Verdict, contaminated_among, judge_alone, ordered

log = logging.getLogger(__name__)

CONTAMINATED = "contaminated"
DAY_NS = 86_400 * 10**9
_ROW = (
    "run_no", "run_id", "source", "outcome", "simulated", "agent_uuid", "model_name", "model_identity", "argv", "environment",
    "prompt_sha256", "plan_id", "plan_name", "plan_cells", "cell", "cell_index", "repeat", "block", "started_wall_ns",
    "unmeasured", "directory", "asked",
)  # fmt: skip
"""Columns of a run that its siblings look at."""


@dataclass(frozen=True, slots=True)
class Judged:
    """What was found of one run."""

    run_id: str
    verdicts: Sequence[Verdict]


def refresh(store: Store, run_ids: Iterable[str]) -> list[Judged]:
    """Judge runs again, and their siblings' contamination with them.

    A run that cannot be judged is logged and does not stop the others; a database that fails does. Raises
    RunNotFoundError for an unknown id when it is the only one asked for.
    """
    wanted = list(dict.fromkeys(run_ids))
    done: list[str] = []
    for run_id in wanted:
        try:
            record = load_run(store, run_id)
            _put_alone(store, record)
            done.append(record.run_id)
        except OperationalError:
            raise
        except Exception:
            if len(wanted) == 1:
                raise
            log.exception("run %s could not be judged", run_id)
    _regroup(store, done)
    with store.read() as connection:
        found = _verdicts(connection, done)
    return [Judged(run_id, found.get(run_id, [])) for run_id in done]


def _put_alone(store: Store, record: RunRecord) -> None:
    """Store a run's facts and every verdict but contamination, which its group decides afterwards."""
    derived = derive(record)
    peers: list[Sibling] = []
    if derived.config.n_expert_used_asked:
        # Only a narrowed top-k asks what its siblings ran with.
        with store.read() as connection:
            peers = [one for one in siblings(connection, record.run) if one.run_id != record.run_id]
    verdicts = judge_alone(record, derived, peers)
    rows = [(verdict.code, verdict.severity, verdict.evidence) for verdict in verdicts]
    put_judgement(store, record.run_id, facts_of(record, derived), rows)


def _regroup(store: Store, run_ids: Sequence[str]) -> None:
    """Judge the contamination of every group that one of these runs is in, each group once."""
    seen: set[str] = set()
    for run_id in run_ids:
        if run_id in seen:
            continue
        with store.write() as connection:
            row = connection.execute(select(*(RUNS.c[name] for name in _ROW)).where(RUNS.c.run_id == run_id)).mappings()
            group = siblings(connection, dict(row.one()))
            seen.update(one.run_id for one in group)
            found = contaminated_among(group)
            old = _verdicts(connection, [one.run_id for one in group])
            for one in group:
                have = old.get(one.run_id, [])
                want = ordered([*(v for v in have if v.code != CONTAMINATED), *found.get(one.run_id, [])])
                if want != have:
                    _replace(connection, int(one.run["run_no"]), want)


def _replace(connection: Connection, run_no: int, verdicts: Sequence[Verdict]) -> None:
    # Two collectors may judge one group at the same moment: the second waits for the first and replaces what it wrote.
    connection.execute(select(RUNS.c.run_no).where(RUNS.c.run_no == run_no).with_for_update())
    connection.execute(delete(VERDICTS).where(VERDICTS.c.run_no == run_no))
    rows = [{"run_no": run_no, "at": at, **verdict.to_json()} for at, verdict in enumerate(verdicts)]
    if rows:
        connection.execute(insert(VERDICTS), rows)


def _verdicts(connection: Connection, run_ids: Sequence[str]) -> dict[str, list[Verdict]]:
    found: dict[str, list[Verdict]] = {}
    for at in range(0, len(run_ids), 500):
        rows = connection.execute(
            select(RUNS.c.run_id, VERDICTS.c.code, VERDICTS.c.severity, VERDICTS.c.evidence)
            .join(VERDICTS, VERDICTS.c.run_no == RUNS.c.run_no)
            .where(RUNS.c.run_id.in_(run_ids[at : at + 500]))
            .order_by(RUNS.c.run_no, VERDICTS.c.at)
        )
        for run_id, code, severity, evidence in rows:
            found.setdefault(run_id, []).append(Verdict(code, severity, evidence))
    return found


def siblings(connection: Connection, run: Mapping[str, Any]) -> list[Sibling]:
    """The group of a run, itself included, as far as it was judged: rows, facts and codes."""
    rows = [
        dict(row)
        for row in connection.execute(
            select(*(RUNS.c[name] for name in _ROW), RUN_FACTS.c.facts)
            .join(RUN_FACTS, RUN_FACTS.c.run_no == RUNS.c.run_no)
            .where(*_together(run))
            .order_by(RUNS.c.run_no)
        ).mappings()
    ]
    rows = _one_folder(run, rows)
    numbers = [row["run_no"] for row in rows]
    labels: dict[int, dict[str, str]] = {}
    codes: dict[int, set[str]] = {}
    for at in range(0, len(numbers), 500):
        some = numbers[at : at + 500]
        for run_no, key, value in connection.execute(
            select(LABELS.c.run_no, LABELS.c.key, LABELS.c.value).where(LABELS.c.run_no.in_(some))
        ):
            labels.setdefault(run_no, {})[key] = value
        for run_no, code in connection.execute(
            select(VERDICTS.c.run_no, VERDICTS.c.code).where(
                VERDICTS.c.run_no.in_(some), VERDICTS.c.code != CONTAMINATED
            )
        ):
            codes.setdefault(run_no, set()).add(code)
    return [
        Sibling(
            {**{name: row[name] for name in _ROW}, "labels": labels.get(row["run_no"], {})},
            row["facts"] or {},
            frozenset(codes.get(row["run_no"], ())),
        )
        for row in rows
    ]


def _together(run: Mapping[str, Any]) -> list[ColumnElement[bool]]:
    """What makes runs a group, as conditions."""
    same: list[ColumnElement[bool]] = []
    if run.get("model_identity"):
        same.append(or_(RUNS.c.model_identity == run["model_identity"], RUNS.c.model_identity.is_(None)))
    same.append(RUNS.c.model_name.is_not_distinct_from(run.get("model_name")))
    same.append(RUNS.c.agent_uuid.is_not_distinct_from(run.get("agent_uuid")))
    start = run.get("started_wall_ns")
    if run.get("plan_id") and (run.get("plan_cells") or 0) > 1:
        same.append(RUNS.c.plan_id == run["plan_id"])
    elif run.get("source") == "import":
        folder = _parent(run.get("directory"))
        same.append(RUNS.c.source == "import")
        # SQLite's LIKE takes other cases too; `_one_folder` compares exactly.
        same.append(RUNS.c.directory.startswith(folder, autoescape=True) if folder else RUNS.c.run_id == run["run_id"])
    elif start is not None:
        day = start // DAY_NS * DAY_NS
        same.append(RUNS.c.started_wall_ns.between(day, day + DAY_NS - 1))
        same.append(RUNS.c.source == "agent")
        same.append(or_(RUNS.c.plan_cells.is_(None), RUNS.c.plan_cells <= 1))
    else:
        same.append(RUNS.c.run_id == run["run_id"])
    return same


def _parent(directory: Any) -> str:
    """The folder above, both kinds of separator."""
    text = str(directory or "").rstrip("/\\")
    at = max(text.rfind("/"), text.rfind("\\"))
    return text[: at + 1]


def _one_folder(run: Mapping[str, Any], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of the imported runs below one folder those that belong together: files side by side in the run's own folder, or,
    where each run has a folder to itself, the folders side by side.
    """
    if run.get("source") != "import" or run.get("plan_id"):
        return rows
    own = [row for row in rows if row["directory"] == run.get("directory")]
    if len(own) > 1:
        return own
    above = _parent(run.get("directory"))
    counts: dict[Any, int] = {}
    for row in rows:
        counts[row["directory"]] = counts.get(row["directory"], 0) + 1
    return [row for row in rows if _parent(row["directory"]) == above and counts[row["directory"]] == 1]


def every_run(store: Store) -> list[str]:
    """Ids of all runs that have begun, oldest first."""
    with store.read() as connection:
        return [str(run_id) for run_id in connection.execute(select(RUNS.c.run_id).order_by(RUNS.c.run_no)).scalars()]


def to_run_again(store: Store, run_ids: Sequence[str]) -> list[dict[str, Any]]:
    """The contaminated ones among runs and their siblings: run, plan, cell, repeat and why."""
    found: dict[str, dict[str, Any]] = {}
    with store.read() as connection:
        names: set[str] = set()
        for run_id in run_ids:
            if run_id in names:
                continue
            row = connection.execute(select(*(RUNS.c[name] for name in _ROW)).where(RUNS.c.run_id == run_id)).mappings()
            names.update(one.run_id for one in siblings(connection, dict(row.one())))
        chosen = sorted(names | set(run_ids))
        for at in range(0, len(chosen), 500):
            rows = connection.execute(
                select(
                    RUNS.c.run_no,
                    RUNS.c.run_id,
                    RUNS.c.plan_id,
                    RUNS.c.plan_name,
                    RUNS.c.cell,
                    RUNS.c.repeat,
                    VERDICTS.c.evidence,
                )
                .join(VERDICTS, VERDICTS.c.run_no == RUNS.c.run_no)
                .where(RUNS.c.run_id.in_(chosen[at : at + 500]), VERDICTS.c.code == CONTAMINATED)
                .order_by(RUNS.c.run_no)
            )
            for run_no, run_id, plan_id, plan_name, cell, repeat, why in rows:
                found[run_id] = {
                    "run": run_id, "plan": plan_name, "plan_id": plan_id, "cell": cell, "repeat": repeat, "why": why,
                    "run_no": run_no,
                }  # fmt: skip
    return sorted(found.values(), key=lambda one: int(one.pop("run_no")))
