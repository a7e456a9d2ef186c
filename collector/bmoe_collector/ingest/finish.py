"""What is written about a run beside its rows: how far it is, how it ended, its files, whether it is whole.

In: an open transaction and a reader, or a file that was fetched. Out: columns of `runs`, rows of `artifacts` and
`run_files`, rows made from the metrics CSV. All of it can be repeated with the same result.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

from bmoe_proto import asking, framing
from bmoe_proto.contract.metrics import NotOursError, parse_metrics
from bmoe_proto.v1 import telemetry_pb2 as pb
from google.protobuf.message import DecodeError
from sqlalchemy import BindParameter, Connection, bindparam, func, insert, select, update

from bmoe_collector.ingest import ending, files, identity
from bmoe_collector.ingest.reader import WHOLE, RunReader
from bmoe_collector.ingest.record import change_run, put_started
from bmoe_collector.ingest.sink import Sink
from bmoe_collector.store.artifacts import Artifacts
from bmoe_collector.store.engine import Store, plain, wall_ns
from bmoe_collector.store.schema import ARTIFACTS, NOTES, RUN_FILES, RUNS, TOKENS_CSV

log = logging.getLogger(__name__)
MOST_FILES = 256
"""Files of one run that are looked at; an engine writes a handful."""
MOST_METRICS_BYTES = 256 << 20
"""A CSV is read in memory; a night of tokens is some megabytes."""
HOST_NOTES = 1 << 30
"""Places of notes that a host added; those of the phone's record are below."""
# Statements of every run's end are made once: making one costs more than running it.
_RUN: BindParameter[int] = bindparam("of_run")
_EVIDENCE = (
    select(NOTES.c.text)
    .where(NOTES.c.run_no == _RUN, NOTES.c.at >= HOST_NOTES, NOTES.c.code == "kill_evidence")
    .order_by(NOTES.c.at)
)
_CSV_TOKENS = select(func.count()).select_from(TOKENS_CSV).where(TOKENS_CSV.c.run_no == _RUN)
_STATES = select(ARTIFACTS.c.name, ARTIFACTS.c.state, ARTIFACTS.c.problem).where(
    ARTIFACTS.c.run_no == _RUN, ARTIFACTS.c.kind.not_in(("stdout", "stderr"))
)
_NAMES = select(ARTIFACTS.c.name).where(ARTIFACTS.c.run_no == _RUN)
_FILES = select(RUN_FILES.c.sha256, RUN_FILES.c.kind).where(RUN_FILES.c.run_no == _RUN)


def columns(connection: Connection, artifacts: Artifacts, reader: RunReader) -> None:
    """Bring the run's row to where the reader is."""
    run_no = reader.run_no
    said = reader.stdout
    values: dict[str, Any] = dict(reader.changes)
    if "started_boot_ns" in values:
        put_started(connection, reader)
    values["n_tokens"] = said.tokens
    values["n_turns"] = said.turns
    if said.ready is not None:
        values["ready"] = plain(said.ready)
    if reader.ended is not None:
        _expect_files(connection, reader)
        _absorb_imports(connection, artifacts, run_no)
        add_host_evidence(connection, reader)
        values |= ending.columns(reader)
        merged = files.merge_turns(connection, run_no)
        values |= merged
    whole = ending.completeness(reader, artifact_states(connection, run_no) if reader.ended else {})
    values |= {"completeness": whole, "complete": whole["complete"], "changed_wall_ns": wall_ns()}
    if reader.problems:
        earlier = connection.execute(select(RUNS.c.problems).where(RUNS.c.run_no == run_no)).scalar() or []
        values["problems"] = [{"what": text} for text in reader.problems] + [each for each in earlier if "file" in each]
    change_run(connection, run_no, values)
    reader.changes.clear()


def add_host_evidence(connection: Connection, reader: RunReader) -> None:
    """Give the reader what hosts found in the phone's log about this run's end."""
    rows = connection.execute(_EVIDENCE, {"of_run": reader.run_no}).scalars()
    reader.kill_evidence += [text for text in rows if text not in reader.kill_evidence]


