"""Any message to any call of a real agent, from a program that knows the secret and means harm: an answer or one clear
error within the deadline, and an agent that goes on serving, with what it had."""

import contextlib
import json
import math
import os
import shutil
import tempfile
from pathlib import Path

import grpc
import pytest
from bmoe_agent import config, initialise
from bmoe_agent.supervisor import Supervisor
from bmoe_proto import calls, proof
from bmoe_proto.asking import cell_problems
from bmoe_proto.v1 import telemetry_pb2 as pb
from google.protobuf.descriptor import FieldDescriptor as Field
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.service import Asking, make_run

pytestmark = pytest.mark.agent

STORE = b"S" * 16
RUN = b"r" * 16
UNARY = {
    "Status": pb.StatusRequest,
    "Submit": pb.SubmitRequest,
    "List": pb.ListRequest,
    "Cancel": pb.CancelRequest,
    "AcknowledgeArtifact": pb.AcknowledgeArtifactRequest,
    "Clock": pb.ClockRequest,
    "Tell": pb.TellRequest,
    "Rotate": pb.RotateRequest,
}
CLEAR = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
TEXTS = st.one_of(
    st.sampled_from(["", "../../etc/passwd", "/etc/passwd", "-p", "--csv=/x", "\0", "a" * 5000, "metrics.csv", "[" * 9000,
                     '{"a": 1e999}', '{"a": ' + "9" * 4000 + "}", '{"battery_pct": NaN}', "0" * 32, "LD_PRELOAD"]),
    st.text(max_size=30),
)  # fmt: skip
BYTES = st.one_of(st.sampled_from([b"", RUN, STORE, b"x" * 4096, b"../x"]), st.binary(max_size=40))
WHOLE = {
    Field.TYPE_UINT32: (0, 2**32 - 1),
    Field.TYPE_UINT64: (0, 2**64 - 1),
    Field.TYPE_INT32: (-(2**31), 2**31 - 1),
    Field.TYPE_INT64: (-(2**63), 2**63 - 1),
}


def values(field):
    """Any value of a field, the extremes often."""
    if field.type == Field.TYPE_MESSAGE:
        return messages(field.message_type)
    if field.type == Field.TYPE_STRING:
        return TEXTS
    if field.type == Field.TYPE_BYTES:
        return BYTES
    if field.type == Field.TYPE_BOOL:
        return st.booleans()
    if field.type == Field.TYPE_DOUBLE:
        return st.one_of(st.sampled_from([math.inf, -math.inf, math.nan, 1e308, -1.0, 0.0]), st.floats())
    low, high = WHOLE[field.type]
    return st.one_of(st.sampled_from([low, high, 0, 1]), st.integers(low, high))


@st.composite
def messages(draw, descriptor):
    """Any message of a type."""
    message = vars(pb).get(descriptor.name) or getattr(vars(pb)[descriptor.containing_type.name], descriptor.name)
    made = message()
    for field in descriptor.fields:
        if not draw(st.booleans()):
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            getattr(made, field.name).update(draw(st.dictionaries(TEXTS, TEXTS, max_size=2)))
        elif field.is_repeated if hasattr(field, "is_repeated") else field.label == Field.LABEL_REPEATED:
            getattr(made, field.name).extend(draw(st.lists(values(field), max_size=2)))
        elif field.type == Field.TYPE_MESSAGE:
            getattr(made, field.name).CopyFrom(draw(values(field)))
        else:
            setattr(made, field.name, draw(values(field)))
    return made


@pytest.fixture(scope="module")
def agent():
    """A whole agent in this process, with one ended run and its file."""
    folder = Path(tempfile.mkdtemp())
    home, models = folder / "home", folder / "models"
    models.mkdir()
    (models / "m.gguf").write_bytes(b"GGUF")
    engine = folder / "engine"
    engine.write_text("#!/bin/sh\nexit 3\n")
    engine.chmod(0o755)
    initialise.init(home, engines=[str(engine)], models=[str(models)], socket_name=f"bmoe-test-{os.urandom(6).hex()}")
    config.keep_for_store(home, STORE)
    with Supervisor(home) as made:
        make_run(made.context.spool, RUN, artifacts={"metrics.csv": b"x" * 1000})
        # nothing is to run here, only to be asked: plans are taken and wait
        made.night._next = lambda: None
        yield made
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def client(agent):
    settings_ = agent.context.config
    with calls.connect(
        f"unix-abstract:{settings_.socket}", settings_.secret, STORE, expect_uuid=settings_.uuid, deadline_s=30
    ) as made:
        yield made


def raw(client, method, data):
    """One proven call with these bytes; the answer, or the error's code and words."""
    for _ in range(2):
        client._renew()
        metadata, _ = client._prove(method, data)
        try:
            return client._channel.unary_unary(calls.SERVICE + method)(data, metadata=metadata, timeout=30)
        except grpc.RpcError as error:
            if error.details() != calls.UNKNOWN_SESSION:
                return error.code(), error.details()
            client._nonce = b""  # a Rotate before ended the session
    raise AssertionError("no session is kept")


def check(answer):
    if isinstance(answer, tuple):
        code, words = answer
        assert code in CLEAR, answer
        assert words
        assert "Exception" not in words
        assert len(words) < 1000


