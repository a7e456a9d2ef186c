"""The watcher without a phone: a shell and an agent that are played, a store that is real."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from bmoe_collector.ingest import Ingestor
from bmoe_collector.probe import rows, watcher
from bmoe_collector.probe.frames import Frame
from bmoe_collector.probe.shell import BusyError
from bmoe_collector.probe.watcher import Pace, Watcher
from bmoe_collector.reach.adb import AdbError
from bmoe_collector.store.artifacts import Artifacts
from bmoe_collector.store.engine import Store, open_store
from bmoe_collector.store.load import load_run
from bmoe_collector.store.schema import HOST_SAMPLES, RUNS
from bmoe_proto.calls import NotThere
from bmoe_proto.v1 import telemetry_pb2 as pb
from sqlalchemy import func, select
from support import records
from support.agents import wait_for

PACE = Pace(idle_s=0.2, slow_s=0.2, rare_s=0.4, retry_first_s=0.1, retry_most_s=0.2, busy_s=0.1)


class PlayedAgent:
    """Notes what it is told; keeps notes of an open run unless `keeps` is off."""

    def __init__(self) -> None:
        self.told: list[tuple[bytes, pb.Note]] = []
        self.keeps = True
        self.gone = False

    def clock(self) -> pb.ClockReply:
        if self.gone:
            raise NotThere("gone")
        return pb.ClockReply(
            clock=pb.ClockPair(boot_ns=1_000_000_000, wall_ns=1, uncertainty_ns=1000, boot_id=records.BOOT)
        )

    def tell(self, run_id: bytes, note: pb.Note) -> bool:
        if self.gone:
            raise NotThere("gone")
        self.told.append((run_id, note))
        return self.keeps

    def facts(self, code: str) -> list[dict[str, Any]]:
        return [json.loads(note.facts_json) for _, note in self.told if note.code == code]


class PlayedShell:
    """Answers every request with nothing, at uptimes around the record's own; `trouble` is raised when it is opened."""

    trouble: Exception | None = None
    asked: ClassVar[list[tuple[str, str]]] = []
    pid = 77
    uptime_s = 1.0

    def __init__(self, *_: object) -> None:
        pass

    def __enter__(self) -> "PlayedShell":
        if PlayedShell.trouble is not None:
            raise PlayedShell.trouble
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def close(self) -> None:
        pass

    def ask(self, requests: Sequence[tuple[str, str]], _timeout_s: float) -> list[Frame]:
        PlayedShell.asked += requests
        at = PlayedShell.uptime_s
        return [Frame(1, 0, b"", at, at + 0.01) for _ in requests]


class PlayedAdb:
    """A log without any line; when it is `gone` nothing is answered."""

    def __init__(self) -> None:
        self.commands: list[str] = []
        self.gone = False

    def shell(self, _transport_id: int, command: str, _timeout_s: float = 1.0) -> bytes:
        self.commands.append(command)
        if self.gone:
            raise AdbError("device offline")
        return b"#rc log 0\n#rc kernel 0\n#rc dmesg 0\n"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with contextlib.closing(open_store(f"sqlite:///{tmp_path}/runs.db")) as made:
        yield made


@pytest.fixture(autouse=True)
def _played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher, "ProbeShell", PlayedShell)
    monkeypatch.setattr(PlayedShell, "trouble", None)
    monkeypatch.setattr(PlayedShell, "asked", [])


@contextlib.contextmanager
def watching(store: Store, agent: PlayedAgent, doing: str = "idle", **more: Any) -> Iterator[tuple[Watcher, PlayedAdb]]:
    adb = PlayedAdb()
    made = Watcher(records.AGENT, adb, 1, agent, store, doing=doing, pace=PACE, **more)  # type: ignore[arg-type]
    made.start()
    try:
        yield made, adb
    finally:
        made.stop()
        assert not made.is_alive()


def deliver(store: Store, folder: Path, record: records.Record) -> None:
    record.flush()
    ingestor = Ingestor(store, Artifacts(str(folder / "artifacts")))
    for cursor, data in record.batches():
        ingestor.blocks(records.AGENT, cursor, data)


def begun(*apps: str, screen_on: bool = False) -> records.Record:
    record = records.Record(bytes([7]) * 16, 7)
    start = records.started()
    start.cell.stop_apps.extend(apps)
    start.cell.screen_on = screen_on
    record.add(run_started=start)
    return record


def test_an_idle_phone_is_told_that_somebody_looks_and_leaves_no_rows(store: Store) -> None:
    agent = PlayedAgent()
    with watching(store, agent) as (made, _):
        wait_for(lambda: made.samples > 2 and agent.told, "samples")
        wait_for(lambda: not made.pending, "nothing to be pending")
    assert agent.facts("host_values")[0]["host_probe"] is True
    with store.read() as connection:
        assert connection.execute(select(func.count()).select_from(HOST_SAMPLES)).scalar() == 0


def test_a_cell_is_prepared_once_and_the_screen_is_given_back(store: Store, tmp_path: Path) -> None:
    agent = PlayedAgent()
    record = begun("com.example.game", screen_on=True)
    with watching(store, agent, "gating") as (made, _):
        deliver(store, tmp_path, record)
        made.poke()
        wait_for(lambda: agent.facts("screen_on"), "the word about the screen")
        made.poke()
        deliver_end(store, tmp_path, record)
        made.run_ended()
        made.heard("idle")
        wait_for(lambda: ("screen", "off") in PlayedShell.asked, "the screen to be given back")
    assert [words for verb, words in PlayedShell.asked if verb == "do" and words.startswith("am ")] == [
        "am force-stop com.example.game"
    ]
    (stopped,) = agent.facts("stop_apps")
    assert (stopped["done"], stopped["run_id"]) == (True, record.run_id.hex())


