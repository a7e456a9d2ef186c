"""The client's side of the agent's service: connected, proven, with deadlines.

In: a gRPC target, the secret, the store's id and the name of the agent's socket. Out: `AgentClient`, whose methods take
and give the messages of telemetry.proto. Used by the collector, and by the agent to ask another agent on its name.

    CallError
      NotThere        nothing listens there, or the connection went away
        Frozen        connected, or accepted by adb, and no answer within the deadline
      WrongSecret     whatever answers does not know the secret we have
      NotTheAgent     another agent than expected, or this one reached through another name than its own
      TooOld          the agent is too old for this client
      TooNew          the agent is too new for this client
      Refused         it answered, and the answer is no
        Busy          not now: a cell is being measured (law 7)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any, Final, Self, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

import bmoe_proto
from bmoe_proto import proof
from bmoe_proto.v1 import telemetry_pb2 as pb

SERVICE: Final = "/bmoe.telemetry.v1.Agent/"
MAX_MESSAGE_BYTES: Final = 64 << 20
DEADLINE_S: Final = 10.0
CLIENT_OPTIONS: Final[list[tuple[str, int]]] = [
    ("grpc.enable_http_proxy", 0),  # a proxy in the environment would capture even unix targets
    ("grpc.use_local_subchannel_pool", 1),  # no sharing of a connection with whoever else dialled the same path
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A frozen phone accepts and never answers: notice in 12 s, and ping no more often than the agent permits.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.ping_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 20_000),  # also the time to connect: calls have their own deadlines
    ("grpc.max_reconnect_backoff_ms", 2_000),
]
UNKNOWN_SESSION: Final = "unknown session"
"""How the agent's refusal begins when it has forgotten the session, as after a restart: say hello again."""
BUSY: Final = "busy: "
M = TypeVar("M", bound=Message)


class CallError(Exception):
    """Base of everything a call raises."""


class NotThere(CallError):  # noqa: N818 - these names are states people see
    """Nothing listens there, or the connection went away."""


class Frozen(NotThere):
    """No answer within the deadline."""


class WrongSecret(CallError):  # noqa: N818
    """Whatever answers does not know the secret."""


class NotTheAgent(CallError):  # noqa: N818
    """Not the agent that was meant."""


class TooOld(CallError):  # noqa: N818
    """The agent is too old."""


class TooNew(CallError):  # noqa: N818
    """The agent is too new."""


class Refused(CallError):  # noqa: N818
    """It answered, and the answer is no; `code` is gRPC's."""

    def __init__(self, message: str, code: grpc.StatusCode = grpc.StatusCode.UNKNOWN) -> None:
        super().__init__(message)
        self.code = code


class Busy(Refused):
    """Not while a cell is measured."""


def connect(
    target: str,
    secret: bytes,
    store_id: bytes,
    *,
    expect_uuid: bytes | None = None,
    name: str | None = None,
    client: str = "bmoe",
    deadline_s: float = DEADLINE_S,
) -> AgentClient:
    """Connect, say hello, check the agent's proof. Raises the tree above.

    `name` is the abstract socket's name that was asked for ("tcp:<port>" for an agent's own TCP port); it may be left
    out for a `unix-abstract:` target.
    """
    if name is None:
        scheme, _, rest = target.partition(":")
        if scheme != "unix-abstract":
            raise ValueError(f"{target}: the name of the agent's socket is needed to check its proof")
        name = rest
    made = AgentClient(target, secret, store_id, name, expect_uuid=expect_uuid, client=client, deadline_s=deadline_s)
    try:
        made.say_hello()
    except BaseException:
        made.close()
        raise
    return made


