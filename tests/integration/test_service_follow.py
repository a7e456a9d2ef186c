"""The stream and the files: everything once per reader, in order, nothing that would disturb a measured cell."""

import contextlib
import glob
import itertools
import os
import threading
import time

import grpc
import pytest
from bmoe_agent.serve.port import Measuring
from bmoe_agent.serve.service import MAX_FOLLOWERS
from bmoe_agent.spool import Spool
from bmoe_proto import calls, framing
from bmoe_proto.v1 import telemetry_pb2 as pb
from support.agents import wait_for
from support.service import STORE, Asking, make_run, relay, served

pytestmark = pytest.mark.agent

RUN, SECOND = b"1" * 16, b"2" * 16
OTHER_STORE = b"O" * 16


@pytest.fixture
def agent(tmp_path):
    with served(tmp_path) as made:
        yield made


@pytest.fixture
def client(agent):
    with agent.client() as made:
        yield made


def until_drained(replies):
    """What comes until there is nothing more: batches, and ends."""
    found = []
    for reply in replies:
        if reply.HasField("heartbeat"):
            if reply.heartbeat.drained:
                break
        else:
            found.append(reply)
    return found


def joined(replies, run_id=RUN):
    """The bytes of a run by segment, checked to be without holes."""
    found = {}
    for reply in replies:
        if reply.HasField("batch") and reply.batch.at.run_id == run_id:
            data = found.setdefault(reply.batch.at.segment, bytearray())
            assert reply.batch.at.offset == len(data)
            data.extend(reply.batch.blocks)
    return {segment: bytes(data) for segment, data in found.items()}


def on_disk(agent, run_id=RUN):
    folder = os.path.join(agent.spool.root, run_id.hex())
    found = {}
    for name in sorted(os.listdir(folder)):
        if name.endswith(".seg"):
            with open(os.path.join(folder, name), "rb") as file:
                found[bytes.fromhex(name[5:-4])] = file.read()
    return found