def deliver_end(store: Store, folder: Path, record: records.Record) -> None:
    record.add(launched=pb.Launched(pid=4242, start_ticks=1))
    PlayedShell.uptime_s = record.boot_ns / 1e9
    record.end(exit_code=None, signal=9, ended_by="engine")
    deliver(store, folder, record)


def test_a_measured_run_is_not_looked_up_again_with_each_of_its_batches(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[str] = []
    look = watcher.rows.open_run
    monkeypatch.setattr(watcher.rows, "open_run", lambda *asked: (looks.append("look"), look(*asked))[1])
    record = begun()
    record.add(launched=pb.Launched(pid=4242, start_ticks=1))
    PlayedShell.uptime_s = record.boot_ns / 1e9
    with watching(store, PlayedAgent(), "measuring") as (made, _):
        deliver(store, tmp_path, record)
        made.poke(record.run_id.hex())
        wait_for(lambda: made._run is not None and made._run.launched, "the run to be known")
        before, samples = len(looks), made.samples
        for _ in range(5):
            made.poke(record.run_id.hex())
        wait_for(lambda: made.samples > samples + 1, "more samples")
        assert len(looks) == before
        made.poke("other")
        wait_for(lambda: len(looks) > before, "a look for another run's")


def test_a_killed_run_gets_its_samples_and_one_look_into_the_log(store: Store, tmp_path: Path) -> None:
    agent = PlayedAgent()
    record = begun()
    record.add(launched=pb.Launched(pid=4242, start_ticks=1))
    PlayedShell.uptime_s = record.boot_ns / 1e9
    with watching(store, agent, "measuring") as (made, adb):
        deliver(store, tmp_path, record)
        made.poke()
        wait_for(lambda: count(store) > 0, "a sample")
        assert made.pending is False  # nobody waits for a look that a measured cell forbids
        assert adb.commands == []
        record.end(exit_code=None, signal=9, ended_by="engine")
        deliver(store, tmp_path, record)
        made.run_ended()
        wait_for(lambda: not made.pending, "the look into the log")
        looked = len(adb.commands)
        made.run_ended()
        wait_for(lambda: not made.pending, "the second look")
        assert len(adb.commands) == looked == 2
    stored = load_run(store, record.run_id.hex())
    assert any(sample.source == "host" for sample in stored.samples)
    assert [note.code for note in stored.notes if note.source == "host"] == [rows.SEARCHED]


def test_a_run_is_judged_with_its_samples_although_the_link_goes_while_the_log_is_searched(
    store: Store, tmp_path: Path
) -> None:
    told: list[str] = []
    record = begun()
    record.add(launched=pb.Launched(pid=4242, start_ticks=1))
    PlayedShell.uptime_s = record.boot_ns / 1e9
    with watching(store, PlayedAgent(), "measuring", changed=told.extend) as (made, adb):
        deliver(store, tmp_path, record)
        made.poke()
        wait_for(lambda: count(store) > 0, "a sample")
        adb.gone = True
        record.end(exit_code=None, signal=9, ended_by="engine")
        deliver(store, tmp_path, record)
        made.run_ended()
        wait_for(lambda: record.run_id.hex() in told, "word that it is to be judged again")
    # and should that not come to pass, who drains the phone next finds it
    unsettled = Ingestor(store, Artifacts(str(tmp_path / "artifacts"))).unsettled(records.AGENT)
    assert [run.run_id for run in unsettled] == [record.run_id.hex()]


def count(store: Store) -> int:
    with store.read() as connection:
        return int(connection.execute(select(func.count()).select_from(HOST_SAMPLES)).scalar_one())


def test_another_hosts_probe_is_respected_and_wishes_are_answered_all_the_same(store: Store, tmp_path: Path) -> None:
    PlayedShell.trouble = BusyError("another host's probe (process 9) works on this phone")
    agent = PlayedAgent()
    agent.keeps = False
    record = begun("com.example.game")
    deliver(store, tmp_path, record)
    with watching(store, agent, "gating"):
        wait_for(lambda: agent.facts("stop_apps"), "an answer")
        wait_for(lambda: load_run(store, record.run_id.hex()).notes, "the host's own note")
    (facts,) = agent.facts("stop_apps")
    assert facts["done"] is False
    (note,) = [note for note in load_run(store, record.run_id.hex()).notes if note.code == "stop_apps"]
    assert (note.source, note.facts["done"]) == ("host", False)
    assert "another host" in note.text
    assert PlayedShell.asked == []


@pytest.mark.parametrize("trouble", [AdbError("no such transport"), RuntimeError("a bug")])
def test_trouble_with_the_shell_holds_nobody_up(store: Store, trouble: Exception) -> None:
    PlayedShell.trouble = trouble
    with watching(store, PlayedAgent()) as (made, _):
        wait_for(lambda: not made.pending, "nobody to wait")
        PlayedShell.trouble = None
        wait_for(lambda: made.samples > 0, "samples once the shell is there again")


def test_an_agent_that_is_gone_ends_nothing_but_samples(store: Store) -> None:
    agent = PlayedAgent()
    agent.gone = True
    with watching(store, agent) as (made, _):
        agent.gone = False
        wait_for(lambda: made.samples > 0, "samples once it is there again")
    with store.read() as connection:
        assert connection.execute(select(func.count()).select_from(RUNS)).scalar() == 0
