"""Files of ended runs: fetched once, said to be stored, and not awaited for ever when a phone has them no more."""

import hashlib

import grpc
import pytest
from bmoe_collector.fleet.files import FileFetcher
from bmoe_proto import calls
from bmoe_proto.v1 import telemetry_pb2 as pb

UUID, RUN = b"u" * 16, b"r" * 16
DATA = b"step,wall_ms\n1,2\n"
SHA = hashlib.sha256(DATA).digest()


class Store:
    """What a fetcher needs of an ingestor."""

    def __init__(self) -> None:
        self.stored: set[str] = set()
        self.given_up: list[str] = []
        self.artifacts = self

    def owns(self, _uuid, _run):
        return True

    def wanted(self, _uuid):
        return []

    def has(self, sha256):
        return sha256 == SHA.hex() and bool(self.stored)

    def holds(self, _run, name, _sha):
        return name in self.stored

    def artifact(self, _run, name, _kind, path, _sha):
        with open(path, "rb") as file:
            assert file.read() == DATA
        self.stored.add(name)

    def artifact_given_up(self, _run, name, why):
        assert why
        self.given_up.append(name)


class Phone:
    """An agent's files; it deletes a run that is acknowledged."""

    def __init__(self, refusal: grpc.StatusCode | None = None, given: list[bytes] | None = None) -> None:
        """`given`: what it gives at each fetch of "metrics.csv", the last of them again and again."""
        self.refusal = refusal
        self.given = given or [DATA]
        self.fetched = 0
        self.measuring = False
        self.asked = 0
        self.acknowledged: list[str] = []

    def fetch(self, _run, name, offset=0):
        self.asked += 1
        if self.measuring:
            raise calls.Busy("a cell is being measured", grpc.StatusCode.UNAVAILABLE)
        if self.refusal is not None or name in self.acknowledged:
            raise calls.Refused(f"no file {name}", self.refusal or grpc.StatusCode.NOT_FOUND)
        data = self.given[min(self.fetched, len(self.given) - 1)] if name == "metrics.csv" else DATA
        self.fetched += name == "metrics.csv"
        yield pb.FetchChunk(offset=offset, data=data[offset:], size=len(data))

    def acknowledge_artifact(self, _run, name, _sha):
        self.acknowledged.append(name)


@pytest.fixture
def ended():
    facts = pb.ArtifactFacts(name="metrics.csv", kind="metrics", size=len(DATA), sha256=SHA)
    return pb.FollowReply.Ended(run_id=RUN, artifacts=[facts])


def fetch(fetcher, phone):
    return fetcher.fetch(phone, True, lambda: None)


def test_a_file_told_of_again_after_it_was_stored_is_acknowledged_and_not_awaited(tmp_path, ended):
    store, phone = Store(), Phone()
    fetcher = FileFetcher(store, UUID, tmp_path)
    fetcher.expect(ended)
    assert fetch(fetcher, phone) == 1
    fetcher.expect(ended)
    assert fetch(fetcher, phone) == 0
    assert (fetcher.pending(), phone.fetched, phone.acknowledged) == (0, 1, ["metrics.csv"] * 2)
    assert list(tmp_path.iterdir()) == []


def test_a_file_the_phone_has_no_more_is_given_up_one_it_does_not_give_now_waits(tmp_path, ended):
    store = Store()
    fetcher = FileFetcher(store, UUID, tmp_path)
    fetcher.expect(ended)
    assert fetch(fetcher, Phone(grpc.StatusCode.UNAVAILABLE)) == 0
    assert (fetcher.pending(), store.given_up) == (1, [])
    assert fetch(fetcher, Phone(grpc.StatusCode.NOT_FOUND)) == 0
    assert (fetcher.pending(), store.given_up) == (0, ["metrics.csv"])
    assert list(tmp_path.iterdir()) == []


def test_a_phone_that_measures_is_not_asked_for_one_file_after_the_other(tmp_path, ended):
    store, phone = Store(), Phone()
    ended.artifacts.add(name="route.csv", kind="route", size=len(DATA), sha256=SHA)
    fetcher = FileFetcher(store, UUID, tmp_path)
    fetcher.expect(ended)
    phone.measuring = True
    assert fetch(fetcher, phone) == 0
    assert (phone.asked, fetcher.pending()) == (1, 2)
    phone.measuring = False
    assert fetch(fetcher, phone) == 2
    assert (phone.asked, fetcher.pending(), store.given_up) == (3, 0, [])


def test_parts_of_stored_files_are_swept_when_a_stream_begins(tmp_path):
    store = Store()
    store.stored.add("metrics.csv")
    left = tmp_path / f"{SHA.hex()}-{UUID.hex()[:8]}.part"
    other = tmp_path / f"{'0' * 64}-{UUID.hex()[:8]}.part"
    for path in (left, other):
        path.write_bytes(DATA[:3])
    FileFetcher(store, UUID, tmp_path).resume()
    assert list(tmp_path.iterdir()) == [other]


OTHER = bytes(reversed(DATA))


@pytest.mark.parametrize("given", [[OTHER], [DATA + b"more"], [DATA[:4], OTHER]])
def test_a_file_that_is_not_what_its_record_says_is_given_up_and_keeps_no_other_waiting(tmp_path, ended, given):
    store, phone = Store(), Phone(given=given)
    fetcher = FileFetcher(store, UUID, tmp_path)
    ended.artifacts.add(name="route.csv", kind="route", size=len(DATA), sha256=SHA)
    fetcher.expect(ended)
    while fetcher.pending():
        assert fetch(fetcher, phone) in {0, 1}
        assert phone.fetched < 10
    assert (store.given_up, store.stored, phone.acknowledged) == (["metrics.csv"], {"route.csv"}, ["route.csv"])
    assert list(tmp_path.iterdir()) == []
    asked = phone.fetched
    fetcher.expect(ended)  # as a stream that opens anew does: the phone keeps what it was not told to be stored
    assert [fetch(fetcher, phone), fetcher.pending()] == [0, 0]
    assert phone.fetched == asked


@pytest.mark.parametrize("given", [[OTHER, DATA], [DATA[:4], b"", DATA]])
def test_a_file_that_was_damaged_on_the_way_is_asked_for_again(tmp_path, ended, given):
    store, phone = Store(), Phone(given=given)
    fetcher = FileFetcher(store, UUID, tmp_path)
    fetcher.expect(ended)
    stored = 0
    while fetcher.pending():
        stored += fetch(fetcher, phone)
        assert phone.fetched < 10
    assert (stored, store.given_up, phone.acknowledged) == (1, [], ["metrics.csv"])