class TestDraining:
    def test_the_files_bytes_come_as_they_are_oldest_run_first_then_the_end(self, agent, client):
        make_run(agent.spool, SECOND, started_wall_ns=2, artifacts={"metrics.csv": b"rows"})
        make_run(agent.spool, RUN, started_wall_ns=1, outputs=40, size=3000)
        agent.spool.open_run(RUN).seal()  # a second segment
        replies = until_drained(client.follow(Asking(max_batch_bytes=10_000)))
        for run_id in (RUN, SECOND):
            assert joined(replies, run_id) == on_disk(agent, run_id)
        ends = [reply.ended for reply in replies if reply.HasField("ended")]
        assert [end.run_id for end in ends] == [SECOND, RUN]
        assert [item.name for item in ends[0].artifacts] == ["metrics.csv"]
        assert replies[-1].ended.run_id == RUN
        assert max(len(reply.batch.blocks) for reply in replies) <= 10_000
        assert client.status().backlog_bytes == agent.spool.backlog_bytes() > 0

    def test_a_reader_goes_on_where_its_store_stands(self, agent, client):
        make_run(agent.spool, RUN, outputs=5)
        ((segment, data),) = on_disk(agent).items()
        middle = list(framing.scan(data))[2].end
        cursors = [
            pb.Cursor(run_id=RUN, segment=segment, offset=middle),
            pb.Cursor(run_id=b"?" * 16, segment=b"?" * 16, offset=9),  # of a run that is long gone
        ]
        replies = until_drained(client.follow(Asking(*cursors)))
        assert replies[0].batch.at.offset == middle
        assert b"".join(reply.batch.blocks for reply in replies) == data[middle:]
        # a store that has more than a phone that lost power
        beyond = pb.Cursor(run_id=RUN, segment=segment, offset=len(data) + 500)
        replies = until_drained(client.follow(Asking(beyond)))
        assert [reply.WhichOneof("say") for reply in replies] == ["ended"]

    def test_what_the_store_acknowledged_is_deleted_and_listed_so(self, agent, client):
        make_run(agent.spool, RUN, artifacts={"metrics.csv": b"rows"})
        asking = Asking()
        replies = client.follow(asking)
        for reply in replies:
            if reply.HasField("batch"):
                at = reply.batch.at
                asking.acknowledge(at.run_id, at.segment, at.offset + len(reply.batch.blocks))
            elif reply.HasField("ended"):
                break
        (facts,) = reply.ended.artifacts
        data = b"".join(chunk.data for chunk in client.fetch(RUN, facts.name))
        assert data == b"rows"
        refused = client.acknowledge_artifact(RUN, facts.name, b"?" * 32)
        assert (refused.accepted, "fetch it again" in refused.why) == (False, True)
        assert not client.listing().runs[0].acknowledged
        wait_for(lambda: agent.spool.backlog_bytes() == 0, "the cursor was acknowledged")
        assert client.acknowledge_artifact(RUN, facts.name, facts.sha256).accepted
        wait_for(lambda: not agent.spool.runs(), "the run is deleted")
        (listed,) = client.listing().runs
        assert (listed.run_id, listed.acknowledged, listed.ended, listed.outcome) == (RUN, True, True, "ok")
        # the stream is alive, and another reader finds nothing
        assert next(replies).HasField("heartbeat")
        assert until_drained(client.follow(Asking())) == []

    def test_another_stores_word_frees_nothing(self, agent):
        make_run(agent.spool, RUN, artifacts={"m": b"x"})
        with agent.client(store=OTHER_STORE) as other:
            asking = Asking()
            replies = other.follow(asking)
            batches = until_drained(replies)
            for reply in batches:
                if reply.HasField("batch"):
                    asking.acknowledge(RUN, reply.batch.at.segment, 1 << 40)
            reply = other.acknowledge_artifact(RUN, "m", batches[-1].ended.artifacts[0].sha256)
            assert (reply.accepted, "another store" in reply.why) == (False, True)
            for _ in range(3):
                assert next(replies).heartbeat.backlog_bytes > 0
        assert agent.spool.runs() == [RUN]
        assert agent.spool.backlog_bytes() > 0

    def test_damage_is_told_as_a_gap_and_later_segments_still_come(self, agent, client):
        make_run(agent.spool, RUN, outputs=4, end=False).seal()
        make_run(agent.spool, RUN, outputs=2)
        (first, data), (second, _) = on_disk(agent).items()
        third_block = list(framing.scan(data))[2]
        path = os.path.join(agent.spool.root, RUN.hex(), f"0000-{first.hex()}.seg")
        with open(path, "r+b") as file:
            file.seek(third_block.offset + 70)
            file.write(b"\xff\x00\xff")
        replies = until_drained(client.follow(Asking()))
        found = joined(replies)
        assert found[first] == data[: third_block.offset]
        assert list(found)[:2] == [first, second]
        frames = [
            pb.Frame.FromString(frame)
            for data in found.values()
            for block in framing.scan(data)
            for frame in block.frames()
        ]
        (gap,) = [frame.gap for frame in frames if frame.HasField("gap")]
        assert gap.lost_segment == first
        assert gap.frames == 3
        assert any(frame.HasField("run_ended") for frame in frames)
        assert os.path.exists(path.removesuffix(".seg") + ".damaged")

    def test_a_file_that_cannot_be_read_any_more_keeps_no_other_waiting(self, agent, client):
        """A bad block of the flash: the system says EIO to whoever reads, here EISDIR."""
        for run_id in (RUN, SECOND):
            make_run(agent.spool, run_id, artifacts={"m": b"x" * 10}, started_wall_ns=run_id[0])
        folder = os.path.join(agent.spool.root, RUN.hex())
        for path in (*glob.glob(f"{folder}/*.seg"), f"{folder}/files/m"):
            os.unlink(path)
            os.mkdir(path)
        told = until_drained(client.follow(Asking()))
        assert {bytes(reply.batch.at.run_id) for reply in told if reply.HasField("batch")} == {SECOND}
        assert {bytes(reply.ended.run_id) for reply in told if reply.HasField("ended")} == {RUN, SECOND}
        with pytest.raises(calls.Refused) as refused:
            list(client.fetch(RUN, "m"))
        assert refused.value.code is grpc.StatusCode.NOT_FOUND
        assert list(client.fetch(SECOND, "m"))
        assert RUN.hex() in agent.spool.trouble
        # and an agent that starts serves the rest
        assert Spool(agent.spool.root, 1 << 30).runs() == [SECOND]