def _csv_tokens(connection: Connection, run_no: int) -> int:
    return int(connection.execute(_CSV_TOKENS, {"of_run": run_no}).scalar() or 0)


def artifact_states(connection: Connection, run_no: int) -> dict[str, tuple[str, str]]:
    """State and problem of a run's fetched files (its streams come in frames, not as files)."""
    rows = connection.execute(_STATES, {"of_run": run_no})
    return {name: (state, problem or "") for name, state, problem in rows}


def _expect_files(connection: Connection, reader: RunReader) -> None:
    """Rows for the files that the run's end names."""
    ended = reader.ended
    assert ended is not None
    have = set(connection.execute(_NAMES, {"of_run": reader.run_no}).scalars())
    expected = [(facts.name[:255], facts.kind, facts.size, facts.sha256, facts.problem) for facts in ended.artifacts]
    expected.append(("stdout", "stdout", ended.stdout_bytes, ended.stdout_sha256, ""))
    expected.append(("stderr", "stderr", ended.stderr_bytes, ended.stderr_sha256, ""))
    rows: list[dict[str, Any]] = []
    for name, kind, size, sha, problem in expected[-MOST_FILES:]:
        stream = kind in ("stdout", "stderr")
        if name in have or (stream and not size):
            continue
        have.add(name)
        rows.append(
            {
                "run_no": reader.run_no,
                "name": name[:255],
                "kind": (kind or "other")[:24],
                "size": min(size, (1 << 63) - 1),
                "sha256": sha.hex()[:64],
                "state": "awaited" if sha or stream else "given_up",
                "problem": problem or None,
            }
        )
    if not rows:
        return
    connection.execute(insert(ARTIFACTS), rows)
    known = set(connection.execute(_FILES, {"of_run": reader.run_no}).scalars())
    by_hash = {row["sha256"]: row for row in reversed(rows) if row["sha256"] and row["size"]}
    fresh = [
        {key: row[key] for key in ("run_no", "sha256", "kind", "name", "size")} | {"origin": "agent"}
        for sha256, row in by_hash.items()
        if sha256 not in known
    ]
    if fresh:
        connection.execute(insert(RUN_FILES), fresh)


def put_file(connection: Connection, run_no: int, sha256: str, kind: str, name: str, size: int, origin: str) -> bool:
    """Note that a file with this hash is the run's; False when it is known already."""
    known = select(RUN_FILES.c.sha256).where(RUN_FILES.c.run_no == run_no, RUN_FILES.c.sha256 == sha256)
    if connection.execute(known).first() is not None:
        return False
    connection.execute(
        insert(RUN_FILES).values(
            run_no=run_no, sha256=sha256, kind=kind[:24], name=name, size=min(size, (1 << 63) - 1), origin=origin
        )
    )
    return True


def _absorb_imports(connection: Connection, artifacts: Artifacts, run_no: int) -> None:
    """Runs that were imported from this run's files before it was delivered are this run."""
    mine = {row[0]: row[1] for row in connection.execute(_FILES, {"of_run": run_no})}
    for match in identity.matches(connection, mine, imported=True):
        if match.run_no != run_no:
            log.info("run %s had been imported as %s", run_no, match.run_id)
            if identity.absorb(connection, run_no, match.run_no):
                files_again(connection, artifacts, run_no)


