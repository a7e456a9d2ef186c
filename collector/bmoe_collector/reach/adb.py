"""What the adb server is asked, by transport id.

In: nothing but the server that ANDROID_ADB_SERVER_PORT (or the default) names; adbutils speaks its protocol and starts it when it is
not there. Out: `Transport` lists, shell output, forwards, and a thread that says when something changed.

adbutils' own helpers are not used where they leak a socket on refusal, list everyone's forwards as one device's, or
look a phone up by a serial that two phones may share: a transport id names one connection.
"""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bmoe_collector.common import OutsideError

if TYPE_CHECKING:
    from adbutils import AdbConnection

CALL_S = 10.0
ADDRESS = re.compile(r"^(\[[0-9a-fA-F:.%]+\]|[A-Za-z0-9._-]+):\d{1,5}$")
_ID = re.compile(r"\btransport_id:(\d+)")


class AdbError(OutsideError):
    """The adb server refused, broke or is not there; the message is its own."""


@dataclass(frozen=True, slots=True)
class Transport:
    """One line of `adb devices -l`: a connection, not a phone."""

    transport_id: int
    serial: str
    state: str  # "device", "offline", "unauthorized", "authorizing", "no", ...
    tags: dict[str, str] = field(default_factory=dict, compare=False)

    @property
    def is_address(self) -> bool:
        """Whether it was made by `adb connect`."""
        return ADDRESS.match(self.serial) is not None


@dataclass(frozen=True, slots=True)
class Forward:
    """One line of `adb forward --list`."""

    serial: str
    local: str
    remote: str


class Adb:
    """The adb server. Every call is one short connection with a deadline; safe from several threads."""

    def __init__(self) -> None:
        """Nothing is contacted before the first call."""
        from adbutils import AdbClient

        self._client = AdbClient()

    @property
    def port(self) -> int:
        """Where the server listens."""
        return int(self._client.port)

    def transports(self) -> list[Transport]:
        """Every connection the server has, whatever its state."""
        with self._asked("host:devices-l") as connection:
            text = connection.read_string_block()
        found = []
        for line in text.splitlines():
            words = line.split()
            number = _ID.search(line)
            if len(words) >= 2 and number:
                tags = dict(word.split(":", 1) for word in words[2:] if ":" in word)
                found.append(Transport(int(number[1]), words[0], words[1], tags))
        return found

    def shell(self, transport_id: int, command: str, timeout_s: float = CALL_S) -> bytes:
        """What a shell command on the phone printed."""
        with self._asked(f"host:transport-id:{transport_id}", timeout_s) as connection:
            connection.send_command(f"shell:{command}")
            connection.check_okay()
            chunks = []
            while chunk := connection.recv(65536):
                chunks.append(chunk)
        return b"".join(chunks)

    @contextlib.contextmanager
    def exec(self, transport_id: int, command: str) -> Iterator[socket.socket]:
        """A command on the phone with its stdin and stdout joined to a socket, for as long as the `with` lasts.

        Whatever goes wrong inside is an `AdbError`. The socket has the deadline of a call; set another as needed.
        """
        with self._asked(f"host:transport-id:{transport_id}") as connection:
            connection.send_command(f"exec:{command}")
            connection.check_okay()
            yield connection.conn

    def forward(self, transport_id: int, local: str, remote: str) -> None:
        """Make a forward. `local` must be ours alone: an existing one would be taken over without a word."""
        with self._asked(f"host-transport-id:{transport_id}:forward:{local};{remote}") as connection:
            connection.check_okay()  # the first answer says the request was understood, this one that it is done

    def forwards(self) -> list[Forward]:
        """Everybody's forwards."""
        with self._asked("host:list-forward") as connection:
            text = connection.read_string_block()
        return [Forward(*words) for line in text.splitlines() if len(words := line.split()) == 3]

    def remove_forward(self, local: str) -> bool:
        """Remove one forward by its local end, which is ours alone; False when it was gone already.

        The server ignores which device is named here, but wants one that is there when there are several.
        """
        try:
            transports = sorted(self.transports(), key=lambda transport: transport.state != "device")
        except AdbError:
            return False
        for transport in transports:
            try:
                with self._asked(f"host-transport-id:{transport.transport_id}:killforward:{local}") as connection:
                    connection.check_okay()
                return True
            except AdbError:
                continue  # offline, or it was gone already
        return False

    def connect(self, address: str, timeout_s: float = CALL_S) -> str:
        """Ask the server to connect to a phone without a cable; its answer, or `AdbError`."""
        with self._asked(f"host:connect:{address}", timeout_s) as connection:
            answer = str(connection.read_string_block())
        if not answer.startswith(("connected to", "already connected")):
            raise AdbError(f"adb connect {address}: {answer.strip()}")
        return answer

    def disconnect(self, address: str) -> None:
        """Drop a connection made by `connect`."""
        with contextlib.suppress(AdbError), self._asked(f"host:disconnect:{address}") as connection:
            connection.read_string_block()

    def track(self, changed: Callable[[], None], stop: threading.Event) -> None:
        """Call `changed` whenever the server's list of devices changes, and when the server itself comes or goes.

        Runs until `stop` is set. The content of the events is not used: adbutils reports every change as absent then
        new, so whoever is told looks at `transports()`.
        """
        pause_s = 0.2
        while not stop.is_set():
            try:
                with self._asked("host:track-devices", None) as connection:
                    connection.conn.settimeout(1.0)
                    while not stop.is_set():
                        if self._device_event(connection, stop):
                            pause_s = 0.2
                            changed()
            except AdbError:
                changed()
            stop.wait(pause_s)
            pause_s = min(pause_s * 2, 5.0)

    @staticmethod
    def _device_event(connection: AdbConnection, stop: threading.Event) -> bool:
        """Read one length-prefixed message, waiting for it in steps so that `stop` is seen."""
        wanted, got, header = 4, b"", True
        while len(got) < wanted:
            try:
                chunk = connection.conn.recv(wanted - len(got))
            except TimeoutError:
                if stop.is_set():
                    return False
                continue
            if not chunk:
                raise AdbError("the adb server ended the connection")
            got += chunk
            if header and len(got) == 4:
                wanted, got, header = int(got, 16), b"", False
        return True

    def _start_server(self) -> None:
        """Start the server when nothing listens. adbutils would too, but leaks the refused socket and prints."""
        with socket.socket() as probe:
            probe.settimeout(3.0)
            if probe.connect_ex((self._client.host, self._client.port)) == 0:
                return
        from adbutils import adb_path

        command = [adb_path(), "start-server"]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=20.0, check=False)
        if done.returncode:
            said = (done.stderr or done.stdout).decode("utf-8", "replace").strip()
            raise AdbError(f"{command[0]} start-server: exit {done.returncode}: {said}")

    @contextlib.contextmanager
    def _asked(self, command: str, timeout_s: float | None = CALL_S) -> Iterator[AdbConnection]:
        """Send one command, closing the connection whatever happens."""
        import adbutils

        connection: AdbConnection | None = None
        try:
            self._start_server()
            connection = self._client.make_connection(timeout=timeout_s)
            connection.send_command(command)
            connection.check_okay()
            yield connection
        except AdbError:
            raise
        except (adbutils.AdbError, OSError, EOFError, ValueError) as error:
            raise AdbError(f"adb ({command.split(':', 1)[-1]}): {error or type(error).__name__}") from error
        except Exception as error:
            # adbutils lets subprocess' own errors through when it cannot start the server
            raise AdbError(f"adb: {error}") from error
        finally:
            if connection is not None and not connection.closed:
                connection.conn.close()
