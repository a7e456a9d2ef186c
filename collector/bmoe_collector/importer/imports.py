"""`import_paths`: files and directories in, stored runs out.

In: an open store, its artifacts, paths, labels. Out: an `Imported` for every run met, and what was left over. The same
files again change nothing; more files of a known run enrich it. Every file is stored, understood or not.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bmoe_proto.contract.recognise import ENOUGH, recognise
from bmoe_proto.contract.text import readable_str
from sqlalchemy import Connection, insert, select, update

from bmoe_collector.importer import labels as names
from bmoe_collector.importer.grouping import Found, Group, group
from bmoe_collector.importer.write import rewrite
from bmoe_collector.ingest import finish, identity
from bmoe_collector.ingest.record import new_run, put_labels
from bmoe_collector.store.artifacts import Artifacts
from bmoe_collector.store.engine import Store, insert_new, wall_ns
from bmoe_collector.store.schema import ARTIFACTS, LOOSE_FILES, RUN_ALIASES, RUNS


@dataclass(slots=True)
class Imported:
    """One run: `run` is its id, `already` whether it was known, `added` what of it was new."""

    run: str
    already: bool
    outcome: str
    tokens: int
    turns: int
    files: list[str]
    added: list[str] = field(default_factory=list)
    problems: list[dict[str, Any]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The object `bmoe import` prints."""
        return {
            "run": self.run,
            "already": self.already,
            "outcome": self.outcome,
            "tokens": self.tokens,
            "turns": self.turns,
            "files": list(map(readable_str, self.files)),
            "added": list(map(readable_str, self.added)),
            "problems": self.problems,
        }


@dataclass(slots=True)
class Result:
    """What an import did: runs, and files that belong to none (kept all the same), with the reason."""

    runs: list[Imported] = field(default_factory=list)
    loose: list[tuple[str, str]] = field(default_factory=list)
    unread: list[tuple[str, str]] = field(default_factory=list)


def import_paths(
    store: Store, artifacts: Artifacts, paths: Sequence[str], labels: Mapping[str, str] | None = None
) -> Result:
    """Import files and directories. Raises FileNotFoundError for a path that is not there, before anything is stored."""
    for path in paths:
        os.stat(path)
    asked = {readable_str(key): readable_str(value) for key, value in (labels or {}).items()}
    result = Result()
    by_run: dict[str, Imported] = {}
    for each in group(_found(paths, result.unread)):
        if not each.is_run:
            _loose(store, artifacts, each, result)
            continue
        done = _import(store, artifacts, each, dict(asked))
        known = by_run.get(done.run)
        if known is None:
            by_run[done.run] = done
        else:  # copies of one run's files in several places
            known.files += done.files
            known.added += done.added
            known.tokens, known.turns, known.outcome = done.tokens, done.turns, done.outcome
            known.problems = done.problems
    result.runs = list(by_run.values())
    finish.judge(store, [run.run for run in result.runs if run.added])
    return result


def _found(paths: Sequence[str], unread: list[tuple[str, str]]) -> Iterator[Found]:
    """Every file under the paths, once, recognised by content."""
    seen: set[str] = set()
    for path in paths:
        for file in _walk(path, unread):
            real = os.path.realpath(file)
            if real in seen:
                continue
            seen.add(real)
            try:
                yield _look(file)
            except OSError as error:
                unread.append((file, error.strerror or str(error)))


def _walk(path: str, unread: list[tuple[str, str]]) -> Iterator[str]:
    def closed(error: OSError) -> None:
        unread.append((str(error.filename), error.strerror or str(error)))

    if os.path.isfile(path):
        yield path
        return
    if not os.path.isdir(path):
        unread.append((path, "is neither a file nor a folder"))
        return
    for folder, inside, files in os.walk(path, onerror=closed):
        inside.sort()
        for name in sorted(files):
            file = os.path.join(folder, name)
            if os.path.isfile(file):
                yield file


def _look(path: str) -> Found:
    digest = hashlib.sha256()
    size = 0
    head = tail = b""
    with open(path, "rb") as file:
        facts = os.fstat(file.fileno())
        while chunk := file.read(1 << 20):
            digest.update(chunk)
            size += len(chunk)
            if len(head) <= 2 * ENOUGH:
                head += chunk[: 2 * ENOUGH + 1 - len(head)]
            tail = (tail + chunk)[-ENOUGH:]
    # A long file is recognised by its first and last bytes.
    kind: str = recognise(head if size <= 2 * ENOUGH else head[: ENOUGH + 1] + tail)
    if kind == "run.json" and os.path.basename(path).lower() != "run.json" and not path.lower().endswith(".json"):
        kind = "unknown"
    return Found(path, os.path.dirname(path) or ".", kind, digest.hexdigest(), size, facts.st_mtime_ns)