def put_back(agent):
    """What a Rotate that was right may change."""
    agent.rotate(None, STORE, forget=False)


MANY = settings(max_examples=60, suppress_health_check=list(HealthCheck), deadline=None)
FEW = settings(max_examples=20, suppress_health_check=list(HealthCheck), deadline=None)


@pytest.mark.parametrize("method", UNARY)
class TestAnyMessage:
    @MANY
    @given(data=st.data())
    def test_of_the_right_type(self, agent, client, method, data):
        check(raw(client, method, data.draw(messages(UNARY[method].DESCRIPTOR)).SerializeToString()))
        put_back(agent)
        assert client.status().kept_for_store == STORE

    @FEW
    @given(data=st.binary(max_size=200))
    def test_of_any_bytes(self, agent, client, method, data):
        check(raw(client, method, data))
        put_back(agent)


class TestStreams:
    @FEW
    @given(opened=messages(pb.FollowRequest.Open.DESCRIPTOR), cursor=messages(pb.Cursor.DESCRIPTOR))
    def test_any_follow_is_answered(self, client, opened, cursor):
        asking = Asking()
        asking._queue.queue.clear()
        asking._queue.put(pb.FollowRequest(open=opened))
        cursor.run_id, cursor.offset = b"z" * 16, cursor.offset  # acknowledging what is here would delete it
        asking._queue.put(pb.FollowRequest(acknowledge=cursor))
        replies = client.follow(asking)
        try:
            assert next(replies).WhichOneof("say")
        finally:
            asking.close()
            replies.cancel()

    @FEW
    @given(data=st.binary(max_size=60))
    def test_any_first_bytes_of_a_follow(self, client, data):
        client._renew()
        metadata, _ = client._prove("Follow", data)
        call = client._channel.stream_stream(f"{calls.SERVICE}Follow")(iter([data]), metadata=metadata, timeout=30)
        with contextlib.suppress(StopIteration):
            try:
                next(call)
            except grpc.RpcError as error:
                check((error.code(), error.details()))
        call.cancel()

    @MANY
    @given(asked=messages(pb.FetchRequest.DESCRIPTOR))
    def test_any_fetch(self, client, asked):
        try:
            for _ in client.fetch(asked.run_id, asked.name, asked.offset, deadline_s=30):
                pass
        except calls.Refused as error:
            check((error.code, str(error)))

    @pytest.mark.parametrize("offset", [0, 999, 1000, 1001, 2**62, 2**63 - 1, 2**63, 2**64 - 1])
    def test_a_file_from_any_offset(self, client, offset):
        data = b"".join(chunk.data for chunk in client.fetch(RUN, "metrics.csv", offset, deadline_s=30))
        assert len(data) == max(1000 - offset, 0)

    @pytest.mark.parametrize(
        "name", ["../../secret", "../acks.json", "/etc/passwd", "metrics.csv/../../../secret", ".", ""]
    )
    def test_a_file_outside_the_run_is_not_there(self, client, name):
        with pytest.raises(calls.Refused, match="no file"):
            list(client.fetch(RUN, name))


class TestWhatAHostTells:
    def test_facts_that_break_a_reader(self, agent, client):
        for text in ("[" * 100_000, '{"battery_pct": 1e999}', '{"battery_pct": ' + "9" * 4000 + "}", '{"a": NaN}', "7"):
            check(raw(client, "Tell", pb.TellRequest(note=pb.Note(code="x", facts_json=text)).SerializeToString()))
        assert "battery_pct" not in agent.context.gates.told.values

    def test_what_is_remembered_is_bounded(self, agent, client):
        for at in range(300):
            note = pb.Note(code=f"code {at}", facts_json=json.dumps({f"{at} {n}": n for n in range(20)}))
            client.tell(b"", note)
        assert len(agent.context.told) <= 300 // 2
        assert len(agent.context.gates.told.values) <= 3000


class TestPlansBeyondReason:
    @pytest.mark.parametrize(
        "cell",
        [
            pb.Cell(preheat_s=math.inf),
            pb.Cell(preheat_s=math.nan),
            pb.Cell(preheat_s=-1),
            pb.Cell(preheat_s=1e9),
            pb.Cell(watchdog=pb.WatchdogAsk(total_s=math.nan)),
            pb.Cell(watchdog=pb.WatchdogAsk(decode_s=-1)),
            pb.Cell(watchdog=pb.WatchdogAsk(grace_s=math.inf)),
        ],
    )
    def test_times_that_are_none(self, cell):
        cell.model, cell.prompt = "m", b"p"
        assert cell_problems(cell), cell

    def test_an_honest_cell_is_taken(self):
        cell = pb.Cell(model="m", prompt=b"p", preheat_s=30, watchdog=pb.WatchdogAsk(total_s=900, max_cpu_temp_c=95))
        assert not cell_problems(cell)


def test_the_agent_still_knows_its_secret_and_its_run(agent, client):
    """Last: after all of the above it serves the same record."""
    assert proof.fingerprint(config.load(agent.context.home).secret) == proof.fingerprint(agent.context.config.secret)
    assert RUN in {run.run_id for run in client.listing().runs}
    assert b"".join(chunk.data for chunk in client.fetch(RUN, "metrics.csv")) == b"x" * 1000
