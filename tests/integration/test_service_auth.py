"""Who may call the agent, and whom a collector believes: each threat of another program on the phone, tried for real."""

import contextlib
import os
import secrets
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from bmoe_agent.serve.server import AlreadyServingError, NameTakenError, ServeError, Server
from bmoe_proto import calls, proof
from bmoe_proto.v1 import telemetry_pb2 as pb
from support.service import STORE, Asking, make_run, relay, served

pytestmark = pytest.mark.agent

METHODS = ["Status", "Submit", "List", "Cancel", "AcknowledgeArtifact", "Clock", "Tell", "Rotate"]


@pytest.fixture
def agent(tmp_path):
    with served(tmp_path) as made:
        yield made


def raw_call(agent, method, data=b"", metadata=(), kind="unary_unary"):
    """A call as any program could make it; returns how it was refused, or the answer."""
    with grpc.insecure_channel(f"unix-abstract:{agent.name}", options=calls.CLIENT_OPTIONS) as channel:
        call = getattr(channel, kind)(calls.SERVICE + method)
        try:
            asked = iter([data]) if kind == "stream_stream" else data
            answer = call(asked, metadata=metadata, timeout=20)
            return answer if kind == "unary_unary" else next(answer)
        except grpc.RpcError as error:
            return error.code(), error.details()


def proven(client, method, data):
    """The metadata with which `client` would make this call now."""
    return client._prove(method, data)[0]


