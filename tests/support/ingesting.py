"""One run of a phone, what takes it in, and all that is stored of it as text that two databases can be compared by."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bmoe_collector.ingest import Ingestor
from bmoe_collector.store import schema as tables
from bmoe_collector.store.artifacts import Artifacts
from bmoe_collector.store.engine import Store, open_store
from bmoe_collector.store.load import canonical, load_run
from sqlalchemy import select

from support import records

RUN = bytes.fromhex("5a" * 16)
STDERR = b"load_tensors: some text\nbmoe: ready\n"
METRICS = (
    b"# bmoe_metrics v2\n# engine=0.19.0\n# model=tiny b.gguf arch=qwen3moe threads=2 n_expert_used=2\n"
    b"# moe_stream=1 cache_mb=4 overlap=0 novel_key=7\n"
    b"step,steps,wall_ms,io_ms,compute_ms,read_bytes,cache_hit_pct,stall_ms,mgmt_ms,majflt,cpu_ms,"
    b"dense_resident_frac,turn,arm\n"
    + b"".join(
        b"%d,48,1.118,0.755,0.217,626688,-1,0.000,0.146,0,4.654,-1.000,0,a%d\n" % (step, step % 2)
        for step in range(1, 49)
    )
    + b"# summary tokens=48 s/tok=0.001 tok/s=747.559 read_MiB=38.4 evictions=198 majflt/tok=0.00 new_key=3\n"
)
VOLATILE = ("stored_wall_ns", "changed_wall_ns")


OPEN: list[Store] = []


@pytest.fixture(autouse=True)
def close_stores():
    """Every store that `ingestor` opened."""
    yield
    while OPEN:
        OPEN.pop().close()


def ingestor(url: str, folder: Path) -> Ingestor:
    """One with a store and artifacts of its own."""
    OPEN.append(open_store(url))
    return Ingestor(OPEN[-1], Artifacts(str(folder / "artifacts")))


def deliver(taker: Ingestor, record: records.Record, cuts: list[int] | None = None) -> None:
    """All of a run, in batches of `cuts` blocks."""
    for cursor, data in record.batches(cuts):
        stands = taker.blocks(records.AGENT, cursor, data)
        assert stands.offset == cursor.offset + len(data)


def image(store: Store, run_id: bytes = RUN) -> str:
    """All that is stored of a run, comparable between databases."""
    found = json.loads(canonical(load_run(store, run_id.hex())))
    for name in VOLATILE:
        found["run"].pop(name)
    found["run"].pop("facts")
    with store.read() as connection:
        run_no = connection.execute(select(tables.RUNS.c.run_no).where(tables.RUNS.c.run_id == run_id.hex())).scalar()
        for table in (tables.BLOCKS, tables.CURSORS, tables.SEGMENTS):
            rows = connection.execute(select(table).where(table.c.run_no == run_no)).mappings()
            kept = [{k: v for k, v in row.items() if k not in ("run_no", "place")} for row in rows]
            found[table.name] = sorted(
                json.dumps(row, sort_keys=True, default=lambda b: bytes(b).hex()) for row in kept
            )
    return json.dumps(found, sort_keys=True)
