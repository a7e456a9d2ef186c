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

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    String,
    Table,
    Text,
    UniqueConstraint,
)

from bmoe_collector.store import names
from bmoe_collector.store.schema_base import JSON, METADATA, Number, at, run_no, typed
from bmoe_collector.store.schema_rows import (
    CONFIGS,
    DERIVED,
    GAPS,
    GATES,
    NOTES,
    OTHER_LINES,
    REPORT_LINES,
    RESIDENCY,
    SAMPLES,
    TOKENS_CSV,
    TOKENS_STDOUT,
    TRAILERS,
    TURNS,
    UNCHECKED,
    UNKNOWN_FRAMES,
)

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
    Index(None, "plan_name", "started_wall_ns"),
    Index(None, "outcome"),
    Index(None, "stored_wall_ns"),
    comment="One engine process each: who, what, when, how it ended.",
)

RUN_ALIASES = Table(
    "run_aliases",
    METADATA,
    Column("run_id", String(32), primary_key=True),
    run_no(primary=False),
    comment="Ids of runs that turned out to be a run already known: they still find it.",
)

RUN_FILES = Table(
    "run_files",
    METADATA,
    run_no(),
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
    run_no(),
    Column("key", String(128), primary_key=True),
    Column("value", Text, nullable=False),
    Column("source", String(16), nullable=False),  # "plan", "file name", "run.json", "user"
    Index(None, "key", "value"),
    comment="Names and values a person or a file name gave a run.",
)

ARTIFACTS = Table(
    "artifacts",
    METADATA,
    run_no(),
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
    run_no(),
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
    run_no(),
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
    run_no(),
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
    run_no(),
    at(),
    Column("code", String(32), nullable=False),
    Column("severity", String(8), nullable=False),
    Column("evidence", Text, nullable=False),
    Index(None, "code", "run_no"),
    comment="What kind of number a run is and why, recomputed when rules improve.",
)

RUN_FACTS = Table(
    "run_facts",
    METADATA,
    run_no(),
    *typed(names.FACT_COLUMNS),
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

__all__ = [
    "ARTIFACTS",
    "BLOCKS",
    "CONFIGS",
    "CURSORS",
    "DERIVED",
    "DEVICES",
    "DEVICE_NAMES",
    "DEVICE_TAGS",
    "GAPS",
    "GATES",
    "HOST_SAMPLES",
    "LABELS",
    "LEASES",
    "LOOSE_FILES",
    "META",
    "METADATA",
    "NOTES",
    "OTHER_LINES",
    "PLANS",
    "QUEUE",
    "REPORT_LINES",
    "RESIDENCY",
    "RUNS",
    "RUN_ALIASES",
    "RUN_FACTS",
    "RUN_FILES",
    "SAMPLES",
    "SEGMENTS",
    "TOKENS_CSV",
    "TOKENS_STDOUT",
    "TRAILERS",
    "TURNS",
    "UNCHECKED",
    "UNKNOWN_FRAMES",
    "VERDICTS",
]