class TestWhoMayCall:
    def test_the_paired_store_may(self, agent):
        with agent.client() as client:
            assert client.hello.paired
            assert client.hello.agent_version == "0.1.0"
            assert client.status().kept_for_store == STORE
            assert client.clock().clock.boot_id == "boot-1"
            assert client.submit(pb.Plan(plan_id="p", cells=[pb.Cell()])).plan_id == "p"
            assert [plan.plan_id for plan in client.listing().plans] == ["p"]
            assert client.cancel("p", only_current_cell=True).detail == "p True"
            assert client.tell(b"r" * 16, pb.Note(code="kill"))
            with pytest.raises(calls.Refused, match="without cells"):
                client.submit(pb.Plan(plan_id="q"))

    def test_nobody_gets_anything_without_a_proof(self, agent):
        make_run(agent.spool, b"r" * 16, artifacts={"m": b"x"})
        for method in METHODS:
            code, details = raw_call(agent, method)
            assert (code, "pair" in details) == (grpc.StatusCode.UNAUTHENTICATED, True)
        opened = pb.FollowRequest(open=pb.FollowRequest.Open()).SerializeToString()
        assert raw_call(agent, "Follow", opened, kind="stream_stream")[0] is grpc.StatusCode.UNAUTHENTICATED
        fetch = pb.FetchRequest(run_id=b"r" * 16, name="m").SerializeToString()
        assert raw_call(agent, "FetchArtifact", fetch, kind="unary_stream")[0] is grpc.StatusCode.UNAUTHENTICATED

    def test_a_program_that_says_hello_and_knows_no_secret_gets_no_further(self, agent):
        with pytest.raises(calls.WrongSecret, match="pair again"):
            agent.client(secret=proof.new_secret())
        # and one that does not care whether the agent knows the secret
        asked = pb.HelloRequest(protocol=1, client_nonce=b"c" * 32, store_id=STORE)
        reply = pb.HelloReply.FromString(raw_call(agent, "Hello", asked.SerializeToString()))
        handshake = proof.Handshake(b"c" * 32, reply.server_nonce, STORE, reply.agent_uuid, agent.name)
        key = proof.session_key(proof.new_secret(), handshake)
        value = proof.call_proof(key, reply.server_nonce, calls.SERVICE + "Status", 0, b"")
        assert raw_call(agent, "Status", b"", [(proof.PROOF_KEY, value)])[0] is grpc.StatusCode.UNAUTHENTICATED

    def test_a_recorded_call_is_refused_when_it_comes_again_or_changed(self, agent):
        with agent.client() as client:
            submit = pb.SubmitRequest(plan=pb.Plan(plan_id="p", cells=[pb.Cell()])).SerializeToString()
            other = pb.SubmitRequest(plan=pb.Plan(plan_id="evil", cells=[pb.Cell()])).SerializeToString()
            metadata = proven(client, "Submit", submit)
            assert raw_call(agent, "Submit", other, metadata)[1] == "the call's proof is wrong"
            assert raw_call(agent, "Rotate", submit, metadata)[1] == "the call's proof is wrong"
            assert isinstance(raw_call(agent, "Submit", submit, metadata), bytes)
            assert "made before" in raw_call(agent, "Submit", submit, metadata)[1]
            opened = pb.FollowRequest(open=pb.FollowRequest.Open()).SerializeToString()
            wider = pb.FollowRequest(open=pb.FollowRequest.Open(may_acknowledge=True)).SerializeToString()
            metadata = proven(client, "Follow", opened)
            assert "wrong" in raw_call(agent, "Follow", wider, metadata, kind="stream_stream")[1]
            assert isinstance(raw_call(agent, "Follow", opened, metadata, kind="stream_stream"), bytes)
            assert "made before" in raw_call(agent, "Follow", opened, metadata, kind="stream_stream")[1]
        assert [plan.plan_id for plan in agent.supervisor.plans] == ["p"]

    def test_proofs_of_one_run_of_the_agent_are_worth_nothing_in_the_next(self, agent):
        with agent.client() as client:
            metadata = proven(client, "Status", b"")
            agent.restart()
            assert raw_call(agent, "Status", b"", metadata)[1] == calls.UNKNOWN_SESSION
            assert client.status().state == "idle"  # a client says hello again by itself
            replies = client.follow(Asking())
            assert next(replies).HasField("heartbeat")
            agent.restart()
            with contextlib.suppress(calls.NotThere):  # the stream ends, cleanly or not
                list(replies)
            client.status()
            assert next(client.follow(Asking())).HasField("heartbeat")

    def test_a_flood_of_hellos_does_not_push_a_collector_out(self, agent):
        with agent.client() as client:
            client.status()
            asked = pb.HelloRequest(protocol=1, client_nonce=b"c" * 32, store_id=STORE).SerializeToString()
            with grpc.insecure_channel(f"unix-abstract:{agent.name}") as channel:
                hello = channel.unary_unary(f"{calls.SERVICE}Hello")
                for _ in range(400):
                    hello(asked, timeout=20)
            nonce = client.hello.server_nonce
            client.status()
            assert client.hello.server_nonce == nonce

    def test_streams_of_strangers_that_never_say_anything_hold_no_thread(self, agent):
        silent = threading.Event()
        with grpc.insecure_channel(f"unix-abstract:{agent.name}") as channel, agent.client() as client:
            follow = channel.stream_stream(f"{calls.SERVICE}Follow")
            streams = [follow(iter(silent.wait, True), timeout=60) for _ in range(30)]
            try:
                for stream in streams:
                    with pytest.raises(grpc.RpcError) as caught:
                        next(stream)
                    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
                assert client.status().state == "idle"
            finally:
                silent.set()

    @pytest.mark.parametrize("data", [b"\xff\xff", b"", pb.HelloRequest(client_nonce=b"short").SerializeToString()])
    def test_a_malformed_hello_is_refused(self, agent, data):
        assert raw_call(agent, "Hello", data)[0] is grpc.StatusCode.INVALID_ARGUMENT