def artifact(connection: Connection, artifacts: Artifacts, run_no: int, name: str, kind: str, sha256: str) -> bool:
    """Note a file that is in the artifact store now, and make its rows; False when it was there already."""
    here = (ARTIFACTS.c.run_no == run_no, ARTIFACTS.c.name == name)
    row = connection.execute(select(ARTIFACTS).where(*here)).mappings().first()
    if row is not None and row["state"] == "stored" and row["sha256"] == sha256:
        return False
    size, last = 0, b"\n"
    for chunk in artifacts.chunks(sha256):
        size, last = size + len(chunk), chunk[-1:] or last
    data = artifacts.get(sha256) if kind == "metrics" and size <= MOST_METRICS_BYTES else b""
    values = {"kind": kind[:24], "size": size, "sha256": sha256, "state": "stored"}
    if kind in asking.ARTIFACTS and last != b"\n":
        values["problem"] = ending.CUT
    if row is None:
        connection.execute(insert(ARTIFACTS).values(run_no=run_no, name=name, **values))
    else:
        connection.execute(update(ARTIFACTS).where(*here).values(**values))
    if size:
        put_file(connection, run_no, sha256, kind, name, size, "agent")
    if kind == "metrics":
        if size > MOST_METRICS_BYTES:
            why = f"{size} bytes of metrics are more than {MOST_METRICS_BYTES}: kept, without rows"
            file_problems(connection, run_no, name, [(0, why)])
        metrics(connection, run_no, name, data)
        merged = files.merge_turns(connection, run_no)
        connection.execute(update(RUNS).where(RUNS.c.run_no == run_no).values(**merged))
    _artifact_reasons(connection, run_no)
    return True


def metrics(connection: Connection, run_no: int, name: str, data: bytes) -> None:
    """Rows of a metrics CSV; a second one of the same run is kept as a file only."""
    if not data:
        return
    if _csv_tokens(connection, run_no):
        file_problems(connection, run_no, name, [(0, "a second metrics file of the run: kept, its rows are not")])
        return
    try:
        file = parse_metrics(data)
    except NotOursError as error:
        file_problems(connection, run_no, name, [(0, str(error))])
        return
    sink = Sink(run_no)
    files.metrics_rows(sink, file)
    sink.flush(connection)
    files.put_config(connection, files.config_row(run_no, file))
    file_problems(connection, run_no, name, [(each.line, each.what) for each in file.problems])


def file_problems(connection: Connection, run_no: int, name: str, found: Sequence[tuple[int, str]]) -> None:
    """Add what of a file was not understood to the run's problems."""
    if not found:
        return
    earlier = connection.execute(select(RUNS.c.problems).where(RUNS.c.run_no == run_no)).scalar() or []
    fresh = [{"file": name, "line": line, "what": what} for line, what in found]
    rest = [each for each in earlier if each not in fresh]
    connection.execute(update(RUNS).where(RUNS.c.run_no == run_no).values(problems=rest + fresh))


def _artifact_reasons(connection: Connection, run_no: int) -> None:
    """Bring the reasons for incompleteness that are about files up to date."""
    run = connection.execute(select(RUNS.c.completeness, RUNS.c.exit_code).where(RUNS.c.run_no == run_no)).one()
    whole: Mapping[str, Any] = run.completeness or {}
    reasons = [reason for reason in whole.get("reasons", ()) if not reason.startswith("artifact ")]
    reasons = ending.file_reasons(artifact_states(connection, run_no), well=run.exit_code == 0) + reasons
    values = {**whole, "complete": not reasons, "reasons": reasons}
    connection.execute(
        update(RUNS)
        .where(RUNS.c.run_no == run_no)
        .values(completeness=values, complete=not reasons, changed_wall_ns=wall_ns())
    )


def given_up(connection: Connection, run_id: str, name: str, why: str) -> None:
    """A file that cannot be had any more."""
    run_no = connection.execute(select(RUNS.c.run_no).where(RUNS.c.run_id == run_id)).scalar_one()
    connection.execute(
        update(ARTIFACTS)
        .where(ARTIFACTS.c.run_no == run_no, ARTIFACTS.c.name == name, ARTIFACTS.c.state == "awaited")
        .values(state="given_up", problem=why)
    )
    _artifact_reasons(connection, run_no)


