"""The open shell on a phone: starts the loop (script.py), sends requests, waits for their answers with a deadline."""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from bmoe_collector.probe.frames import Frame, FrameParser, FramesError, Greeting
from bmoe_collector.probe.script import request, script
from bmoe_collector.reach.adb import Adb, AdbError

GREET_S = 15.0


class BusyError(Exception):
    """Another host's loop works on this phone."""


class ProbeShell:
    """One loop on one phone, for the length of a `with`. One thread uses it; `close` may be called from any."""

    def __init__(self, adb: Adb, transport_id: int, agent_uuid: str, store_id: str) -> None:
        """Nothing is contacted yet."""
        self._adb = adb
        self._transport_id = transport_id
        self._token = secrets.token_hex(4)
        self._script = script(self._token, agent_uuid, store_id)
        self._parser = FrameParser(self._token)
        self._stack = contextlib.ExitStack()
        self._socket: socket.socket | None = None
        self._number = 0
        self._closed = False
        self.pid = 0
        self.lock_problem = ""

    def __enter__(self) -> Self:
        """Start the loop. Raises `AdbError`, `BusyError`."""
        try:
            self._socket = self._stack.enter_context(self._adb.exec(self._transport_id, self._script))
            self._greet(time.monotonic() + GREET_S)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the loop: its stdin ends."""
        self._stack.close()

    def close(self) -> None:
        """End it now, whoever waits in it."""
        self._closed = True
        here = self._socket
        if here is not None:
            with contextlib.suppress(OSError):
                here.shutdown(socket.SHUT_RDWR)

    def _greet(self, deadline: float) -> None:
        while not self.pid:
            for found in self._receive(deadline, "its first word"):
                if not isinstance(found, Greeting):
                    continue
                if found.state == "busy":
                    raise BusyError(f"another host's probe (process {found.detail}) works on this phone")
                if found.state == "nolock":
                    self.lock_problem = f"{found.detail} cannot be made: two hosts could probe at once"
                else:
                    self.pid = int(found.detail) if found.detail.isdigit() else 0

    def ask(self, requests: Sequence[tuple[str, str]], timeout_s: float) -> list[Frame]:
        """Send several requests at once; their answers in order. Raises `AdbError`, also when the deadline passes."""
        if self._socket is None:
            raise AdbError("the probe's shell is not open")
        first = self._number + 1
        lines = b"".join(request(first + place, verb, words) for place, (verb, words) in enumerate(requests))
        self._number += len(requests)
        answers: list[Frame] = []
        deadline = time.monotonic() + timeout_s
        try:
            self._socket.settimeout(timeout_s)
            self._socket.sendall(lines)
        except OSError as error:
            raise AdbError(f"the probe's shell: {error}") from error
        while len(answers) < len(requests):
            waited = " ".join(requests[len(answers)])
            for found in self._receive(deadline, waited):
                if isinstance(found, Frame) and found.number == first + len(answers):
                    answers.append(found)
        return answers

    def _receive(self, deadline: float, what: str) -> list[Greeting | Frame]:
        left = deadline - time.monotonic()
        if left <= 0:
            raise AdbError(f"the probe's shell did not answer in time: {what[:80]}")
        assert self._socket is not None
        try:
            self._socket.settimeout(left)
            data = self._socket.recv(65536)
            found = self._parser.feed(data)
        except TimeoutError:
            raise AdbError(f"the probe's shell did not answer in time: {what[:80]}") from None
        except (OSError, FramesError) as error:
            raise AdbError(f"the probe's shell: {error}") from error
        if not data and not found:
            said = self._parser.unread
            raise AdbError(f"the probe's shell ended{': ' + said if said and not self._closed else ''}")
        return found
