"""Writers of one process: in the order of asking, and committed together where they wait for each other."""

import contextlib
import signal
import threading

import pytest
from bmoe_collector.store.engine import open_store
from bmoe_collector.store.schema import META
from bmoe_collector.store.turns import Together, Turn
from sqlalchemy import event, insert, select
from support.agents import wait_for


@pytest.fixture
def store(tmp_path):
    made = open_store(f"{tmp_path}/runs.db")
    yield made
    made.close()


def keys(store) -> set[str]:
    with store.read() as connection:
        return set(connection.execute(select(META.c.key).where(META.c.value == "x")).scalars())


def put(key: str):
    def work(connection):
        connection.execute(insert(META).values(key=key, value="x"))
        return key

    return work


def at_once(together: Together, works, held) -> list[object]:
    """Results of works that all wait before the first one may begin; `held` keeps it from beginning."""
    results: list[object] = [None] * len(works)

    def run(place, work):
        try:
            results[place] = together.run(work)
        except Exception as error:
            results[place] = error

    threads = [threading.Thread(target=run, args=(place, work)) for place, work in enumerate(works)]
    with held:
        for count, thread in enumerate(threads, 1):
            thread.start()
            wait_for(lambda count=count: len(together._waiting) == count, f"{count} waiting", 20)
    for thread in threads:
        thread.join(20)
    return results


def in_line(turn: Turn, asked: list[bool], order: list[int]) -> list[threading.Thread]:
    """Threads that wait one behind the other, urgent or not, and note when they had their turn."""

    def take(number, urgent):
        with turn.taken(urgent=urgent):
            order.append(number)

    threads = [threading.Thread(target=take, args=each) for each in enumerate(asked)]
    for number, thread in enumerate(threads, 1):
        thread.start()
        wait_for(lambda number=number: len(turn._waiting) + len(turn._urgent) == number, "it waits", 20)
    return threads


@pytest.mark.parametrize(
    ("asked", "due"), [([False] * 6, [0, 1, 2, 3, 4, 5]), ([False, False, True, False, True], [2, 4, 0, 1, 3])]
)
def test_one_place_is_handed_on_in_the_order_of_asking_but_for_urgent_ones(asked, due):
    turn, order = Turn(), []
    with turn.taken():
        threads = in_line(turn, asked, order)
    for thread in threads:
        thread.join(20)
    assert order == due
    assert turn._free == 1


def test_several_places_are_all_used_and_all_given_back(store):
    turn, order = Turn(3), []
    with turn.taken(), turn.taken():
        with turn.taken():
            threads = in_line(turn, [False] * 5, order)
        for thread in threads:
            thread.join(20)  # through the one place that is free
    assert order == [0, 1, 2, 3, 4]
    assert turn._free == 3


def test_who_is_interrupted_while_it_waits_takes_no_place_with_it():
    """Ctrl-C in the thread that gets it; the place must not go to one who does not wait any more."""
    turn, order = Turn(), []

    def interrupt():
        wait_for(lambda: turn._waiting, "it waits", 20)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

    held, let_go = threading.Event(), threading.Event()

    def hold():
        with turn.taken():
            held.set()
            let_go.wait(60)

    threads = [threading.Thread(target=hold), threading.Thread(target=interrupt)]
    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    try:
        threads[0].start()
        assert held.wait(60)
        threads[1].start()
        with pytest.raises(KeyboardInterrupt), turn.taken():
            order.append("never")
    finally:
        signal.signal(signal.SIGUSR1, before)
        let_go.set()
    for thread in threads:
        thread.join(20)
    assert order == []
    assert (turn._free, len(turn._waiting)) == (1, 0)


def test_what_waits_is_committed_at_once(store):
    commits = []
    event.listen(store.engine, "commit", commits.append)
    together = Together(store.write, alone=False)
    names = [f"k{number}" for number in range(10)]
    assert at_once(together, [put(name) for name in names], store.turn.taken()) == names
    assert len(commits) == 1
    assert keys(store) == set(names)
    assert together.run(put("later")) == "later"


def test_what_one_raises_undoes_only_its_own(store):
    def bad(connection):
        put("bad")(connection)
        raise ValueError("mine")

    together = Together(store.write, alone=False)
    results = at_once(together, [put("a"), bad, put("b"), bad], store.turn.taken())
    assert [str(each) for each in results] == ["a", "mine", "b", "mine"]
    assert keys(store) == {"a", "b"}


def test_all_are_told_when_the_commit_fails_and_the_next_goes_on(store):
    broken = threading.Event()

    @contextlib.contextmanager
    def begin():
        with store.write() as connection:
            yield connection
            if broken.is_set():
                raise OSError("no commit")

    together = Together(begin, alone=False)
    broken.set()
    results = at_once(together, [put("a"), put("b")], store.turn.taken())
    assert [str(each) for each in results] == ["no commit"] * 2
    assert not keys(store)
    broken.clear()
    assert together.run(put("c")) == "c"
    assert keys(store) == {"c"}


def test_who_waits_is_not_forgotten_when_no_transaction_can_begin(store):
    begun = []

    @contextlib.contextmanager
    def begin():
        begun.append(1)
        with store.turn.taken():
            raise OSError("away")
        yield

    together = Together(begin, alone=False)
    results = at_once(together, [put("a"), put("b"), put("c")], store.turn.taken())
    assert [str(each) for each in results] == ["away"] * 3
    assert len(begun) == 3  # each asks for itself: the next may find it there


def test_a_transaction_does_not_take_others_in_for_ever(store, monkeypatch):
    monkeypatch.setattr("bmoe_collector.store.turns.LONGEST_S", -1.0)
    commits = []
    event.listen(store.engine, "commit", commits.append)
    together = Together(store.write, alone=False)
    at_once(together, [put(f"k{number}") for number in range(4)], store.turn.taken())
    assert len(commits) == 4
    assert len(keys(store)) == 4
