"""The service on its socket: an abstract unix one, TCP only when asked.

In: an `AgentService` and a name. Out: a running server, or an error that says who holds the name.

An abstract name belongs to whoever binds it first, and any app of the phone can. A program that took ours cannot prove
that it knows the secret, so collectors are not fooled by it; here it is found out and told apart from a second agent.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import grpc
from bmoe_proto import calls

from bmoe_agent.serve.service import MAX_FOLLOWERS, AgentService

SERVER_OPTIONS: list[tuple[str, int]] = [
    ("grpc.so_reuseport", 0),  # two agents would share a TCP port and each get half of the calls
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", calls.MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", calls.MAX_MESSAGE_BYTES),
    # Clients ping every 10 s (bmoe_proto/calls.py); a server drops those that ping more often than it permits.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_ping_strikes", 0),
    # A reader whose link was cut without a word is noticed, so that its stream ends.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
]
NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")


class ServeError(Exception):
    """The service cannot be put on its socket."""


class AlreadyServingError(ServeError):
    """This agent is running already."""


class NameTakenError(ServeError):
    """Another program holds the socket's name."""


class Server:
    """The service, listening from `start` to `stop`."""

    def __init__(self, service: AgentService, name: str, *, tcp_port: int | None = None) -> None:
        """`tcp_port` (0: any free one) listens on loopback too, which every app of the phone can reach."""
        if not NAME.match(name):
            raise ServeError(f"socket name {name!r}: letters, digits, dots, dashes and underscores, at most 100")
        self.name = name
        self.service = service
        self.tcp_port = tcp_port
        self._pool = ThreadPoolExecutor(MAX_FOLLOWERS + 6, thread_name_prefix="serve")
        self._server = grpc.server(
            self._pool, handlers=[service], options=SERVER_OPTIONS, maximum_concurrent_rpcs=4 * MAX_FOLLOWERS
        )

    def start(self, secret: bytes, agent_uuid: bytes) -> None:
        """Listen. Raises AlreadyServingError, NameTakenError, ServeError."""
        try:
            self._server.add_insecure_port(f"unix-abstract:{self.name}")
        except RuntimeError as error:
            self._shut()
            raise self._who_holds_it(secret, agent_uuid, error) from None
        if self.tcp_port is not None:
            try:
                self.tcp_port = self._server.add_insecure_port(f"127.0.0.1:{self.tcp_port}")
            except RuntimeError as error:
                self._shut()
                raise ServeError(f"TCP port {self.tcp_port}: {error}") from None
            self.service.tcp_port = self.tcp_port
        self._server.start()

    def stop(self, grace_s: float = 1.0) -> None:
        """End streams, finish short calls, close the socket."""
        self.service.stop()
        self._server.stop(grace_s).wait()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _shut(self) -> None:
        self._server.stop(None)
        self._pool.shutdown(wait=False)

    def _who_holds_it(self, secret: bytes, agent_uuid: bytes, error: RuntimeError) -> ServeError:
        """Ask whatever listens on the name for the proof that only this agent can give."""
        try:
            with calls.connect(
                f"unix-abstract:{self.name}",
                secret,
                bytes(16),
                expect_uuid=agent_uuid,
                client="bmoe-agent",
                deadline_s=3.0,
            ) as other:
                version = other.hello.agent_version
            return AlreadyServingError(
                f"this agent is serving on @{self.name} already (version {version}): stop it first, or use it as it is"
            )
        except calls.Frozen:
            return NameTakenError(
                f"@{self.name} is held by a program that does not answer: this agent, stopped or frozen, or another "
                "app; end it, or choose another name with `bmoe-agent init --socket NAME`"
            )
        except calls.NotThere:
            return ServeError(f"@{self.name}: {error}")
        except calls.CallError:
            return NameTakenError(
                f"@{self.name} is held by a program that does not know this agent's secret: another app took the name; "
                "find it, or choose another name with `bmoe-agent init --socket NAME` and pair again"
            )
