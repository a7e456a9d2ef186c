"""What the probe keeps in the database, on both: samples find their runs, evidence changes outcomes, everything may be done twice."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from bmoe_collector.ingest import Ingestor
from bmoe_collector.ingest.rebuild import reparse
from bmoe_collector.probe import rows
from bmoe_collector.probe.reading import HostSample
from bmoe_collector.store.artifacts import Artifacts
from bmoe_collector.store.engine import Store, open_store
from bmoe_collector.store.load import load_run
from bmoe_collector.store.schema import HOST_SAMPLES
from bmoe_collector.verdicts import judge
from bmoe_proto.v1 import telemetry_pb2 as pb
from sqlalchemy import func, select
from support import records

AGENT = records.AGENT.hex()
KILLED = {"exit_code": None, "signal": 9, "outcome": "killed", "cause": "signal:SIGKILL"}


@pytest.fixture
def store(store_url: str) -> Iterator[Store]:
    made = open_store(store_url)
    yield made
    made.close()


def run(store: Store, tmp_path: Path, number: int = 1, **end: object) -> str:
    run_id = bytes([number]) * 16
    record = records.whole(run_id, records.oneshot(8), seed=number, **{"exit_code": 0, **end})
    deliver(store, tmp_path, record)
    return run_id.hex()


def deliver(store: Store, tmp_path: Path, record: records.Record) -> None:
    ingestor = Ingestor(store, Artifacts(str(tmp_path / "artifacts")))
    for cursor, data in record.batches():
        ingestor.blocks(records.AGENT, cursor, data)


def sample(boot_ns: int, **values: object) -> HostSample:
    return HostSample(
        boot_ns, 20_000_000, "fast", 12.5, dict(values), {"proc/pressure/io": "Permission denied\x00"}, b"\x01"
    )


def test_samples_find_the_run_they_lie_in(store: Store, tmp_path: Path) -> None:
    run_id = run(store, tmp_path)
    facts = load_run(store, run_id).run
    launched, ended = facts["launched_boot_ns"], facts["ended_boot_ns"]
    inside = [launched - 5 * 10**9, launched + 1, ended, ended + 10**9]
    outside = [launched - 20 * 10**9, ended + 60 * 10**9]
    for at in [*inside, *outside]:
        rows.put_sample(store, AGENT, records.BOOT, sample(at, wakefulness="Dozing", awake=False))
    rows.put_sample(store, AGENT, "another boot", sample(launched + 1))
    rows.put_sample(store, "ee" * 16, records.BOOT, sample(launched + 1))
    ((_, found),) = rows.attach_ended(store, AGENT)
    assert found == run_id
    assert rows.attach_ended(store, AGENT) == []
    record = load_run(store, run_id)
    host = [one for one in record.samples if one.source == "host"]
    assert [one.boot_ns for one in host] == inside
    assert host[0].refused == {"proc/pressure/io": "Permission denied␀"}
    assert "not_awake" in {verdict.code for verdict in judge(record)}
    with store.read() as connection:
        assert connection.execute(select(func.count()).select_from(HOST_SAMPLES)).scalar() == 8


def test_evidence_of_the_log_changes_the_outcome_and_survives_a_rebuild(store: Store, tmp_path: Path) -> None:
    run_id = run(store, tmp_path, ended_by="engine", **KILLED)
    assert load_run(store, run_id).run["cause"] == "signal:SIGKILL"
    (waiting,) = rows.unsearched(store, AGENT)
    assert (waiting.run_id, waiting.boot_id) == (run_id, records.BOOT)
    assert waiting.pids == (1, 4242)  # the agent's of the segment, the engine's
    line = "1700000001.000 1 2 I lowmemorykiller: Kill 'bmoe-cli' (4242), uid 1, oom_score_adj 900"
    notes = [
        rows.HostNote(rows.KILL, line, {"kind": "memory"}, waiting.end_boot_ns),
        rows.HostNote(rows.SEARCHED, "one line", {"found": 1}, waiting.end_boot_ns),
    ]
    rows.put_notes(store, waiting.run_no, notes)
    assert rows.unsearched(store, AGENT) == []
    record = load_run(store, run_id)
    assert (record.run["outcome"], record.run["cause"]) == ("killed", "out_of_memory")
    assert line in record.run["evidence"]
    reparse(store, Artifacts(str(tmp_path / "artifacts")), run_id)
    again = load_run(store, run_id)
    assert (again.run["outcome"], again.run["cause"], again.run["evidence"]) == (
        "killed",
        "out_of_memory",
        record.run["evidence"],
    )
    assert [(note.code, note.source) for note in again.notes if note.source == "host"] == [
        (rows.KILL, "host"),
        (rows.SEARCHED, "host"),
    ]


def test_which_ends_ask_for_a_look_into_the_log(store: Store, tmp_path: Path) -> None:
    run(store, tmp_path, 1)  # all well
    run(store, tmp_path, 2, ended_by="agent", exit_code=None, signal=15)  # ours
    unseen = run(store, tmp_path, 3, exit_observed=False, exit_code=None, ended_by="unknown")
    crashed = run(store, tmp_path, 4, exit_code=None, signal=11)
    restarted = bytes([5]) * 16
    deliver(store, tmp_path, records.whole(restarted, records.oneshot(8), seed=5, restarts=[0.5]))
    assert {one.run_id for one in rows.unsearched(store, AGENT)} == {unseen, crashed, restarted.hex()}
    assert rows.unsearched(store, "ee" * 16) == []


def test_an_open_run_says_what_it_asks_of_the_host(store: Store, tmp_path: Path) -> None:
    assert rows.open_run(store, AGENT) is None
    record = records.Record(bytes([9]) * 16, 9)
    start = records.started()
    start.cell.stop_apps.extend(["com.example.game"])
    start.cell.screen_on = True
    start.sampling.host_probe_period_ms = 0
    record.add(run_started=start)
    record.flush()
    deliver(store, tmp_path, record)
    found = rows.open_run(store, AGENT)
    assert found is not None
    assert (found.launched, found.period_ms, found.stop_apps, found.screen_on) == (
        False,
        0,
        ("com.example.game",),
        True,
    )
    assert found.pids == (1,)
    record.add(launched=pb.Launched(pid=4242, start_ticks=1))
    record.end()
    deliver(store, tmp_path, record)
    assert rows.open_run(store, AGENT) is None
