"""What a database must hold after a play, held against what the engines themselves wrote elsewhere.

In: the database's rows, the stored files, the engines' independent copies (BMOE_SIM copy=DIR), what was done to which phone.
Out: problems; none is the answer wanted. Everything is read from the raw blocks, the objects and the copies; of the product's
own rows only those are used that are being checked. Files are looked at in `files`.

What may differ, and only there: a run whose spool was torn, bit-flipped or full may lack bytes where it says so; the
copy of an engine that was killed may lack its very last write (the copy is written second); the engine itself loses output
on a full disk.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from bmoe_proto import framing
from bmoe_proto.v1 import telemetry_pb2 as pb
from faults.harness import files
from faults.harness.files import LAST_WRITE, Written

LOSSY = {"tail_torn", "tail_flipped", "disk_full"}
ROWS_OF = {"sample": "samples", "gate": "gates", "gap": "gaps where declared"}
"""Frames of which each is one row of a table."""
PROGRESS = re.compile(rb"^BMOE_PROGRESS \{.*\}\r?$", re.MULTILINE)


class Rows(Protocol):
    """A database that answers."""

    def rows(self, query: str) -> list[dict[str, Any]]: ...


@dataclass(slots=True)
class Stored:
    """A run's raw record, read without the product's reader."""

    stdout: bytearray = field(default_factory=bytearray)
    holes: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    segments: dict[bytes, list[bytes]] = field(default_factory=lambda: defaultdict(list))
    ended: list[tuple[pb.RunEnded, bytes]] = field(default_factory=list)  # each with the segment it is in
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Phone:
    """What the truth needs to know of a phone."""

    uuid: str
    copies: Path
    harmed: Mapping[str, Set[str]]  # faults by the run that may have lost something to them


def check(database: Rows, phones: Sequence[Phone], cells: Iterable[str], artifacts: Path) -> list[str]:
    """Everything that must hold."""
    stored = read_raw(database)
    runs = {run["run_id"]: run for run in database.rows("select * from runs")}
    copies = {run_id: written for phone in phones for run_id, written in read_copies(phone.copies).items()}
    problems = [
        f"run {run_id[:8]} was written by an engine and is not stored" for run_id in copies if run_id not in runs
    ]
    of_phone = {phone.uuid: phone for phone in phones}
    tokens, rows = _counts(database, "tokens_stdout"), _counts(database, "tokens_csv")
    told = {kind: _counts(database, table) for kind, table in ROWS_OF.items()}
    named = files.by_run(database.rows("select * from artifacts order by run_no, name"))
    for run_id, run in runs.items():
        name = f"run {run_id[:8]} ({run['cell']}/{run['attempt']})"
        raw = stored.get(run_id, Stored())
        phone = of_phone.get(run["agent_uuid"])
        if phone is None:
            problems.append(f"{name}: of a phone that is not here: {run['agent_uuid']}")
            continue
        written, of_run = copies.get(run_id), named.get(run["run_no"], [])
        harm = phone.harmed.get(run_id, frozenset())
        lossy, full = bool(harm & LOSSY), "disk_full" in harm
        found = [*raw.problems, *_proof(raw, lossy), *_ended(run, files.not_written(of_run, written), lossy)]
        found += _stdout(run, raw, written.stdout if written is not None else None, lossy=lossy, full=full)
        found += _tokens(raw, tokens.get(run["run_no"], 0), lossy)
        rows_of = {kind: counts.get(run["run_no"], 0) for kind, counts in told.items()}
        found += [
            f"{n} rows of {kind}, {raw.kinds[kind]} frames" for kind, n in rows_of.items() if n != raw.kinds[kind]
        ]
        found += files.check(run, of_run, artifacts, written, rows.get(run["run_no"], 0), lossy=lossy, full=full)
        problems += [f"{name}: {problem}" for problem in found]
    problems += _plan(runs.values(), phones, list(cells))
    problems += [
        f"{run_id[:8]}: token {at} twice"
        for run_id, at in _twice(database.rows("select run_no as a, at as b from tokens_stdout"))
    ]
    return problems


def read_raw(database: Rows) -> dict[str, Stored]:
    """Every run's raw record by run id."""
    found: dict[str, Stored] = defaultdict(Stored)
    outputs: dict[str, list[pb.Output]] = defaultdict(list)
    query = (
        "select r.run_id, b.segment, b.offset, b.data from blocks b join runs r on r.run_no = b.run_no "
        "order by b.run_no, b.segment, b.offset"
    )
    ends: dict[tuple[str, str], int] = {}
    for row in database.rows(query):
        run_id, run = row["run_id"], found[row["run_id"]]
        expected = ends.get((run_id, row["segment"]), 0)
        if row["offset"] != expected:
            run.problems.append(f"segment {row['segment'][:8]}: a block at {row['offset']}, not at {expected}")
        data = bytes(row["data"])
        ends[run_id, row["segment"]] = row["offset"] + len(data)
        for block in framing.scan(data):
            for raw in block.frames():
                frame = pb.Frame.FromString(raw)
                _take(run, frame, raw, run_id, row["segment"])
                if frame.WhichOneof("what") == "output" and frame.output.stream == pb.STREAM_STDOUT:
                    outputs[run_id].append(frame.output)
    for run_id, pieces in outputs.items():
        _join(found[run_id], pieces)
    return dict(found)


