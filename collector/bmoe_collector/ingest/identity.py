"""Which run a set of files is: the same files are the same run, whoever brought them.

In: hashes of non-empty files, by kind. Out: the stored run they belong to. Rules (design, `bmoe import`): the same set
or a subset names its run; a superset enriches it. Files of two engine processes can be alike when they say little (an
error message), so a set that only overlaps is the same run only by a file that tells a process apart (rows, progress,
traces: they hold its timings), and never when both have a different file of one kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import Connection, bindparam, delete, insert, select, update

from bmoe_collector.store.schema import ARTIFACTS, LABELS, RUN_ALIASES, RUN_FILES, RUNS, UNCHECKED

TELLING = frozenset({"metrics", "stdout", "route", "compute", "compute_layers", "io"})
RUN_JSON = "run.json"
_HOLDING = (
    select(RUN_FILES.c.run_no).where(RUN_FILES.c.sha256.in_(bindparam("hashes", expanding=True))).distinct().limit(2000)
)
_IMPORTED = _HOLDING.join(RUNS, RUNS.c.run_no == RUN_FILES.c.run_no).where(RUNS.c.source == "import")


@dataclass(frozen=True, slots=True)
class Match:
    """A stored run that files belong to; `new` are the hashes it did not have, `mine` those it had, by kind."""

    run_no: int
    run_id: str
    source: str
    new: frozenset[str]
    mine: Mapping[str, str]


def matches(connection: Connection, files: Mapping[str, str], *, imported: bool = False) -> list[Match]:
    """Runs that these files (sha256 to kind) are files of, best first: the run that has most of them, then the oldest.

    `imported`: only runs that were imported.
    """
    if not files:
        return []
    hits = connection.execute(_IMPORTED if imported else _HOLDING, {"hashes": list(files)}).scalars()
    found: list[tuple[int, Match]] = []
    for run_no in sorted(hits):
        mine = {
            row.sha256: row.kind
            for row in connection.execute(
                select(RUN_FILES.c.sha256, RUN_FILES.c.kind).where(RUN_FILES.c.run_no == run_no)
            )
        }
        run = connection.execute(select(RUNS.c.run_id, RUNS.c.source).where(RUNS.c.run_no == run_no)).one()
        if same_run(files, mine, agent=run.source == "agent"):
            new = frozenset(files) - frozenset(mine)
            found.append((len(new), Match(run_no, run.run_id, run.source, new, mine)))
    found.sort(key=lambda item: (item[0], item[1].run_no))
    return [match for _, match in found]


def same_run(files: Mapping[str, str], mine: Mapping[str, str], *, agent: bool) -> bool:
    """Whether two sets of files are of one engine process."""
    theirs, ours = set(files), set(mine)
    if agent and RUN_JSON not in mine.values():
        # An agent delivers no run.json; one that was written beside its files later does not make another run.
        theirs = {sha for sha in theirs if files[sha] != RUN_JSON}
    if not theirs or not ours:
        return False
    shared = theirs & ours
    telling = any(mine[sha] in TELLING for sha in shared)
    if theirs <= ours or (ours <= theirs and (telling or not agent)):
        return True
    if not telling:
        return False
    kinds = {files[sha] for sha in theirs - ours} & {mine[sha] for sha in ours - theirs}
    return not kinds & (TELLING | {RUN_JSON, "stderr"})


def absorb(connection: Connection, keep: int, drop: int) -> list[str]:
    """Make two stored runs one: `drop` gives its files and labels to `keep`, and its id goes on finding it.

    Returns the names of files that `keep` waited for and has now.
    """
    dropped = connection.execute(select(RUNS.c.run_id).where(RUNS.c.run_no == drop)).scalar_one()
    come: list[str] = []
    mine = select(ARTIFACTS.c.sha256, ARTIFACTS.c.name, ARTIFACTS.c.state).where(ARTIFACTS.c.run_no == keep)
    here = {str(row.sha256): row for row in connection.execute(mine) if row.sha256}
    for row in connection.execute(select(ARTIFACTS).where(ARTIFACTS.c.run_no == drop)).all():
        known = here.get(row.sha256)
        if known is None:
            continue
        if known.state != "stored" and row.state == "stored":
            place = (ARTIFACTS.c.run_no == keep, ARTIFACTS.c.name == known.name)
            connection.execute(update(ARTIFACTS).where(*place).values(state="stored", problem=None))
            come.append(known.name)
        connection.execute(delete(ARTIFACTS).where(ARTIFACTS.c.run_no == drop, ARTIFACTS.c.name == row.name))
    for table, key in ((RUN_FILES, "sha256"), (LABELS, "key"), (ARTIFACTS, "name")):
        have = set(connection.execute(select(table.c[key]).where(table.c.run_no == keep)).scalars())
        for each in connection.execute(select(table).where(table.c.run_no == drop)).mappings().all():
            if each[key] not in have:
                connection.execute(insert(table).values(**{**each, "run_no": keep}))
    connection.execute(update(RUN_ALIASES).where(RUN_ALIASES.c.run_no == drop).values(run_no=keep))
    connection.execute(delete(RUNS).where(RUNS.c.run_no == drop))
    for table in UNCHECKED:  # after it: then nobody can add to the run any more
        connection.execute(delete(table).where(table.c.run_no == drop))
    connection.execute(insert(RUN_ALIASES).values(run_id=dropped, run_no=keep))
    return come
