"""An imported run's rows: made from its stored files, and made again the same way (law 1).

In: a run whose files are in the artifact store. Out: all its derived rows and the columns of its row in `runs`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bmoe_proto.contract import sidecar, traces
from bmoe_proto.contract.metrics import NotOursError, parse_metrics
from bmoe_proto.numbers import count
from bmoe_proto.outcome import EndFacts, Outcome, decide
from sqlalchemy import Connection, delete, select, update

from bmoe_collector.importer import runjson
from bmoe_collector.ingest import files, finish
from bmoe_collector.ingest.record import put_labels
from bmoe_collector.ingest.sink import Sink
from bmoe_collector.ingest.stdout_rows import StdoutRows
from bmoe_collector.store.artifacts import Artifacts
from bmoe_collector.store.engine import plain, wall_ns
from bmoe_collector.store.schema import ARTIFACTS, CONFIGS, DERIVED, RUNS, TRAILERS

TRACES = ("route", "compute", "compute_layers", "io")
HEAD = 1 << 20
TAIL = 16 << 10
SIMULATOR = b"bmoe-sim: this is a simulator"
_SIMULATED = re.compile(r"\bsim(?:ulat(?:ed|or))?\b", re.IGNORECASE)


@dataclass(slots=True)
class _Parts:
    """What the files of one run say together."""

    stdout: StdoutRows | None = None
    run: runjson.RunJson | None = None
    stderr_tail: bytes = b""
    metrics: bool = False
    simulated: bool = False
    cut_off: list[str] = field(default_factory=list)
    problems: list[dict[str, Any]] = field(default_factory=list)
    columns: dict[str, Any] = field(default_factory=dict)

    def problem(self, name: str, line: int, what: str) -> None:
        self.problems.append({"file": name, "line": line, "what": what})


def rewrite(connection: Connection, artifacts: Artifacts, run_no: int) -> None:
    """Delete and make again all rows of an imported run. Raises ArtifactError when a file is missing or damaged."""
    for table in DERIVED:
        connection.execute(delete(table).where(table.c.run_no == run_no))
    stored = connection.execute(
        select(ARTIFACTS.c.name, ARTIFACTS.c.kind, ARTIFACTS.c.sha256, ARTIFACTS.c.size)
        .where(ARTIFACTS.c.run_no == run_no, ARTIFACTS.c.state == "stored")
        .order_by(ARTIFACTS.c.name)
    ).all()
    parts, sink = _Parts(), Sink(run_no)
    seen: set[str] = set()
    # stdout before the CSV: a turn's place is the place of its end on stdout.
    for name, kind, sha256, size in sorted(stored, key=lambda row: (row.kind != "stdout", row.name)):
        if kind in seen and kind in ("metrics", "stdout", "run.json"):
            parts.problem(name, 0, f"a second {kind} of the run: kept, its rows are not")
            continue
        seen.add(kind)
        _file(connection, artifacts, parts, sink, name, kind, sha256, size or 0)
    sink.flush(connection)
    merged = files.merge_turns(connection, run_no)
    if parts.run is not None:
        put_labels(connection, run_no, parts.run.labels, "run.json")
    end_seen = _end_seen(connection, run_no, parts)
    outcome = _outcome(parts, merged, end_seen=end_seen)
    reasons = list(parts.cut_off)
    if not end_seen:
        reasons.append("no end record: neither a trailer nor a report nor the end of a turn")
    whole = {"complete": not reasons, "reasons": reasons, "frames": 0, "segments": 0, "gaps": 0}
    connection.execute(
        update(RUNS)
        .where(RUNS.c.run_no == run_no)
        .values(
            **_columns(connection, run_no, parts),
            **merged,
            outcome=outcome.outcome,
            cause=outcome.cause or None,
            evidence=list(outcome.evidence),
            ended=True,
            launched=True,
            complete=whole["complete"],
            completeness=whole,
            problems=parts.problems or None,
            changed_wall_ns=wall_ns(),
        )
    )


def _file(
    connection: Connection,
    artifacts: Artifacts,
    parts: _Parts,
    sink: Sink,
    name: str,
    kind: str,
    sha256: str,
    size: int,
) -> None:
    if kind in TRACES:
        _trace(artifacts, parts, name, sha256)
        return
    if kind == "other":
        parts.problem(name, 0, "nothing of this engine's is recognised in it; kept as it is")
        return
    if kind == "stdout":
        parts.stdout = StdoutRows(sink)
        for data in artifacts.chunks(sha256):
            parts.stdout.feed(data)
            sink.flush(connection)
        parts.stdout.close()
        return
    if kind == "stderr":
        for data in artifacts.chunks(sha256):
            parts.stderr_tail = (parts.stderr_tail + data)[-TAIL:]
            parts.simulated |= SIMULATOR in parts.stderr_tail or SIMULATOR in data
        return
    if size > finish.MOST_METRICS_BYTES:
        parts.problem(name, 0, f"{size} bytes are more than {finish.MOST_METRICS_BYTES}: kept, without rows")
        return
    data = artifacts.get(sha256)
    if kind == "metrics":
        try:
            file = parse_metrics(data)
        except NotOursError as error:
            parts.problem(name, 0, str(error))
            return
        parts.metrics = True
        files.metrics_rows(sink, file)
        files.put_config(connection, files.config_row(sink.run_no, file))
        for each in file.problems:
            parts.problem(name, each.line, each.what)
            if "cut off" in each.what:
                parts.cut_off.append(f"{name}: line {each.line}: the last row was cut off")
        if file.more_problems:
            parts.problem(name, 0, f"{file.more_problems} more lines not understood")
    elif kind == "run.json":
        parts.run = runjson.parse(data)
        for what in parts.run.problems:
            parts.problem(name, 0, what)
    elif kind == "sidecar":
        try:
            told = sidecar.parse_sidecar(data)
        except NotOursError as error:
            parts.problem(name, 0, str(error))
            return
        parts.columns["sidecar"] = plain(dict(told.values))
        for each in told.problems:
            parts.problem(name, each.line, each.what)


def _trace(artifacts: Artifacts, parts: _Parts, name: str, sha256: str) -> None:
    """A trace's rows stay in its file; its head may say what nothing else says."""
    head = next(iter(artifacts.chunks(sha256)), b"")[:HEAD]
    try:
        told = traces.read_header(head).preamble
    except NotOursError as error:
        parts.problem(name, 0, str(error))
        return
    if told.get("model"):
        parts.columns.setdefault("model_name", _base(str(told["model"])))
    if told.get("arch"):
        parts.columns.setdefault("model_arch", str(told["arch"]))