class TestLive:
    def test_frames_of_an_open_run_come_as_they_are_written(self, agent, client):
        writer = make_run(agent.spool, RUN, outputs=0, end=False)
        replies = client.follow(Asking())
        assert next(replies).HasField("batch")
        assert next(replies).heartbeat.drained
        for at in range(3):
            writer.append("output", pb.Output(offset=at), at)
            writer.flush()
            reply = next(reply for reply in replies if not reply.HasField("heartbeat"))
            (block,) = framing.scan(reply.batch.blocks)
            assert pb.Frame.FromString(block.frames()[0]).output.offset == at
        writer.end(pb.RunEnded(outcome="ok"), 9)
        said = itertools.islice((reply for reply in replies if not reply.HasField("heartbeat")), 2)
        assert [reply.WhichOneof("say") for reply in said] == ["batch", "ended"]

    def test_heartbeats_say_what_the_agent_does(self, agent, client):
        replies = client.follow(Asking())
        beats = [next(replies).heartbeat for _ in range(3)]
        assert [beat.state for beat in beats] == ["idle"] * 3
        assert all(beat.drained for beat in beats)
        assert beats[0].boot_ns < beats[2].boot_ns

    def test_live_only_leaves_the_backlog(self, agent, client):
        make_run(agent.spool, RUN)
        writer = make_run(agent.spool, SECOND, end=False)
        replies = client.follow(Asking(live_only=True))
        assert {reply.batch.at.run_id for reply in until_drained(replies)} == {SECOND}
        writer.end(pb.RunEnded(outcome="ok"), 9)
        assert next(reply for reply in replies if reply.HasField("ended")).ended.run_id == SECOND