def _take(run: Stored, frame: pb.Frame, raw: bytes, run_id: str, segment: str) -> None:
    if frame.run_id.hex() != run_id or frame.segment.hex() != segment:
        run.problems.append(f"a frame of run {frame.run_id.hex()[:8]} in segment {segment[:8]}")
    have = run.segments[frame.segment]
    if frame.seq != len(have):
        twice = frame.seq < len(have)
        run.problems.append(
            f"segment {segment[:8]}: frame {frame.seq} {'twice' if twice else f'after {len(have) - 1}'}"
        )
    have.append(raw)
    run.kinds[frame.WhichOneof("what") or ""] += 1
    if frame.WhichOneof("what") == "run_ended":
        run.ended.append((frame.run_ended, frame.segment))


def _join(run: Stored, pieces: list[pb.Output]) -> None:
    """Bytes by their offsets; what is there twice must be the same (a spool that lost its tail tells it again)."""
    covered = bytearray()
    for piece in pieces:
        end = piece.offset + len(piece.data)
        if end > len(run.stdout):
            run.stdout.extend(bytes(end - len(run.stdout)))
            covered.extend(bytes(end - len(covered)))
        for at, byte in enumerate(piece.data, piece.offset):
            if covered[at] and run.stdout[at] != byte:
                run.problems.append(f"stdout is told in two ways at {at}")
                break
            run.stdout[at] = byte
        covered[piece.offset : end] = b"\1" * len(piece.data)
    run.holes = covered.count(0)


def read_copies(folder: Path) -> dict[str, Written]:
    """What engines wrote, by the run whose directory they worked in."""
    found = {}
    for note in sorted(folder.glob("*.json")):
        try:
            run_id = Path(json.loads(note.read_text())["cwd"]).parent.name
        except ValueError:
            continue  # killed while it wrote its note: it had said nothing yet
        copies = {path.name.split(".", 1)[1]: path.read_bytes() for path in folder.glob(f"{note.stem}.*")}
        del copies["json"]
        found[run_id] = Written(copies.pop("stdout"), copies)
    return found


def _proof(raw: Stored, lossy: bool) -> list[str]:
    """The run's own counts and hashes, made again from the frames that are here."""
    # an end that lay behind damage is said again, with the counts of what is left
    if len(raw.ended) != 1 and not (raw.ended and lossy):
        return [f"{len(raw.ended)} ends in its record"]
    problems = []
    ended, ended_in = max(raw.ended, key=lambda pair: len(pair[0].segments))
    for count in ended.segments:
        have = raw.segments.get(count.segment, [])
        own = have[: count.frames] if count.segment == ended_in else have
        name = f"segment {count.segment.hex()[:8]}"
        if len(own) < count.frames:
            problems.append(f"{name}: {len(own)} of {count.frames} frames")
        elif len(own) > count.frames:
            if not lossy:
                problems.append(f"{name}: {len(own)} frames, the phone counts {count.frames}")
        elif hashlib.sha256(framing.join_frames(own)).digest() != count.sha256:
            problems.append(f"{name}: the hash of its {count.frames} frames differs")
    known = {count.segment for count in ended.segments}
    problems += [f"segment {segment.hex()[:8]} is not counted" for segment in raw.segments if segment not in known]
    return problems