def _loose(store: Store, artifacts: Artifacts, each: Group, result: Result) -> None:
    """Files of no run: stored, with the reason."""
    for file in each.files:
        why = "it is empty" if not file.size else "nothing of this engine's is recognised in it"
        result.loose.append((file.path, why))
        if not file.size:
            continue
        artifacts.put_file(file.path, file.sha256)
        row = {"sha256": file.sha256, "name": file.name, "size": file.size, "why": why, "stored_wall_ns": wall_ns()}
        with store.write() as connection:
            insert_new(connection, LOOSE_FILES, row)


def _kind(file: Found) -> str:
    return "other" if file.kind in ("unknown", "empty") else file.kind


def _import(store: Store, artifacts: Artifacts, each: Group, labels: dict[str, str]) -> Imported:
    full = [file for file in each.files if file.size]
    for file in full:
        artifacts.put_file(file.path, file.sha256)
    kinds = {file.sha256: _kind(file) for file in full}
    with store.write() as connection:
        found = identity.matches(connection, kinds)
        if found:
            run_no, run_id = found[0].run_no, found[0].run_id
            for other in found[1:]:
                # Two runs until now, because the files that tie them together come only here.
                tied = identity.TELLING & set(other.mine.values()) and set(other.mine) <= set(kinds)
                if other.source == "import" and found[0].new and tied:
                    identity.absorb(connection, run_no, other.run_no)
        else:
            run_id = _new_id(connection, kinds)
            run_no = new_run(
                connection, run_id, "import", **_times(full), directory=readable_str(os.path.abspath(each.folder))
            )
        added = [file for file in full if _add(connection, run_no, file)]
        put_labels(connection, run_no, labels, "user", force=True)
        if added or not found:
            _rows(connection, artifacts, run_no)
            put_labels(connection, run_no, names.of(each), "file name")
        run = connection.execute(select(RUNS).where(RUNS.c.run_no == run_no)).mappings().one()
    return Imported(
        run=run_id,
        already=bool(found),
        outcome=run["outcome"],
        tokens=run["n_tokens"],
        turns=run["n_turns"],
        files=[file.path for file in each.files],
        added=[file.path for file in added],
        problems=run["problems"] or [],
    )


def _new_id(connection: Connection, kinds: Mapping[str, str]) -> str:
    """An id from the files' hashes, so that two stores give the same files the same id."""
    salt = 0
    while True:
        text = "\n".join(sorted(kinds)) + (f"\n{salt}" if salt else "")
        run_id = hashlib.sha256(text.encode()).hexdigest()[:32]
        taken = connection.execute(select(RUNS.c.run_no).where(RUNS.c.run_id == run_id)).first()
        if taken is None:
            query = select(RUN_ALIASES.c.run_no).where(RUN_ALIASES.c.run_id == run_id)
            taken = connection.execute(query).first()
        if taken is None:
            return run_id
        salt += 1


def _times(full: Sequence[Found]) -> dict[str, Any]:
    """When it ended as far as files say: the newest of them was written last."""
    newest = max(file.mtime_ns for file in full)
    return {"started_wall_ns": newest, "ended_wall_ns": newest}


def _add(connection: Connection, run_no: int, file: Found) -> bool:
    """Note a file of the run; False when it is known already."""
    kind = _kind(file)
    awaited = connection.execute(
        update(ARTIFACTS)
        .where(ARTIFACTS.c.run_no == run_no, ARTIFACTS.c.sha256 == file.sha256, ARTIFACTS.c.state != "stored")
        .values(state="stored", problem=None)
    )
    if awaited.rowcount:  # an agent told of it, and it comes this way before it was fetched
        return True
    if not finish.put_file(connection, run_no, file.sha256, kind, file.name, file.size, "import"):
        return False
    name = file.name[:200]
    taken = select(ARTIFACTS.c.sha256, ARTIFACTS.c.state).where(ARTIFACTS.c.run_no == run_no, ARTIFACTS.c.name == name)
    row = connection.execute(taken).first()
    values = {"kind": kind, "size": file.size, "sha256": file.sha256, "state": "stored"}
    if row is not None and row.sha256 != file.sha256:
        name = f"{name}.{file.sha256[:12]}"
        row = None
    if row is None:
        connection.execute(insert(ARTIFACTS).values(run_no=run_no, name=name, **values))
    else:
        here = (ARTIFACTS.c.run_no == run_no, ARTIFACTS.c.name == name)
        connection.execute(update(ARTIFACTS).where(*here).values(**values))
    return True


def _rows(connection: Connection, artifacts: Artifacts, run_no: int) -> None:
    """Make the run's rows with its new files: an imported run from its files, an agent's run from its record."""
    run = connection.execute(select(RUNS.c.source, RUNS.c.run_id).where(RUNS.c.run_no == run_no)).one()
    if run.source == "import":
        rewrite(connection, artifacts, run_no)
        return
    from bmoe_collector.ingest.rebuild import reparse_in

    reparse_in(connection, artifacts, run_no, run.run_id)