class TestRotation:
    def test_a_new_secret_ends_the_old_one_and_every_stream(self, agent):
        old, new = agent.supervisor.the_secret, proof.new_secret()
        with agent.client() as one, agent.client() as two:
            replies = two.follow(Asking())
            assert next(replies).HasField("heartbeat")
            assert one.rotate(new)
            assert agent.supervisor.the_secret == new
            assert one.status().state == "idle"
            for _ in replies:
                pass
            with pytest.raises(calls.WrongSecret):
                two.status()
        with pytest.raises(calls.WrongSecret):
            agent.client(secret=old)

    def test_a_secret_sealed_by_somebody_else_is_refused(self, agent):
        before = agent.supervisor.the_secret
        with agent.client() as client:
            sealed = proof.seal(proof.new_secret(), client.hello.server_nonce, proof.new_secret())
            with pytest.raises(calls.Refused, match="not sealed"):
                client._unary("Rotate", pb.RotateRequest(sealed_secret=sealed), pb.RotateReply, again=False)
        assert agent.supervisor.the_secret == before

    def test_pairing_names_the_store_and_forgetting_frees_nothing(self, tmp_path):
        with served(tmp_path, kept_for=b"") as agent, agent.client() as client:
            assert not client.hello.paired
            assert client.rotate(keep_for_store=STORE)
            assert agent.spool.kept_for == STORE
            assert client.status().kept_for_store == STORE
            assert client.rotate(forget=True)
            assert not client.status().kept_for_store
            with pytest.raises(calls.Refused, match="16 bytes"):
                client.rotate(keep_for_store=b"x")


class Impostor(grpc.GenericRpcHandler):
    """A program on the agent's name that answers everything, with what it can know."""

    def __init__(self, uuid, *, secret=None, name="", protocol=1, oldest=1) -> None:
        self.uuid, self.secret, self.name = uuid, secret or proof.new_secret(), name
        self.versions = {"protocol": protocol, "oldest_protocol": oldest}

    def service(self, details):
        if details.method.endswith("Follow"):
            fake = pb.FollowReply(heartbeat=pb.FollowReply.Heartbeat(state="idle")).SerializeToString()
            return grpc.stream_stream_rpc_method_handler(lambda requests, context: iter([fake]))
        return grpc.unary_unary_rpc_method_handler(
            self.hello if details.method.endswith("Hello") else lambda data, context: b""
        )

    def hello(self, data, context):
        asked = pb.HelloRequest.FromString(data)
        handshake = proof.Handshake(asked.client_nonce, b"n" * 32, asked.store_id, self.uuid, self.name, asked.protocol)
        return pb.HelloReply(
            server_nonce=b"n" * 32,
            proof=proof.hello_proof(self.secret, handshake),
            agent_uuid=self.uuid,
            **self.versions,
        ).SerializeToString()


@contextlib.contextmanager
def impostor(name, uuid, **options):
    pool = ThreadPoolExecutor(4)
    server = grpc.server(pool, handlers=[Impostor(uuid, name=name, **options)], options=[("grpc.so_reuseport", 0)])
    server.add_insecure_port(f"unix-abstract:{name}")
    server.start()
    try:
        yield
    finally:
        server.stop(0).wait()
        pool.shutdown()


