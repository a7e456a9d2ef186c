"""What follows a run's end, in a thread of its own: once, also when the database was away, and not for ever."""

import threading
from pathlib import Path

import pytest
from bmoe_collector.fleet import settler
from bmoe_collector.fleet.settler import Settler
from bmoe_collector.ingest import Ingestor, finish
from bmoe_collector.ingest.ingestor import Unsettled
from bmoe_collector.store import schema as tables
from bmoe_collector.store.artifacts import Artifacts
from bmoe_collector.store.engine import open_store
from sqlalchemy import select
from support import records
from support.agents import wait_for

RUN = b"R" * 16
METRICS = b"# bmoe_metrics v2\nstep,steps,wall_ms,turn\n1,48,5.0,0\n"


class Shelf:
    """A store, an ingestor whose runs are settled by a settler, and what was judged when."""

    def __init__(self, folder: Path, files_s: float, monkeypatch) -> None:
        self.store = open_store(str(folder / "runs.db"))
        self.ingestor = Ingestor(self.store, Artifacts(str(folder / "artifacts")))
        self.free: list[bytes] = []
        self.judged: list[str] = []
        judge = finish.judge
        monkeypatch.setattr(finish, "judge", lambda store, ids: (self.judged.extend(ids), judge(store, ids)))
        self.failed: list[tuple[str, int]] = []
        self.settler = Settler(
            self.ingestor, files_s, self.free.append, lambda _, error, tries: self.failed.append((str(error), tries))
        )
        self.ingestor.later = self.settler.add
        self.settler.start()
        self.folder = folder

    def deliver(self, run_id: bytes = RUN, **files: bytes) -> None:
        named = {name: ("metrics", data) for name, data in files.items()}
        for cursor, data in records.whole(run_id, records.oneshot(), artifacts=named).batches([64]):
            self.ingestor.blocks(records.AGENT, cursor, data)

    def file(self, name: str, data: bytes) -> None:
        path = self.folder / name
        path.write_bytes(data)
        wanted = next(each for each in self.ingestor.wanted(records.AGENT) if each.name == name)
        self.ingestor.artifact(RUN, name, "metrics", str(path), wanted.sha256)

    def facts(self) -> list[str]:
        with self.store.read() as connection:
            query = select(tables.RUNS.c.run_id).join(
                tables.RUN_FACTS, tables.RUN_FACTS.c.run_no == tables.RUNS.c.run_no
            )
            return list(connection.execute(query).scalars())

    def streams(self) -> set[str]:
        with self.store.read() as connection:
            query = select(tables.ARTIFACTS.c.name).where(tables.ARTIFACTS.c.state == "stored")
            return set(connection.execute(query).scalars())


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    made = []

    def make(files_s: float = 0.0) -> Shelf:
        made.append(Shelf(tmp_path, files_s, monkeypatch))
        return made[-1]

    yield make
    for each in made:
        each.settler.stop()
        each.store.close()


def test_a_run_without_files_is_settled_at_once(shelf):
    here = shelf(files_s=3600)
    here.deliver()
    wait_for(lambda: here.free == [records.AGENT], "nothing of the phone is pending")
    assert here.settler.pending(records.AGENT) == 0
    assert here.facts() == [RUN.hex()]
    assert here.streams() == {"stdout"}


def test_one_that_awaits_a_file_is_judged_once_with_it(shelf):
    here = shelf(files_s=3600)
    here.deliver(m=METRICS)
    assert here.settler.pending(records.AGENT) == 1
    here.file("m", METRICS)
    wait_for(lambda: here.free, "it is settled")
    assert here.judged == [RUN.hex()]
    assert here.facts() == [RUN.hex()]
    assert here.streams() == {"stdout", "m"}


def test_a_file_that_does_not_come_is_not_waited_for_long_and_judged_with_when_it_does(shelf):
    here = shelf(files_s=0.05)
    here.deliver(m=METRICS)
    wait_for(here.facts, "it is judged without its file")
    here.file("m", METRICS)
    wait_for(lambda: len(here.judged) == 2 and here.facts(), "it is judged again")


def test_what_waits_when_the_collector_stops_is_settled_first(shelf):
    here = shelf(files_s=3600)
    here.deliver(m=METRICS)
    here.settler.stop()
    assert here.facts() == [RUN.hex()]
    assert not here.settler.is_alive()


def test_a_file_stored_by_one_who_was_killed_before_judging_is_found_again(shelf):
    here = shelf(files_s=0.05)
    here.deliver(m=METRICS)
    wait_for(here.facts, "it is judged without its file")
    here.ingestor.later = lambda _: None
    here.file("m", METRICS)
    assert not here.facts()
    assert [run.run_id for run in here.ingestor.unsettled(records.AGENT)] == [RUN.hex()]
    assert here.ingestor.catch_up(records.AGENT) == [RUN.hex()]
    assert here.facts() == [RUN.hex()]
    assert not here.ingestor.unsettled(records.AGENT)


def test_what_fails_is_tried_again_and_waited_for_a_few_times_only(shelf, monkeypatch):
    monkeypatch.setattr(settler, "RETRY_MOST_S", 0.02)
    here = shelf()
    settle, fails, tries = here.ingestor.settle, threading.Event(), []

    def sometimes(run: Unsettled) -> None:
        tries.append(run.run_id)
        if fails.is_set():
            raise OSError("the database is away")
        settle(run)

    fails.set()
    monkeypatch.setattr(here.ingestor, "settle", sometimes)
    here.deliver()
    wait_for(lambda: not here.settler.pending(records.AGENT), "it is not waited for any more")
    wait_for(lambda: len(here.failed) > settler.TRIES, "but still tried")
    assert here.failed[:2] == [("the database is away", 1), ("the database is away", 2)]
    assert not here.facts()
    assert not here.free
    fails.clear()
    wait_for(lambda: here.facts() == [RUN.hex()], "it is settled in the end")
    done = len(tries)
    here.settler.stop()
    assert len(tries) == done