class AgentClient:
    """One proven channel to one agent. Safe to use from several threads; close it when done."""

    hello: pb.HelloReply
    """The agent's answer to the newest hello."""

    def __init__(
        self,
        target: str,
        secret: bytes,
        store_id: bytes,
        name: str,
        *,
        expect_uuid: bytes | None,
        client: str,
        deadline_s: float,
    ) -> None:
        """Use `connect`."""
        self.target = target
        self.name = name
        self.store_id = store_id
        self.deadline_s = deadline_s
        self._secret = secret
        self._expect_uuid = expect_uuid
        self._client = f"{client} {getattr(bmoe_proto, '__version__', '')}".strip()
        self._lock = threading.Lock()
        self._key = b""
        self._nonce = b""
        self._counter = 0
        # Serialised here, because proofs are over bytes; the type stubs of gRPC know only of messages.
        self._channel: Any = grpc.insecure_channel(target, options=CLIENT_OPTIONS)

    def __enter__(self) -> Self:
        """Close at the end of a `with`."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop the channel; calls that are under way end with NotThere."""
        self._channel.close()

    # ---------------------------------------------------------------- calls

    def say_hello(self) -> pb.HelloReply:
        """A new session: mutual proof, versions, clocks."""
        asked = pb.HelloRequest(
            protocol=proof.PROTOCOL,
            client_nonce=proof.new_nonce(),
            client=self._client,
            store_id=self.store_id,
            client_wall_ns=time.time_ns(),
        )
        try:
            data, _ = self._channel.unary_unary(f"{SERVICE}Hello").with_call(
                asked.SerializeToString(), timeout=self.deadline_s
            )
        except (grpc.RpcError, ValueError) as error:
            raise self._told(error) from None
        reply = self._parsed(pb.HelloReply, data)
        if self._expect_uuid is not None and reply.agent_uuid != self._expect_uuid:
            raise NotTheAgent(
                f"{self.name}: agent {reply.agent_uuid.hex()} answers where {self._expect_uuid.hex()} was expected"
            )
        handshake = proof.Handshake(
            asked.client_nonce, reply.server_nonce, self.store_id, reply.agent_uuid, self.name, asked.protocol
        )
        wrong = proof.check_hello(self._secret, handshake, reply.proof)
        # Versions first only when the proof holds: else anybody could send people upgrading.
        if wrong == "secret":
            raise WrongSecret(
                f"{self.name}: what answers does not know the secret: it was changed on the phone (pair again), or "
                "another program took the agent's name"
            )
        if wrong == "name":
            raise NotTheAgent(f"{self.name}: the agent answers through another name than its own: a program relays it")
        if reply.protocol < proof.OLDEST_PROTOCOL:
            raise TooOld(
                f"{self.name}: agent {reply.agent_version} speaks protocol {reply.protocol}: upgrade the agent"
            )
        if reply.oldest_protocol > proof.PROTOCOL:
            raise TooNew(
                f"{self.name}: agent {reply.agent_version} speaks protocol {reply.oldest_protocol} and later: "
                "upgrade bmoe-fleet on this host"
            )
        with self._lock:
            self._key = proof.session_key(self._secret, handshake)
            self._nonce = reply.server_nonce
            self._counter = 0
            self.hello = reply
        return reply

    def status(self) -> pb.StatusReply:
        """What the agent is doing."""
        return self._unary("Status", pb.StatusRequest(), pb.StatusReply)

    def submit(self, plan: pb.Plan) -> pb.SubmitReply:
        """Hand over a plan; reasons in `refused` mean that it was not taken."""
        return self._unary("Submit", pb.SubmitRequest(plan=plan), pb.SubmitReply)

    def listing(self) -> pb.ListReply:
        """Plans and runs on the phone."""
        return self._unary("List", pb.ListRequest(), pb.ListReply)

    def cancel(self, plan_id: str = "", *, only_current_cell: bool = False) -> pb.CancelReply:
        """Cancel a plan, or what runs now."""
        asked = pb.CancelRequest(plan_id=plan_id, only_current_cell=only_current_cell)
        return self._unary("Cancel", asked, pb.CancelReply)

    def clock(self) -> pb.ClockReply:
        """The phone's clocks."""
        return self._unary("Clock", pb.ClockRequest(client_wall_ns=time.time_ns()), pb.ClockReply)

    def tell(self, run_id: bytes, note: pb.Note) -> bool:
        """Leave evidence with an open run; False when it is not open any more."""
        return self._unary("Tell", pb.TellRequest(run_id=run_id, note=note), pb.TellReply).kept

    def acknowledge_artifact(self, run_id: bytes, name: str, sha256: bytes) -> pb.AcknowledgeArtifactReply:
        """Say that a file is stored."""
        asked = pb.AcknowledgeArtifactRequest(run_id=run_id, name=name, sha256=sha256)
        return self._unary("AcknowledgeArtifact", asked, pb.AcknowledgeArtifactReply)

    def rotate(
        self, new_secret: bytes | None = None, *, keep_for_store: bytes | None = None, forget: bool = False
    ) -> bool:
        """Change the secret and/or the store that records are kept for. The next call uses the new secret."""
        asked = pb.RotateRequest(keep_for_store=keep_for_store or b"", forget=forget)
        with self._lock:
            if new_secret is not None:
                asked.sealed_secret = proof.seal(self._secret, self._nonce, new_secret)
        # A session forgotten in between would make the seal wrong, so this is not tried again.
        done = self._unary("Rotate", asked, pb.RotateReply, again=False).done
        if done:
            with self._lock:
                self._secret = new_secret if new_secret is not None else self._secret
                self._nonce = b""
        return done

    def follow(self, requests: Iterable[pb.FollowRequest]) -> FollowCall:
        """Open the stream; the first request is taken here and must be `open`, later ones as they come.

        Iterate over what is returned: replies, or the tree above. `cancel()` ends it from another thread. gRPC takes
        the requests in a thread that waits in them: they have to end when the stream does.
        """
        asked = iter(requests)
        first = next(asked)
        self._renew()
        data = first.SerializeToString()
        metadata, counter = self._prove("Follow", data)

        def sent() -> Iterator[bytes]:
            yield data
            for request in asked:
                yield request.SerializeToString()

        try:
            call = self._channel.stream_stream(f"{SERVICE}Follow")(sent(), metadata=metadata)
        except ValueError as error:
            raise self._told(error) from None
        return FollowCall(self, call, self._key, counter)

    def fetch(self, run_id: bytes, name: str, offset: int = 0, *, deadline_s: float = 600.0) -> Iterator[pb.FetchChunk]:
        """A file of an ended run from `offset`, in chunks. Raises Busy while a cell is measured: go on later."""
        self._renew()
        data = pb.FetchRequest(run_id=run_id, name=name, offset=offset).SerializeToString()
        metadata, counter = self._prove("FetchArtifact", data)
        key = self._key
        try:
            call = self._channel.unary_stream(f"{SERVICE}FetchArtifact")(data, metadata=metadata, timeout=deadline_s)
            first = True
            for chunk in call:
                if first:
                    self._check_answer(call.initial_metadata(), key, "FetchArtifact", counter, b"")
                    first = False
                yield self._parsed(pb.FetchChunk, chunk)
        except (grpc.RpcError, ValueError) as error:
            raise self._told(error) from None

    # ---------------------------------------------------------------- inside

    def _renew(self) -> None:
        """Hello again when the session is known to be gone."""
        if not self._nonce:
            self.say_hello()

    def _prove(self, method: str, data: bytes) -> tuple[list[tuple[str, str]], int]:
        with self._lock:
            counter, self._counter = self._counter, self._counter + 1
            value = proof.call_proof(self._key, self._nonce, SERVICE + method, counter, data)
        return [(proof.PROOF_KEY, value)], counter

    def _unary(self, method: str, asked: Message, reply_type: type[M], *, again: bool = True) -> M:
        self._renew()
        data = asked.SerializeToString()
        metadata, counter = self._prove(method, data)
        key = self._key
        try:
            reply, call = self._channel.unary_unary(SERVICE + method).with_call(
                data, metadata=metadata, timeout=self.deadline_s
            )
        except (grpc.RpcError, ValueError) as error:
            told = self._told(error)
            if again and isinstance(told, Refused) and str(told).endswith(UNKNOWN_SESSION):
                self.say_hello()
                return self._unary(method, asked, reply_type, again=False)
            raise told from None
        self._check_answer(call.trailing_metadata(), key, method, counter, reply)
        return self._parsed(reply_type, reply)

    def _check_answer(self, metadata: Any, key: bytes, method: str, counter: int, reply: bytes) -> None:
        given = next((value for name, value in metadata or () if name == proof.ANSWER_KEY), "")
        if not proof.same(proof.answer_proof(key, SERVICE + method, counter, reply), str(given)):
            raise NotTheAgent(f"{self.name}: the answer to {method} is not proven: another program took the name")

    def _parsed(self, kind: type[M], data: bytes) -> M:
        try:
            return kind.FromString(data)
        except DecodeError as error:
            raise Refused(f"{self.name}: the answer is not a {kind.DESCRIPTOR.name}: {error}") from None

    def _told(self, error: Exception) -> CallError:
        """GRPC's error as one of ours."""
        if isinstance(error, ValueError):  # what gRPC raises on a closed channel
            return NotThere(f"{self.name}: the channel is closed")
        code: grpc.StatusCode = error.code()  # type: ignore[attr-defined]
        details = str(error.details() or "")  # type: ignore[attr-defined]
        if details.startswith(BUSY):
            return Busy(f"{self.name}: {details.removeprefix(BUSY)}", code)
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return Frozen(
                f"{self.name}: no answer within {self.deadline_s:g} s: the agent is frozen or the link stands"
            )
        if code is grpc.StatusCode.UNAVAILABLE:
            if "before receiving SETTINGS" in details or "keepalive" in details or "ping timeout" in details:
                return Frozen(f"{self.name}: connected, and no answer: the agent is frozen or the link stands")
            why = details.rsplit(":", 1)[-1].strip()  # gRPC begins with what it tried, and how
            return NotThere(f"{self.name}: nothing answers there" + (f" ({why})" if why else ""))
        if code is grpc.StatusCode.CANCELLED:
            return NotThere(f"{self.name}: the call was cancelled")
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return TooOld(f"{self.name}: the agent does not know this call: upgrade the agent")
        if code is grpc.StatusCode.UNAUTHENTICATED and details == UNKNOWN_SESSION:
            with self._lock:
                self._nonce = b""
        return Refused(f"{self.name}: {details}", code)


class FollowCall:
    """The replies of one `follow`, in order."""

    def __init__(self, client: AgentClient, call: Any, key: bytes, counter: int) -> None:
        """Use `AgentClient.follow`."""
        self._client = client
        self._call = call
        self._key = key
        self._counter = counter
        self._proven = False

    def __iter__(self) -> Iterator[pb.FollowReply]:
        """Itself."""
        return self

    def __next__(self) -> pb.FollowReply:
        """The next reply; nothing is believed before the agent's proof of the stream."""
        client = self._client
        try:
            if not self._proven:
                metadata = self._call.initial_metadata()
                if any(name == proof.ANSWER_KEY for name, _ in metadata or ()):
                    client._check_answer(metadata, self._key, "Follow", self._counter, b"")  # noqa: SLF001 - one room
                    self._proven = True
            data = next(self._call)
        except StopIteration:
            raise
        except (grpc.RpcError, ValueError) as error:
            raise client._told(error) from None  # noqa: SLF001
        if not self._proven:
            self._call.cancel()
            raise NotTheAgent(f"{client.name}: the stream is not proven: another program took the name")
        return client._parsed(pb.FollowReply, data)  # noqa: SLF001

    def cancel(self) -> None:
        """End the stream from any thread."""
        self._call.cancel()