def files_again(connection: Connection, artifacts: Artifacts, run_no: int) -> None:
    """Make the rows of a run's stored files, where it has none of them yet."""
    rows = connection.execute(
        select(ARTIFACTS.c.name, ARTIFACTS.c.sha256)
        .where(ARTIFACTS.c.run_no == run_no, ARTIFACTS.c.kind == "metrics", ARTIFACTS.c.state == "stored")
        .order_by(ARTIFACTS.c.name)
    )
    for name, sha256 in rows.all():
        metrics(connection, run_no, name, artifacts.get(sha256))


def stream_chunks(connection: Connection, run_no: int, number: int) -> Iterator[bytes]:
    """One output stream of an agent's run, put together from its frames piece by piece (gaps are left out)."""
    from bmoe_collector.ingest.rebuild import stored_blocks

    at = 0
    for _segment, _offset, data in stored_blocks(connection, run_no):
        for raw in framing.read_block(data).frames():
            try:
                frame = pb.Frame.FromString(raw)
            except DecodeError:  # kept as an unknown frame
                continue
            if frame.WhichOneof("what") != "output" or frame.output.stream != number:
                continue
            output = frame.output
            end = output.offset + len(output.data)
            if end > at:
                yield output.data[max(0, at - output.offset) :]
                at = end


def streams(store: Store, artifacts: Artifacts, run_id: str, reader: RunReader | None = None) -> None:
    """Keep an ended run's stdout and stderr as files, as an import of them would. One of which nothing came is not awaited.

    `reader`: one that has just read the whole record, so that short streams need not be read again.
    """
    stored: dict[str, tuple[str, int]] = {}
    with store.read() as connection:
        run_no = int(connection.execute(select(RUNS.c.run_no).where(RUNS.c.run_id == run_id)).scalar_one())
        for name, number in (("stdout", pb.STREAM_STDOUT), ("stderr", pb.STREAM_STDERR)):
            held = reader.streams[number].whole if reader is not None else None
            found = _stored(connection, artifacts, run_no, number, None if held is None else bytes(held))
            if found is not None:
                stored[name] = found
    with store.write() as connection:
        query = select(ARTIFACTS.c.name, ARTIFACTS.c.state, ARTIFACTS.c.sha256).where(ARTIFACTS.c.run_no == run_no)
        for row in connection.execute(query.where(ARTIFACTS.c.name.in_(("stdout", "stderr")))).all():
            values: dict[str, Any] = {"state": "given_up", "problem": "none of its bytes came"}
            if row.name in stored:
                sha256, size = stored[row.name]
                values = {"sha256": sha256, "size": size, "state": "stored", "problem": None}
            if row.state == "stored" and values.get("sha256", row.sha256) == row.sha256:
                continue
            here = (ARTIFACTS.c.run_no == run_no, ARTIFACTS.c.name == row.name)
            connection.execute(update(ARTIFACTS).where(*here).values(**values))


def _stored(
    connection: Connection, artifacts: Artifacts, run_no: int, number: int, held: bytes | None
) -> tuple[str, int] | None:
    """Hash and size of a stream that is in the artifact store now; None for one that is empty. Only a short one is held whole."""
    if held is None:
        digest, size, kept = hashlib.sha256(), 0, bytearray()
        for data in stream_chunks(connection, run_no, number):
            digest.update(data)
            size += len(data)
            if size <= WHOLE:
                kept += data
        if size > WHOLE:
            return artifacts.put_chunks(stream_chunks(connection, run_no, number), digest.hexdigest()), size
        held = bytes(kept)
    return (artifacts.put(held), len(held)) if held else None


def judge(store: Store, run_ids: Sequence[str]) -> None:
    """Have facts and verdicts of runs computed; what goes wrong there never costs a record."""
    try:
        module = import_module("bmoe_collector.judge")
    except ModuleNotFoundError as error:
        if error.name != "bmoe_collector.judge":
            log.exception("runs could not be judged")
        return
    try:
        module.refresh(store, list(run_ids))
    except Exception:  # a rule that fails on a strange run must not stop the drain
        log.exception("runs %s could not be judged; `bmoe judge` tries again", ", ".join(run_ids))
