"""Tables whose rows are made from the raw record of a run, and can be made again from it (law 1): `DERIVED`.

Rules of all tables are in `schema`, which is where other modules take them from.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Double, Integer, LargeBinary, String, Table, Text

from bmoe_collector.store import names
from bmoe_collector.store.schema_base import JSON, METADATA, at, run_no, typed

CONFIGS = Table(
    "configs",
    METADATA,
    run_no(),
    Column("format", Text),  # "bmoe_metrics v2"
    *typed(names.PREAMBLE_COLUMNS),
    Column("keys", JSON, nullable=False),  # every key in the file's order
    comment="The metrics preamble: the resolved configuration, a column for each key of the contract.",
)

TOKENS_CSV = Table(
    "tokens_csv",
    METADATA,
    run_no(),
    at(),
    *typed(names.CSV_COLUMNS),
    Column("extra", JSON),
    sqlite_with_rowid=False,
    comment="Rows of the metrics CSV, one a token.",
)

TOKENS_STDOUT = Table(
    "tokens_stdout",
    METADATA,
    run_no(),
    at(),
    Column("turn", Integer),
    *typed(names.PROGRESS_COLUMNS),
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
    run_no(),
    at(),
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
    *typed(names.SUMMARY_COLUMNS),
    Column("extra", JSON),  # summary keys without a column
    comment="Generations, decisions and rejected requests, with the BMOE_DONE spellings (trailer keys mapped on them).",
)

TRAILERS = Table(
    "trailers",
    METADATA,
    run_no(),
    at(),
    Column("turn", Integer),
    Column("keys", JSON, nullable=False),
    comment="`# summary` lines of the metrics CSV, keys as the file has them.",
)

REPORT_LINES = Table(
    "report_lines",
    METADATA,
    run_no(),
    at(),
    Column("turn", Integer, nullable=False),
    Column("name", Text, nullable=False),
    Column("facts", JSON, nullable=False),
    Column("text", Text, nullable=False),
    comment="Lines of the perf block: the name before the colon and every number in them.",
)

OTHER_LINES = Table(
    "other_lines",
    METADATA,
    run_no(),
    at(),
    Column("stream", String(8), nullable=False),
    Column("line", Integer, nullable=False),
    Column("turn", Integer),
    Column("text", Text, nullable=False),
    comment="Lines of stdout that nothing understood.",
)

SAMPLES = Table(
    "samples",
    METADATA,
    run_no(),
    at(),
    Column("boot_ns", BigInteger, nullable=False),
    Column("source", String(8), nullable=False),
    Column("kind", String(12), nullable=False),
    Column("took_ms", Double),
    Column("segment", String(32)),
    Column("seq", BigInteger),
    *typed(names.SAMPLE_COLUMNS),
    Column("values", JSON, nullable=False),  # every value by the names of bmoe_proto.kernel
    Column("refused", JSON),
    sqlite_with_rowid=False,
    comment="What the kernel said, parsed; `segment` and `seq` name the frame with the text as read.",
)

RESIDENCY = Table(
    "residency",
    METADATA,
    run_no(),
    at(),
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
    run_no(),
    at(),
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
    run_no(),
    at(),
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
    run_no(),
    at(),
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
    run_no(),
    at(),
    Column("segment", String(32), nullable=False),
    Column("seq", BigInteger, nullable=False),
    Column("boot_ns", BigInteger, nullable=False),
    Column("data", LargeBinary, nullable=False),
    comment="Frames of a kind this version does not know, whole.",
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

UNCHECKED = (TOKENS_CSV, TOKENS_STDOUT, SAMPLES)
"""Tables of many rows, whose key of the run a PostgreSQL server does not check: it would look the run up for every row, which
takes longer than writing it. Their rows come in one transaction with rows that are checked (blocks, the turns of an imported
file), and whoever deletes a run deletes them."""
