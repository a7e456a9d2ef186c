"""The agent's service: calls of telemetry.proto, each proven before it is looked at, answered from spool and supervisor.

In: bytes from gRPC. Out: bytes. Requests are handled serialised, because proofs are over bytes (bmoe_proto/proof.py).
server.py puts it on a socket.
"""

from __future__ import annotations

import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from bmoe_proto import proof
from bmoe_proto.calls import BUSY, SERVICE
from bmoe_proto.v1 import telemetry_pb2 as pb
from google.protobuf.message import DecodeError, Message

from bmoe_agent.serve.follow import HEARTBEAT_S, QUIET_S, Follower
from bmoe_agent.serve.port import RefusedError, Supervisor
from bmoe_agent.serve.sessions import Sessions
from bmoe_agent.spool import Spool

MAX_FOLLOWERS = 8
MOMENT_S = 20.0  # a speed probe takes a second or two, on a phone that is held down some more
CHUNK_BYTES = 256 << 10
Context = grpc.ServicerContext


class AgentService(grpc.GenericRpcHandler):
    """What the agent answers."""

    def __init__(
        self,
        spool: Spool,
        supervisor: Supervisor,
        *,
        agent_uuid: bytes,
        agent_version: str,
        name: str,
        heartbeat_s: float = HEARTBEAT_S,
        quiet_s: float = QUIET_S,
    ) -> None:
        """`name` is the abstract socket's, and part of every proof."""
        self._spool = spool
        self._supervisor = supervisor
        self._uuid = agent_uuid
        self._version = agent_version
        self._name = name
        self._heartbeat_s, self._quiet_s = heartbeat_s, quiet_s
        self._sessions = Sessions()
        self._followers: set[Follower] = set()
        self._lock = threading.Lock()
        handlers: dict[str, Any] = {"Hello": grpc.unary_unary_rpc_method_handler(self._hello)}
        unary: list[tuple[str, type[Message], Callable[[Any, proof.Session, Context], Message]]] = [
            ("Status", pb.StatusRequest, self._status),
            ("Submit", pb.SubmitRequest, self._submit),
            ("List", pb.ListRequest, self._list),
            ("Cancel", pb.CancelRequest, self._cancel),
            ("AcknowledgeArtifact", pb.AcknowledgeArtifactRequest, self._acknowledge_artifact),
            ("Clock", pb.ClockRequest, self._clock),
            ("Tell", pb.TellRequest, self._tell),
            ("Rotate", pb.RotateRequest, self._rotate),
        ]
        for method, request_type, answer in unary:
            handlers[method] = grpc.unary_unary_rpc_method_handler(self._proven(method, request_type, answer))
        handlers["FetchArtifact"] = grpc.unary_stream_rpc_method_handler(self._fetch)
        handlers["Follow"] = grpc.stream_stream_rpc_method_handler(self._follow)
        self._handlers = {SERVICE + method: handler for method, handler in handlers.items()}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """As gRPC asks: the handler of a method, or None."""
        return self._handlers.get(handler_call_details.method)

    def stop(self) -> None:
        """End every stream."""
        with self._lock:
            followers = list(self._followers)
        for follower in followers:
            follower.stop()

    # ---------------------------------------------------------------- proofs

    def _hello(self, data: bytes, context: Context) -> bytes:
        asked = self._parse(pb.HelloRequest, data, context)
        if len(asked.client_nonce) != proof.NONCE_BYTES or len(asked.store_id) != 16:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a hello has a nonce of 32 bytes and a store id of 16")
        handshake = proof.Handshake(
            asked.client_nonce, proof.new_nonce(), asked.store_id, self._uuid, self._name_of(context), asked.protocol
        )
        secret = self._supervisor.secret()
        if asked.protocol >= proof.OLDEST_PROTOCOL:
            key = proof.session_key(secret, handshake)
            self._sessions.begin(proof.Session(key, handshake.server_nonce, handshake.store_id))
        return pb.HelloReply(
            protocol=proof.PROTOCOL,
            oldest_protocol=proof.OLDEST_PROTOCOL,
            server_nonce=handshake.server_nonce,
            proof=proof.hello_proof(secret, handshake),
            agent_uuid=self._uuid,
            agent_version=self._version,
            clock=self._supervisor.clock(),
            paired=bool(self._spool.kept_for),
        ).SerializeToString()

    def _name_of(self, context: Context) -> str:
        """The name a call came to: over TCP it is the port, so that a relay between the two kinds is noticed too."""
        tcp = re.match(r"ipv[46]:", context.peer() or "")
        return f"tcp:{self.tcp_port}" if tcp else self._name

    tcp_port = 0
    """Set by server.py when the agent was asked to listen on TCP."""

    def _check(self, method: str, data: bytes, context: Context) -> tuple[proof.Session, str]:
        """The call's session, and the proof of the answer's beginning for a stream; aborts when it is not proven."""
        try:
            session, counter = self._sessions.check(SERVICE + method, _proof_of(context), data)
        except proof.ProofError as error:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
        return session, proof.answer_proof(session.key, SERVICE + method, counter, b"")

    def _proven(
        self, method: str, request_type: type[Message], answer: Callable[[Any, proof.Session, Context], Message]
    ) -> Callable[[bytes, Context], bytes]:
        def call(data: bytes, context: Context) -> bytes:
            session, _ = self._check(method, data, context)
            request = self._parse(request_type, data, context)
            try:
                reply = answer(request, session, context).SerializeToString()
            except RefusedError as error:
                context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
            counter = proof.parse_call_proof(_proof_of(context))[1]
            told = proof.answer_proof(session.key, SERVICE + method, counter, reply)
            context.set_trailing_metadata(((proof.ANSWER_KEY, told),))
            return reply

        return call

    @staticmethod
    def _parse(kind: type[Any], data: bytes, context: Context) -> Any:
        try:
            return kind.FromString(data)
        except DecodeError:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"not a {kind.DESCRIPTOR.name}")

    # ---------------------------------------------------------------- unary calls

    def _status(self, _asked: pb.StatusRequest, _session: proof.Session, _context: Context) -> pb.StatusReply:
        reply = self._supervisor.status()
        reply.backlog_bytes = self._spool.backlog_bytes()
        reply.free_bytes = self._spool.room.free_bytes()
        reply.spool_bytes = self._spool.used_bytes
        reply.quota_bytes = self._spool.room.quota_bytes
        reply.kept_for_store = self._spool.kept_for
        return reply

    def _submit(self, asked: pb.SubmitRequest, _session: proof.Session, _context: Context) -> pb.SubmitReply:
        return self._supervisor.submit(asked.plan)

    def _list(self, _asked: pb.ListRequest, _session: proof.Session, _context: Context) -> pb.ListReply:
        runs = [
            run.listing(acknowledged=run.deleted or self._spool.acknowledged(run.run_id))
            for run in self._spool.summaries()
        ]
        return pb.ListReply(plans=self._supervisor.listing(), runs=runs)

    def _cancel(self, asked: pb.CancelRequest, _session: proof.Session, _context: Context) -> pb.CancelReply:
        return self._supervisor.cancel(asked.plan_id, only_current_cell=asked.only_current_cell)

    def _clock(self, _asked: pb.ClockRequest, _session: proof.Session, _context: Context) -> pb.ClockReply:
        return pb.ClockReply(clock=self._supervisor.clock())

    def _tell(self, asked: pb.TellRequest, _session: proof.Session, _context: Context) -> pb.TellReply:
        return pb.TellReply(kept=self._supervisor.tell(asked.run_id, asked.note))

    def _acknowledge_artifact(
        self, asked: pb.AcknowledgeArtifactRequest, session: proof.Session, _context: Context
    ) -> pb.AcknowledgeArtifactReply:
        if not self._spool.kept_for or session.store_id != self._spool.kept_for:
            return pb.AcknowledgeArtifactReply(accepted=False, why="records here are kept for another store")
        why = self._spool.acknowledge_artifact(session.store_id, asked.run_id, asked.name, asked.sha256)
        if not why and self._supervisor.measuring() is None:
            self._spool.save_acknowledgements()
            self._spool.delete_acknowledged()
        return pb.AcknowledgeArtifactReply(accepted=not why, why=why)

    def _rotate(self, asked: pb.RotateRequest, session: proof.Session, context: Context) -> pb.RotateReply:
        new_secret = None
        if asked.sealed_secret:
            try:
                new_secret = proof.unseal(self._supervisor.secret(), session.server_nonce, asked.sealed_secret)
            except proof.ProofError as error:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if asked.keep_for_store and len(asked.keep_for_store) != 16:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a store id is 16 bytes")
        self._supervisor.rotate(new_secret, asked.keep_for_store or None, forget=asked.forget)
        if new_secret is not None or asked.forget:
            self._sessions.forget_all()
            self.stop()
        return pb.RotateReply(done=True)

    # ---------------------------------------------------------------- streams

    def _follow(self, requests: Iterator[bytes], context: Context) -> Iterator[bytes]:
        # A stream of nobody we know is not given a thread to wait in for its first message.
        data = next(requests, b"") if self._sessions.known(_proof_of(context)) else b""
        session, told = self._check("Follow", data, context)
        first = self._parse(pb.FollowRequest, data, context)
        if first.WhichOneof("say") != "open":
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a stream begins with `open`")
        follower = Follower(
            self._spool,
            self._supervisor,
            first.open,
            session.store_id,
            heartbeat_s=self._heartbeat_s,
            quiet_s=self._quiet_s,
        )
        with self._lock:
            full = len(self._followers) >= MAX_FOLLOWERS
            if not full:
                self._followers.add(follower)
        if full:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_FOLLOWERS} readers follow this agent already")
        session.everything = session.everything or first.open.everything
        context.send_initial_metadata(((proof.ANSWER_KEY, told),))
        # Said even when the call is over already, unlike a callback added too late.
        if not context.add_callback(follower.stop):
            follower.stop()
        reader = threading.Thread(
            target=follower.take_acknowledgements, args=(requests,), name="acknowledgements", daemon=True
        )
        reader.start()
        try:
            yield from follower.replies()
        finally:
            with self._lock:
                self._followers.discard(follower)

    def _fetch(self, data: bytes, context: Context) -> Iterator[bytes]:
        session, told = self._check("FetchArtifact", data, context)
        asked = self._parse(pb.FetchRequest, data, context)
        # Only files that the run's own end names: a name is never put into a path unseen.
        facts = next((item for item in self._spool.artifacts(asked.run_id) if item.name == asked.name), None)
        if facts is None:
            context.abort(
                grpc.StatusCode.NOT_FOUND, f"no file {asked.name[:80]!r} of run {asked.run_id.hex()[:32]} here"
            )
        self._refuse_while_measured(session, context)
        path = os.path.join(self._spool.files_directory(asked.run_id), facts.name)
        context.send_initial_metadata(((proof.ANSWER_KEY, told),))
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            context.abort(grpc.StatusCode.NOT_FOUND, f"{facts.name}: {error.strerror}")
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                context.abort(grpc.StatusCode.NOT_FOUND, f"{facts.name}: not a file")
            if status.st_size < facts.size:
                why = f"{status.st_size} bytes are left of the {facts.size} it had when its run ended"
                context.abort(grpc.StatusCode.NOT_FOUND, f"{facts.name}: {why}")
            # What was added since is no part of the record.
            offset, size = asked.offset, facts.size
            if offset >= size:  # beyond any offset the system takes, too
                yield pb.FetchChunk(offset=offset, size=size).SerializeToString()
                return
            while True:
                try:
                    chunk = os.pread(descriptor, min(CHUNK_BYTES, size - offset), offset)
                except OSError as error:  # flash that cannot be read any more
                    context.abort(grpc.StatusCode.NOT_FOUND, f"{facts.name}: byte {offset}: {error.strerror}")
                if not chunk and offset > asked.offset:
                    return
                yield pb.FetchChunk(offset=offset, data=chunk, size=size).SerializeToString()
                offset += len(chunk)
                if not chunk or offset >= size:
                    return
                self._refuse_while_measured(session, context)
        finally:
            os.close(descriptor)

    def _refuse_while_measured(self, session: proof.Session, context: Context) -> None:
        """Law 7: files wait for the gap between cells; the reader goes on at its offset. A moment is waited for here."""
        deadline = time.monotonic() + MOMENT_S
        while (measuring := self._supervisor.measuring()) is not None:
            if measuring.send_during_cells or session.everything:
                return
            if measuring.run_id or time.monotonic() > deadline:
                context.abort(grpc.StatusCode.UNAVAILABLE, f"{BUSY}a cell is being measured: files wait until it ends")
            time.sleep(0.05)


def _proof_of(context: Context) -> str:
    """The proof a call carries, empty without one."""
    return next((str(value) for key, value in context.invocation_metadata() or () if key == proof.PROOF_KEY), "")