def _end_seen(connection: Connection, run_no: int, parts: _Parts) -> bool:
    said = parts.stdout
    if said is not None and (said.report_seen or said.done or said.decided):
        return True
    query = select(TRAILERS.c.at).where(TRAILERS.c.run_no == run_no).limit(1)
    return connection.execute(query).first() is not None


def _outcome(parts: _Parts, merged: Mapping[str, int], *, end_seen: bool) -> Outcome:
    """By the design's table; without an exit in `run.json` the end records decide."""
    said, run = parts.stdout, parts.run
    session = said is not None and said.session
    observed = run is not None and run.exit_observed
    silent = said is None and not parts.metrics
    rejected = len(said.rejected) if said is not None else 0
    cancelled = said.cancelled if said is not None else 0
    ended = said.done + said.decided - cancelled if said is not None else 0
    asked = said.turns + rejected if said is not None and session else 0
    code = run.exit_code if run is not None else None
    signal = run.signal if run is not None else None
    facts = EndFacts(
        exit_observed=True,
        exit_code=code if observed else 0,
        signal=signal,
        ended_by="engine",
        tokens_asked=_tokens_asked(parts, session=session),
        tokens_got=merged["n_tokens"],
        # The engine stops early only at an end of generation: a clean end says that it was one.
        ended_by_eog=end_seen and (code == 0 or not observed),
        end_record=None if observed and silent else end_seen,
        fatal_error=said.fatal_error if said is not None else "",
        turns_asked=asked,
        turns_sent=asked,
        turns_ended=ended,
        turns_rejected=rejected,
        turns_cancelled=cancelled,
        stderr_tail=parts.stderr_tail,
    )
    outcome = decide(facts)
    if observed:
        return outcome
    evidence = tuple(text for text in outcome.evidence if not text.startswith("exit "))
    return Outcome(outcome.outcome, outcome.cause, (*evidence, "its exit was not recorded"))


def _tokens_asked(parts: _Parts, *, session: bool) -> int | None:
    if session:
        return None
    told = parts.run.flag("--n-predict") if parts.run is not None else None
    if told is not None and (asked := count(told)) is not None:
        return asked
    return parts.stdout.steps_asked if parts.stdout is not None else None


def _columns(connection: Connection, run_no: int, parts: _Parts) -> dict[str, Any]:
    """Columns of `runs` that the files say."""
    config: Mapping[str, Any] = (
        connection.execute(select(CONFIGS.c["keys"]).where(CONFIGS.c.run_no == run_no)).scalar() or {}
    )
    columns: dict[str, Any] = dict(parts.columns)
    if config.get("engine"):
        columns["engine_version"] = str(config["engine"])
    if config.get("model"):
        columns["model_name"] = _base(str(config["model"]))
    if config.get("arch"):
        columns["model_arch"] = str(config["arch"])
    said, run = parts.stdout, parts.run
    if said is not None:
        columns["session"] = said.session
        if said.ready is not None:
            columns["ready"] = plain(said.ready)
            columns.setdefault("model_arch", said.ready.get("arch"))
    simulated = parts.simulated or _SIMULATED.search(str(config.get("engine") or "")) is not None
    if run is not None:
        columns |= _from_run(run, columns)
        simulated = simulated or columns["simulated"]
    columns["simulated"] = simulated
    return columns


def _from_run(run: runjson.RunJson, columns: Mapping[str, Any]) -> dict[str, Any]:
    prompt = run.flag("--prompt")
    data = prompt.encode("utf-8", "surrogateescape") if prompt is not None else None
    model = run.flag("--model")
    found: dict[str, Any] = {
        "argv": plain(run.argv),
        "asked": plain(run.found),
        "engine_name": run.engine,
        "exit_observed": run.exit_observed,
        "exit_code": run.exit_code,
        "signal": run.signal,
        "prompt": data,
        "prompt_sha256": hashlib.sha256(data).hexdigest() if data is not None else None,
        "simulated": run.found.get("simulated") is True or run.engine == "bmoe-sim",
    }
    if model and not columns.get("model_name"):
        found["model_name"] = _base(model)
    if run.argv and "--session" in run.argv:
        found["session"] = True
    return found


def _base(path: str) -> str:
    return path.replace("\\", "/").rstrip("/").rsplit("/", 1)[-1]
