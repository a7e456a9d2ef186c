"""The database as SQLAlchemy Core tables: the one definition that SQLite and Postgres share.

In: the contract's one table of columns (`bmoe_proto.contract.columns`). Out: `METADATA` and one `Table` object a
table, each with a sentence that the documentation of the store is made from (`comment=`). What the database on disk
looks like is made by the migrations; a test compares the two.

Rules that hold everywhere: `run_no` is the store's own small number of a run (tokens and samples carry it instead of
32 digits), `at` is the place of a row in its source, from 0; unmeasured is NULL (law 5); every token table and every
summary keeps what the contract does not know in `extra` (JSON), so nothing is dropped (law 1). Text that may hold
anything is stored as bytes (`BLOB`); a decoded view beside it has NUL shown as U+2400, because Postgres text cannot
hold it. `JSON` columns hold strict JSON. Times are nanoseconds of the phone's CLOCK_BOOTTIME unless named wall.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON as ANY_JSON
from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

from bmoe_collector.store import names

METADATA = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

Number = BigInteger().with_variant(Integer(), "sqlite")
"""64 bits on both; SQLite numbers rows by itself only when the type is INTEGER."""

JSON = ANY_JSON(none_as_null=True)
"""Nothing is NULL, never the JSON text `null`."""

TYPES: dict[str, Any] = {"int": BigInteger, "float": Double, "str": Text, "bool": Boolean}


def _run_no(*, primary: bool = True) -> Column[Any]:
    return Column("run_no", Number, ForeignKey("runs.run_no", ondelete="CASCADE"), primary_key=primary, nullable=False)


def _at() -> Column[Any]:
    return Column("at", Integer, primary_key=True, autoincrement=False)


def _typed(columns: dict[str, str], prefix: str = "") -> list[Column[Any]]:
    """Nullable columns of the contract, by SQL name and type word."""
    return [Column(prefix + name, TYPES[kind]) for name, kind in columns.items()]


META = Table(
    "meta",
    METADATA,
    Column("key", String(64), primary_key=True),
    Column("value", Text, nullable=False),
    comment="Facts of the store itself: `store_id` (32 hex digits), what agents keep records for.",
)

RUNS = Table(
    "runs",
    METADATA,
    Column("run_no", Number, primary_key=True, autoincrement=True),
    Column("run_id", String(32), nullable=False, unique=True),
    Column("source", String(8), nullable=False),  # "agent" or "import"
    Column("outcome", String(12), nullable=False),
    Column("cause", Text),
    Column("evidence", JSON),
    Column("exit_code", Integer),
    Column("signal", Integer),
    Column("exit_observed", Boolean, nullable=False),
    Column("launched", Boolean),
    Column("ended", Boolean, nullable=False),
    Column("ended_by", String(16)),
    Column("simulated", Boolean, nullable=False),
    Column("agent_uuid", String(32)),
    Column("device_name", Text),
    Column("device_model", Text),
    Column("device", JSON),  # DeviceFacts
    Column("engine_name", Text),
    Column("engine_version", Text),
    Column("engine_sha256", String(64)),
    Column("engine", JSON),  # EngineFacts
    Column("model_name", Text),
    Column("model_arch", Text),
    Column("model_size", BigInteger),
    Column("model_identity", Text),
    Column("model", JSON),  # ModelFacts
    Column("argv", JSON),
    Column("environment", JSON),
    Column("prompt", LargeBinary),
    Column("prompt_sha256", String(64)),
    Column("plan_id", String(64)),
    Column("plan_name", Text),
    Column("plan_sha256", String(64)),
    Column("plan_cells", Integer),
    Column("cell", Text),
    Column("cell_index", Integer),
    Column("repeat", Integer),
    Column("block", Integer),
    Column("attempt", Integer),
    Column("asked", JSON),  # the whole Cell as asked
    Column("sampling", JSON),
    Column("question", JSON),
    Column("unmeasured", Boolean, nullable=False),
    Column("session", Boolean),
    Column("started_wall_ns", BigInteger),
    Column("ended_wall_ns", BigInteger),
    Column("started_boot_ns", BigInteger),
    Column("launched_boot_ns", BigInteger),
    Column("ended_boot_ns", BigInteger),
    Column("clock_uncertainty_ns", BigInteger),
    Column("boot_id", String(64)),
    Column("directory", Text),  # on the phone, or the folder that was imported
    Column("n_tokens", Integer, nullable=False),
    Column("n_turns", Integer, nullable=False),
    Column("turns_asked", Integer),
    Column("turns_sent", Integer),
    Column("turns_ended", Integer),
    Column("ready", JSON),  # BMOE_READY
    Column("sidecar", JSON),  # keys of a .metrics file
    Column("observer", JSON),  # ObserverCost
    Column("run_ended", JSON),  # RunEnded as received
    Column("complete", Boolean, nullable=False),
    Column("completeness", JSON),  # complete, reasons, frames, gaps
    Column("problems", JSON),  # what of its files or frames was not understood
    Column("stored_wall_ns", BigInteger, nullable=False),
    Column("changed_wall_ns", BigInteger, nullable=False),
    Index(None, "started_wall_ns"),
    Index(None, "agent_uuid", "started_wall_ns"),
    Index(None, "model_name"),
    Index(None, "engine_version"),
    Index(None, "plan_id", "cell"),
    Index(None, "outcome"),
    Index(None, "stored_wall_ns"),
    comment="One engine process each: who, what, when, how it ended.",
)

RUN_ALIASES = Table(
    "run_aliases",
    METADATA,
    Column("run_id", String(32), primary_key=True),
    _run_no(primary=False),
    comment="Ids of runs that turned out to be a run already known: they still find it.",
)

RUN_FILES = Table(
    "run_files",
    METADATA,
    _run_no(),
    Column("sha256", String(64), primary_key=True),
    Column("kind", String(24), nullable=False),
    Column("name", Text, nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("origin", String(8), nullable=False),  # "agent" or "import"
    Index(None, "sha256"),
    comment="Hashes of the non-empty files that a run consists of: its identity for imports.",
)

LABELS = Table(
    "labels",
    METADATA,
    _run_no(),
    Column("key", String(128), primary_key=True),
    Column("value", Text, nullable=False),
    Column("source", String(16), nullable=False),  # "plan", "file name", "run.json", "user"
    Index(None, "key", "value"),
    comment="Names and values a person or a file name gave a run.",
)

CONFIGS = Table(
    "configs",
    METADATA,
    _run_no(),
    Column("format", Text),  # "bmoe_metrics v2"
    *_typed(names.PREAMBLE_COLUMNS),
    Column("keys", JSON, nullable=False),  # every key in the file's order
    comment="The metrics preamble: the resolved configuration, a column for each key of the contract.",
)

TOKENS_CSV = Table(
    "tokens_csv",
    METADATA,
    _run_no(),
    _at(),
    *_typed(names.CSV_COLUMNS),
    Column("extra", JSON),
    sqlite_with_rowid=False,
    comment="Rows of the metrics CSV, one a token.",
)

TOKENS_STDOUT = Table(
    "tokens_stdout",
    METADATA,
    _run_no(),
    _at(),
    Column("turn", Integer),
    *_typed(names.PROGRESS_COLUMNS),
    Column("load_mb", Double),
    Column("load_ms", Double),
    Column("reset", Boolean),
    Column("delta_reasoning", LargeBinary),
    Column("delta_text", LargeBinary),
    Column("line", Integer),
    Column("boot_ns", BigInteger),
    Column("uncertainty_ns", BigInteger),
    Column("extra", JSON),
    sqlite_with_rowid=False,
    comment="BMOE_PROGRESS lines with the BMOE_LOAD before them, one a token; when the line was seen on the phone.",
)

TURNS = Table(
    "turns",
    METADATA,
    _run_no(),
    _at(),
    Column("turn", Integer),
    Column("request_id", BigInteger),
    Column("kind", String(12), nullable=False),  # "generate", "decide", "oneshot", "rejected"
    Column("state", String(12), nullable=False),
    Column("tokens", Integer),
    Column("cancelled", Boolean, nullable=False),
    Column("text", LargeBinary, nullable=False),
    Column("text_view", Text, nullable=False),
    Column("reasoning", LargeBinary, nullable=False),
    Column("request", JSON),
    Column("decide", JSON),
    Column("error", JSON),
    Column("begin_boot_ns", BigInteger),
    Column("end_boot_ns", BigInteger),
    *_typed(names.SUMMARY_COLUMNS),
    Column("extra", JSON),  # summary keys without a column
    comment="Generations, decisions and rejected requests, with the BMOE_DONE spellings (trailer keys mapped on them).",
)

TRAILERS = Table(
    "trailers",
    METADATA,
    _run_no(),
    _at(),
    Column("turn", Integer),
    Column("keys", JSON, nullable=False),
    comment="`# summary` lines of the metrics CSV, keys as the file has them.",
)

REPORT_LINES = Table(
    "report_lines",
    METADATA,
    _run_no(),
    _at(),
    Column("turn", Integer, nullable=False),
    Column("name", Text, nullable=False),
    Column("facts", JSON, nullable=False),
    Column("text", Text, nullable=False),
    comment="Lines of the perf block: the name before the colon and every number in them.",
)

OTHER_LINES = Table(
    "other_lines",
    METADATA,
    _run_no(),
    _at(),
    Column("stream", String(8), nullable=False),
    Column("line", Integer, nullable=False),
    Column("turn", Integer),
    Column("text", Text, nullable=False),
    comment="Lines of stdout that nothing understood.",
)

SAMPLES = Table(
    "samples",
    METADATA,
    _run_no(),
    _at(),
    Column("boot_ns", BigInteger, nullable=False),
    Column("source", String(8), nullable=False),
    Column("kind", String(12), nullable=False),
    Column("took_ms", Double),
    Column("segment", String(32)),
    Column("seq", BigInteger),
    *_typed(names.SAMPLE_COLUMNS),
    Column("values", JSON, nullable=False),  # every value by the names of bmoe_proto.kernel
    Column("refused", JSON),
    sqlite_with_rowid=False,
    comment="What the kernel said, parsed; `segment` and `seq` name the frame with the text as read.",
)

RESIDENCY = Table(
    "residency",
    METADATA,
    _run_no(),
    _at(),
    Column("boot_ns", BigInteger, nullable=False),
    Column("part", String(32), nullable=False),
    Column("method", String(16), nullable=False),
    Column("problem", Text, nullable=False),
    Column("bytes", BigInteger),
    Column("pages", BigInteger),
    Column("pages_looked_at", BigInteger),
    Column("pages_resident", BigInteger),
    Column("fraction", Double),
    Column("standard_error", Double),
    Column("cost_ms", Double),
    Column("cpu_ms", Double),
    comment="How much of the model file is in memory, by part, with its error and cost.",
)

GATES = Table(
    "gates",
    METADATA,
    _run_no(),
    _at(),
    Column("boot_ns", BigInteger),
    Column("gate", Text, nullable=False),
    Column("asked", Text, nullable=False),
    Column("bound", Double),
    Column("last", Double),
    Column("unit", Text, nullable=False),
    Column("state", String(16), nullable=False),
    Column("waited_s", Double, nullable=False),
    Column("policy", String(16), nullable=False),
    Column("source", String(16), nullable=False),
    Column("readings", JSON, nullable=False),
    comment="Conditions before a cell: what was asked, what was seen, how long it waited.",
)

NOTES = Table(
    "notes",
    METADATA,
    _run_no(),
    _at(),
    Column("boot_ns", BigInteger, nullable=False),
    Column("source", String(16), nullable=False),
    Column("code", Text, nullable=False),
    Column("text", Text, nullable=False),
    Column("facts", JSON, nullable=False),
    comment="Notes, watchdog reports, launches and whatever else is worth knowing later.",
)

GAPS = Table(
    "gaps",
    METADATA,
    _run_no(),
    _at(),
    Column("boot_ns", BigInteger, nullable=False),
    Column("what", Text, nullable=False),
    Column("frames", BigInteger),
    Column("bytes", BigInteger),
    Column("why", Text, nullable=False),
    Column("lost_segment", String(32)),
    Column("declared", Boolean, nullable=False),
    comment="Parts of the record that are missing: declared by the phone, or found here.",
)

UNKNOWN_FRAMES = Table(
    "unknown_frames",
    METADATA,
    _run_no(),
    _at(),
    Column("segment", String(32), nullable=False),
    Column("seq", BigInteger, nullable=False),
    Column("boot_ns", BigInteger, nullable=False),
    Column("data", LargeBinary, nullable=False),
    comment="Frames of a kind this version does not know, whole.",
)

ARTIFACTS = Table(
    "artifacts",
    METADATA,
    _run_no(),
    Column("name", String(255), primary_key=True),
    Column("kind", String(24), nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("sha256", String(64), nullable=False),
    Column("state", String(12), nullable=False),  # "stored", "awaited", "given_up", "removed"
    Column("problem", Text),
    Index(None, "sha256"),
    Index(None, "state"),
    comment="Files of a run, in the artifact store by their sha256.",
)

LOOSE_FILES = Table(
    "loose_files",
    METADATA,
    Column("sha256", String(64), primary_key=True),
    Column("name", Text, nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("why", Text, nullable=False),
    Column("stored_wall_ns", BigInteger, nullable=False),
    comment="Imported files that belong to no run, kept all the same.",
)

BLOCKS = Table(
    "blocks",
    METADATA,
    _run_no(),
    Column("segment", String(32), primary_key=True),
    Column("offset", BigInteger, primary_key=True, autoincrement=False),
    Column("first_seq", BigInteger, nullable=False),
    Column("frames", Integer, nullable=False),
    Column("data", LargeBinary, nullable=False),
    comment="Blocks of frames exactly as they came from the phone: the raw record.",
)

SEGMENTS = Table(
    "segments",
    METADATA,
    _run_no(),
    Column("segment", String(32), primary_key=True),
    Column("place", Integer, nullable=False),  # in order of arrival
    Column("previous", String(32)),
    Column("frames", BigInteger, nullable=False),
    Column("sha256", String(64)),
    Column("opened", JSON),  # SegmentOpened
    Column("problem", Text),
    comment="Writer starts of a run's record: how many frames are here and their rolling hash.",
)

CURSORS = Table(
    "cursors",
    METADATA,
    _run_no(),
    Column("segment", String(32), primary_key=True),
    Column("agent_uuid", String(32), nullable=False),
    Column("offset", BigInteger, nullable=False),
    Index(None, "agent_uuid"),
    comment="How much of each segment file has been committed.",
)

DEVICES = Table(
    "devices",
    METADATA,
    Column("agent_uuid", String(32), primary_key=True),
    Column("model", Text),
    Column("facts", JSON),
    Column("first_seen_wall_ns", BigInteger, nullable=False),
    Column("last_seen_wall_ns", BigInteger, nullable=False),
    comment="Phones by their agent's uuid, with the facts they last told.",
)

DEVICE_NAMES = Table(
    "device_names",
    METADATA,
    Column("agent_uuid", String(32), primary_key=True),
    Column("name", String(128), nullable=False, unique=True),
    comment="What people call a phone.",
)

DEVICE_TAGS = Table(
    "device_tags",
    METADATA,
    Column("agent_uuid", String(32), primary_key=True),
    Column("tag", String(128), primary_key=True),
    Index(None, "tag"),
    comment="Groups people put phones in.",
)

VERDICTS = Table(
    "verdicts",
    METADATA,
    _run_no(),
    _at(),
    Column("code", String(32), nullable=False),
    Column("severity", String(8), nullable=False),
    Column("evidence", Text, nullable=False),
    Index(None, "code", "run_no"),
    comment="What kind of number a run is and why, recomputed when rules improve.",
)

RUN_FACTS = Table(
    "run_facts",
    METADATA,
    _run_no(),
    *_typed(names.FACT_COLUMNS),
    Column("facts", JSON, nullable=False),  # every fact by name
    Index(None, "tok_s"),
    comment="Derived numbers of a run, for lists, filters and comparison.",
)

PLANS = Table(
    "plans",
    METADATA,
    Column("plan_id", String(64), primary_key=True),
    Column("name", Text, nullable=False),
    Column("text", Text, nullable=False),
    Column("sha256", String(64), nullable=False),
    Column("cells", Integer, nullable=False),
    Column("question", JSON),
    Column("submitted_wall_ns", BigInteger),
    comment="Plans that were submitted, or met in the records of their runs.",
)

LEASES = Table(
    "leases",
    METADATA,
    Column("name", String(128), primary_key=True),
    Column("holder", String(128), nullable=False),
    Column("token", BigInteger, nullable=False),
    Column("until_wall_ns", BigInteger, nullable=False),
    comment="Who drains which phone now; `token` grows with every change of holder.",
)

QUEUE = Table(
    "queue",
    METADATA,
    Column("queue_id", Number, primary_key=True, autoincrement=True),
    Column("plan_id", String(64), nullable=False),
    Column("agent_uuid", String(32)),
    Column("tag", String(128)),
    Column("plan", LargeBinary, nullable=False),  # telemetry.proto Plan
    Column("state", String(12), nullable=False),
    Column("why", Text),
    Column("created_wall_ns", BigInteger, nullable=False),
    Column("changed_wall_ns", BigInteger, nullable=False),
    UniqueConstraint("plan_id", "agent_uuid"),
    Index(None, "state"),
    comment="Plans for phones that were away when they were submitted.",
)

HOST_SAMPLES = Table(
    "host_samples",
    METADATA,
    Column("sample_no", Number, primary_key=True, autoincrement=True),
    Column("agent_uuid", String(32), nullable=False),
    Column("run_no", Number, ForeignKey("runs.run_no", ondelete="SET NULL")),
    Column("boot_ns", BigInteger, nullable=False),
    Column("uncertainty_ns", BigInteger),
    Column("boot_id", String(64)),
    Column("kind", String(12), nullable=False),
    Column("took_ms", Double),
    Column("values", JSON, nullable=False),
    Column("refused", JSON),
    Column("text", LargeBinary),  # as read, layout of bmoe_proto.sample_text
    Index(None, "agent_uuid", "boot_ns"),
    Index(None, "run_no"),
    comment="What only a host can read of a phone, on the phone's clock.",
)

DERIVED = (
    CONFIGS,
    TOKENS_CSV,
    TOKENS_STDOUT,
    TURNS,
    TRAILERS,
    REPORT_LINES,
    OTHER_LINES,
    SAMPLES,
    RESIDENCY,
    GATES,
    NOTES,
    GAPS,
    UNKNOWN_FRAMES,
)
"""Tables whose rows are made from the raw record and can be made again (law 1)."""