def _ended(run: Mapping[str, Any], excused: set[str], lossy: bool) -> list[str]:
    problems = []
    if not run["ended"] or run["outcome"] == "started":
        problems.append(f"has no end ({run['outcome']})")
    reasons = set(_json(run["completeness"]).get("reasons", ()))
    if not run["complete"] and not lossy and (not reasons or reasons - excused):
        problems.append(f"is not complete: {sorted(reasons)}")
    return problems


def _stdout(run: Mapping[str, Any], raw: Stored, copy: bytes | None, *, lossy: bool, full: bool) -> list[str]:
    told = not run["complete"]
    if copy is None:
        return [f"{len(raw.stdout)} bytes of stdout that no engine wrote"] if raw.stdout else []
    stdout = bytes(raw.stdout)
    if raw.holes and not told:
        return [f"{raw.holes} bytes of stdout are missing, and the run is called complete"]
    if full and stdout != copy:
        # the engine itself could not write all of it
        if not told and run["outcome"] == "ok":
            return [f"stdout has {len(stdout)} of {len(copy)} bytes, and nothing says so"]
        return (
            []
            if _within(stdout.replace(b"\0", b""), copy)
            else ["stdout is not what the engine wrote, less what is lost"]
        )
    if raw.holes or (told and len(stdout) < len(copy)):
        if not lossy:
            return [f"stdout has {len(stdout) - raw.holes} of {len(copy)} bytes"]
        same = all(mine in (0, theirs) for mine, theirs in zip(stdout, copy, strict=False))
        return [] if same else ["stdout differs from what the engine wrote"]
    if stdout == copy:
        return []
    killed = run["signal"] is not None or not run["exit_observed"]
    if killed and stdout.startswith(copy) and len(stdout) - len(copy) <= LAST_WRITE:
        return []
    at = next((at for at, pair in enumerate(zip(stdout, copy, strict=False)) if pair[0] != pair[1]), -1)
    return [f"stdout has {len(stdout)} bytes, the engine wrote {len(copy)}; they differ from byte {at} on"]


def _within(part: bytes, whole: bytes) -> bool:
    """Whether a text is another one with something left out."""
    at = 0
    for byte in part:
        at = whole.find(byte, at) + 1
        if not at:
            return False
    return True


def _tokens(raw: Stored, rows: int, lossy: bool) -> list[str]:
    lines = len(PROGRESS.findall(bytes(raw.stdout)))
    if rows == lines or (lossy and rows <= lines):
        return []
    return [f"{rows} rows of tokens, {lines} progress lines"]


def _plan(runs: Iterable[Mapping[str, Any]], phones: Sequence[Phone], cells: list[str]) -> list[str]:
    """Every cell has its attempts, numbered from one, each once; one whose start was torn off is made again."""
    attempts: dict[tuple[str, str], list[tuple[int, str]]] = defaultdict(list)
    for run in runs:
        attempts[run["agent_uuid"], run["cell"]].append((run["attempt"], run["run_id"]))
    problems = []
    for phone in phones:
        for cell in cells:
            made = attempts.get((phone.uuid, cell), [])
            whole = [attempt for attempt, run_id in made if not phone.harmed.get(run_id, frozenset()) & LOSSY]
            got = {attempt for attempt, _ in made}
            if not got or got != set(range(1, len(got) + 1)) or len(whole) != len(set(whole)):
                problems.append(f"phone {phone.uuid[:8]}, {cell}: attempts {sorted(made)}")
    return problems


def _counts(database: Rows, table: str) -> dict[int, int]:
    rows = database.rows(f"select run_no, count(*) as n from {table} group by run_no")
    return {row["run_no"]: row["n"] for row in rows}


def _twice(rows: list[dict[str, Any]]) -> list[tuple[str, int]]:
    seen = Counter((str(row["a"]), row["b"]) for row in rows)
    return [key for key, count in seen.items() if count > 1]


def _json(value: Any) -> dict[str, Any]:
    found = json.loads(value) if isinstance(value, str) else value
    return found if isinstance(found, dict) else {}