class TestWhileACellIsMeasured:
    def test_only_its_own_frames_come_and_not_often(self, tmp_path):
        with served(tmp_path, heartbeat_s=60, quiet_s=0.5) as agent, agent.client() as client:
            make_run(agent.spool, RUN, artifacts={"m": b"x" * 10})
            agent.supervisor.cell = Measuring(SECOND)
            writer = make_run(agent.spool, SECOND, end=False)
            stop = threading.Event()

            def write():
                for at in itertools.count():
                    writer.append("output", pb.Output(offset=at), at)
                    writer.flush()
                    if stop.wait(0.02):
                        return

            thread = threading.Thread(target=write)
            thread.start()
            try:
                replies = client.follow(Asking())
                stamps = []
                for reply in itertools.islice((reply for reply in replies if reply.HasField("batch")), 4):
                    stamps.append(time.monotonic())
                    assert reply.batch.at.run_id == SECOND
                # arrival may be late once, which makes the next pause look shorter; three pauses together do not lie
                assert stamps[-1] - stamps[0] > 3 * 0.5 - 0.3
                with pytest.raises(calls.Busy, match="measured"):
                    next(client.fetch(RUN, "m"))
            finally:
                stop.set()
                thread.join()
            writer.end(pb.RunEnded(outcome="ok"), 9)
            agent.supervisor.cell = None
            agent.spool.wake()
            assert {reply.ended.run_id for reply in until_drained(replies) if reply.HasField("ended")} == {RUN, SECOND}
            assert b"".join(chunk.data for chunk in client.fetch(RUN, "m")) == b"x" * 10

    def test_its_frames_do_not_wait_behind_heartbeats_that_are_not_due(self, tmp_path):
        with served(tmp_path, heartbeat_s=60, quiet_s=0.2) as agent, agent.client() as client:
            agent.supervisor.cell = Measuring(RUN)
            writer = make_run(agent.spool, RUN, end=False)
            replies = client.follow(Asking())
            assert [next(replies).WhichOneof("say") for _ in range(2)] == ["batch", "heartbeat"]
            for at in range(3):
                time.sleep(0.5)  # another message would be allowed meanwhile
                writer.append("output", pb.Output(offset=at), at)
                writer.flush()
                assert next(replies).WhichOneof("say") == "batch"
            writer.seal()

    def test_what_a_run_left_goes_in_the_gap_behind_it_however_short(self, tmp_path):
        with served(tmp_path, heartbeat_s=60, quiet_s=60) as agent, agent.client() as client:
            agent.supervisor.cell = Measuring(RUN)
            writer = make_run(agent.spool, RUN, end=False)
            replies = client.follow(Asking())
            assert next(replies).batch.at.run_id == RUN
            writer.append("output", pb.Output(offset=7), 7)
            writer.end(pb.RunEnded(outcome="ok"), 9)
            agent.supervisor.cell = None
            began = time.monotonic()
            following = make_run(agent.spool, SECOND, outputs=0, end=False)
            rest = list(itertools.takewhile(lambda reply: not reply.HasField("ended"), replies))
            assert RUN in {reply.batch.at.run_id for reply in rest}
            assert time.monotonic() - began < 30
            following.seal()

    def test_what_waits_is_said_to_wait_and_acknowledgements_delete_nothing_yet(self, agent, client):
        make_run(agent.spool, RUN)
        asking = Asking()
        replies = client.follow(asking)
        for reply in until_drained(replies):
            if reply.HasField("batch"):
                agent.supervisor.cell = Measuring(SECOND)
                asking.acknowledge(RUN, reply.batch.at.segment, 1 << 40)
        writer = make_run(agent.spool, SECOND, end=False)
        make_run(agent.spool, b"3" * 16)
        beat = next(reply for reply in replies if reply.HasField("heartbeat")).heartbeat
        assert (beat.state, beat.drained) == ("measuring", False)
        assert RUN in agent.spool.runs()
        agent.supervisor.cell = None
        writer.seal()
        until_drained(replies)
        wait_for(lambda: RUN not in agent.spool.runs(), "the acknowledged run is deleted between cells")

    def test_nothing_at_all_comes_while_the_phone_itself_is_measured_for_a_moment(self, agent, client):
        agent.supervisor.cell = Measuring(b"")
        writer = make_run(agent.spool, RUN, end=False)
        make_run(agent.spool, SECOND, artifacts={"m": b"x" * 10})
        replies = client.follow(Asking())
        beats = [next(replies) for _ in range(2)]
        assert [(reply.HasField("heartbeat"), reply.heartbeat.drained) for reply in beats] == [(True, False)] * 2
        fetched = []
        fetching = threading.Thread(target=lambda: fetched.extend(client.fetch(SECOND, "m")))
        fetching.start()
        fetching.join(0.3)
        assert not fetched
        assert fetching.is_alive()  # it waits, and does not have to be asked again
        agent.supervisor.cell = None
        agent.spool.wake()
        fetching.join(20)
        assert b"".join(chunk.data for chunk in fetched) == b"x" * 10
        assert {reply.batch.at.run_id for reply in until_drained(replies) if reply.HasField("batch")} == {RUN, SECOND}
        writer.seal()

    @pytest.mark.parametrize("by", ["reader", "plan"])
    def test_unless_the_reader_or_the_plan_says_otherwise(self, agent, client, by):
        make_run(agent.spool, RUN, artifacts={"m": b"x"})
        make_run(agent.spool, SECOND, end=False)
        agent.supervisor.cell = Measuring(SECOND, send_during_cells=by == "plan")
        replies = until_drained(client.follow(Asking(everything=by == "reader")))
        assert {reply.batch.at.run_id for reply in replies if reply.HasField("batch")} == {RUN, SECOND}
        assert b"".join(chunk.data for chunk in client.fetch(RUN, "m")) == b"x"