class TestWhomACollectorBelieves:
    def test_a_relay_on_another_name_is_noticed(self, agent):
        with relay(agent.name) as between:
            name = between.name
            with pytest.raises(calls.NotTheAgent, match="relays"):
                calls.connect(f"unix-abstract:{name}", agent.supervisor.the_secret, STORE, expect_uuid=agent.uuid)
            # the relay itself works: with the agent's name in the proof it would have passed
            calls.connect(
                f"unix-abstract:{name}", agent.supervisor.the_secret, STORE, expect_uuid=agent.uuid, name=agent.name
            ).close()

    def test_another_agent_than_expected(self, agent):
        with pytest.raises(calls.NotTheAgent, match="was expected"):
            agent.client(expect_uuid=os.urandom(16))

    def test_a_squatter_cannot_prove_the_secret(self):
        name, uuid = f"bmoe-test-{secrets.token_hex(6)}", os.urandom(16)
        with impostor(name, uuid), pytest.raises(calls.WrongSecret, match="took the agent's name"):
            calls.connect(f"unix-abstract:{name}", proof.new_secret(), STORE, expect_uuid=uuid)

    def test_who_takes_the_name_over_after_hello_is_not_believed(self, tmp_path):
        with served(tmp_path) as agent, agent.client() as client:
            assert client.status().state == "idle"
            agent.server.stop(0)
            with impostor(agent.name, agent.uuid):
                with pytest.raises(calls.NotTheAgent, match="not proven"):
                    client.status()
                with pytest.raises(calls.NotTheAgent, match="not proven"):
                    next(client.follow(Asking()))

    @pytest.mark.parametrize(
        ("versions", "expected"),
        [({"protocol": 0, "oldest": 0}, calls.TooOld), ({"protocol": 9, "oldest": 7}, calls.TooNew)],
    )
    def test_versions_that_do_not_meet_say_what_to_upgrade(self, versions, expected):
        name, uuid, secret = f"bmoe-test-{secrets.token_hex(6)}", os.urandom(16), proof.new_secret()
        with impostor(name, uuid, secret=secret, **versions), pytest.raises(expected, match="upgrade"):
            calls.connect(f"unix-abstract:{name}", secret, STORE)
        # an impostor cannot send people upgrading
        with impostor(name, uuid, **versions), pytest.raises(calls.WrongSecret):
            calls.connect(f"unix-abstract:{name}", secret, STORE)

    def test_nothing_there_and_nobody_answering_are_told_apart(self):
        name = f"bmoe-test-{secrets.token_hex(6)}"
        with pytest.raises(calls.NotThere) as caught:
            calls.connect(f"unix-abstract:{name}", proof.new_secret(), STORE, deadline_s=20)
        assert not isinstance(caught.value, calls.Frozen)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"\0{name}")
            listener.listen()
            with pytest.raises(calls.Frozen, match="frozen"):
                calls.connect(f"unix-abstract:{name}", proof.new_secret(), STORE, deadline_s=0.5)

    def test_a_proxy_in_the_environment_is_not_asked(self, agent, monkeypatch):
        for variable in ("http_proxy", "https_proxy", "grpc_proxy"):
            monkeypatch.setenv(variable, "http://127.0.0.1:9")
        with agent.client() as client:
            assert client.status().state == "idle"

    def test_the_name_of_a_forwarded_socket_must_be_told(self):
        with pytest.raises(ValueError, match="name of the agent's socket"):
            calls.connect("unix:/tmp/x.sock", proof.new_secret(), STORE)


class TestTheSocketsName:
    def test_a_second_start_of_the_same_agent_is_told_so(self, agent):
        second = Server(agent.server.service, agent.name)
        with pytest.raises(AlreadyServingError, match="already"):
            second.start(agent.supervisor.the_secret, agent.uuid)
        with agent.client() as client:
            assert client.status().state == "idle"

    def test_a_squatter_is_told_apart(self, agent):
        with pytest.raises(NameTakenError, match="another app took the name"):
            Server(agent.server.service, agent.name).start(proof.new_secret(), agent.uuid)
        name = f"bmoe-test-{secrets.token_hex(6)}"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"\0{name}")
            listener.listen()
            with pytest.raises(NameTakenError, match="does not answer"):
                Server(agent.server.service, name).start(proof.new_secret(), agent.uuid)

    @pytest.mark.parametrize("name", ["", "a/b", "x" * 101, "-x", "a b", "a\0b"])
    def test_names_that_could_mean_something_else_are_refused(self, agent, name):
        with pytest.raises(ServeError, match="socket name"):
            Server(agent.server.service, name)

    def test_tcp_only_when_asked_and_its_port_is_in_the_proof(self, tmp_path):
        with served(tmp_path, tcp_port=0) as agent:
            port = agent.server.tcp_port
            target = f"ipv4:127.0.0.1:{port}"
            with calls.connect(target, agent.supervisor.the_secret, STORE, name=f"tcp:{port}") as client:
                assert client.status().state == "idle"
            with pytest.raises(calls.NotTheAgent):
                calls.connect(target, agent.supervisor.the_secret, STORE, name=agent.name)
            with agent.client() as client:
                assert client.status().state == "idle"