class TestReaders:
    def test_a_reader_that_does_not_read_holds_up_nobody(self, agent, client):
        writer = make_run(agent.spool, RUN, outputs=0, end=False)
        with agent.client() as sleeper:
            asleep = sleeper.follow(Asking(max_batch_bytes=1 << 20))
            next(asleep)
            for at in range(200):
                writer.append("output", pb.Output(offset=at, data=os.urandom(60_000)), at)
            writer.end(pb.RunEnded(outcome="ok"), 9)
            replies = until_drained(client.follow(Asking()))
            assert joined(replies) == on_disk(agent)
            assert client.status().state == "idle"

    def test_many_may_read_and_one_too_many_is_told(self, agent, client):
        make_run(agent.spool, RUN)
        streams = [client.follow(Asking(may_acknowledge=False)) for _ in range(MAX_FOLLOWERS)]
        for stream in streams:
            assert joined(until_drained(stream)) == on_disk(agent)
        with pytest.raises(calls.Refused, match="already"):
            next(client.follow(Asking()))
        assert client.status().state == "idle"
        streams.pop().cancel()
        wait_for(lambda: len(agent.server.service._followers) < MAX_FOLLOWERS, "a cancelled reader's place is free")
        assert next(client.follow(Asking())).HasField("batch")

    def test_readers_that_vanish_leave_nothing_behind(self, agent):
        def readers():
            return [thread for thread in threading.enumerate() if thread.name == "acknowledgements"]

        for _ in range(2 * MAX_FOLLOWERS):
            asking = Asking()
            with agent.client() as gone:
                next(gone.follow(asking))
            asking.close()
            wait_for(lambda: not agent.server.service._followers, "the stream of a gone reader ends")
        wait_for(lambda: not readers(), "their threads end")

    def test_a_stream_that_does_not_begin_with_open_is_refused(self, client):
        with pytest.raises(calls.Refused, match="begins with"):
            next(client.follow(iter([pb.FollowRequest(acknowledge=pb.Cursor())])))

    def test_stopping_the_agent_ends_streams(self, agent, client):
        replies = client.follow(Asking())
        next(replies)
        threading.Timer(0.1, agent.server.stop).start()
        with contextlib.suppress(calls.NotThere):  # it ends, cleanly or not
            list(replies)


class TestAFrozenPhone:
    @pytest.mark.slow
    def test_a_stream_that_stands_still_is_noticed_by_pings(self, tmp_path):
        with served(tmp_path, heartbeat_s=3600) as agent, relay(agent.name) as between:
            secret = agent.supervisor.the_secret
            with calls.connect(f"unix-abstract:{between.name}", secret, STORE, name=agent.name) as client:
                replies = client.follow(Asking())
                assert next(replies).HasField("heartbeat")
                between.stand_still()
                began = time.monotonic()
                with pytest.raises(calls.Frozen):
                    next(replies)
                # 10 s between pings and 3 s for their answer; the rest is for a machine under load
                assert time.monotonic() - began < 45

    def test_a_call_is_given_up_at_its_deadline(self, agent):
        with relay(agent.name) as between:
            secret = agent.supervisor.the_secret
            target = f"unix-abstract:{between.name}"
            with calls.connect(target, secret, STORE, name=agent.name, deadline_s=1.0) as client:
                between.stand_still()
                with pytest.raises(calls.Frozen, match="no answer within 1 s"):
                    client.status()

    @pytest.mark.slow
    def test_an_idle_stream_is_kept_while_both_sides_ping(self, tmp_path):
        with served(tmp_path, heartbeat_s=3600) as agent, agent.client() as client:
            replies = client.follow(Asking())
            assert next(replies).HasField("heartbeat")
            time.sleep(75)  # several pings of each side, which a server that is not told would call too many
            make_run(agent.spool, RUN)
            assert next(replies).HasField("batch")


def test_a_block_beyond_grpcs_usual_limit_comes_through(agent, client):
    writer = make_run(agent.spool, RUN, outputs=0, end=False)
    writer.append("output", pb.Output(data=os.urandom(9 << 20)), 1)
    writer.end(pb.RunEnded(outcome="ok"), 2)
    assert joined(until_drained(client.follow(Asking()))) == on_disk(agent)


def test_the_spool_keeps_for_the_store_it_was_told(agent):
    assert agent.spool.kept_for == STORE
