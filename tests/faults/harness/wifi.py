"""A link between adb and a phone's adbd that delays, stalls, half-opens and cuts: a Wi-Fi in userspace.

In: where adbd listens. Out: a port of this machine that leads there. One thread moves the bytes; what goes wrong is set
from outside: `delay_s` for every piece, `stalled` (nothing moves, nothing is closed), `deaf` (what the phone says is not
delivered, what it is told is), `refusing` (no new connection), and `cut` (every connection is reset).
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass, field

PIECE = 64 << 10
MOST_WAITING = 4 << 20


@dataclass(slots=True, eq=False)
class _End:
    """One socket of a pair, and what waits to be written to it."""

    socket: socket.socket
    from_phone: bool
    other: _End | None = None
    waiting: deque[tuple[float, bytes]] = field(default_factory=deque)
    held: int = 0
    finished: bool = False


class Wifi:
    """The proxy; `port` is where adb connects."""

    def __init__(self, address: tuple[str, int], port: int) -> None:
        self.delay_s = 0.0
        self.stalled = False
        self.deaf = False
        self.refusing = False
        self.port = port
        self._address = address
        self._cut = threading.Event()
        self._closed = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", port))
        self._listener.setblocking(False)
        self._ends: list[_End] = []
        self._thread = threading.Thread(target=self._run, name="wifi", daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """Reset every connection."""
        self._cut.set()

    def heal(self) -> None:
        """A link without fault."""
        self.delay_s, self.stalled, self.deaf, self.refusing = 0.0, False, False, False

    def close(self) -> None:
        """End the thread and everything it holds."""
        self._closed.set()
        self._thread.join(10)

    def _run(self) -> None:
        with contextlib.closing(self._listener):
            while not self._closed.is_set():
                if self._cut.is_set():
                    self._cut.clear()
                    self._drop_all()
                self._accept()
                if not self.stalled:
                    self._move()
                else:
                    time.sleep(0.02)
            self._drop_all()

    def _accept(self) -> None:
        try:
            near, _ = self._listener.accept()
        except OSError:
            return
        if self.refusing:
            near.close()
            return
        try:
            far = socket.create_connection(self._address, timeout=1.0)
        except OSError:
            near.close()
            return
        one, other = _End(near, from_phone=False), _End(far, from_phone=True)
        one.other, other.other = other, one
        for end in (one, other):
            end.socket.setblocking(False)
            end.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._ends.append(end)

    def _move(self) -> None:
        now = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            for end in self._ends:
                events = 0
                other = end.other
                assert other is not None
                if not end.finished and other.held < MOST_WAITING and not (self.deaf and end.from_phone):
                    events |= selectors.EVENT_READ
                if end.waiting and end.waiting[0][0] <= now:
                    events |= selectors.EVENT_WRITE
                if events:
                    selector.register(end.socket, events, end)
            ready = selector.select(0.01 if any(end.waiting for end in self._ends) else 0.05)
        for key, events in ready:
            if key.data is not None and key.data in self._ends:
                self._serve(key.data, events)

    def _serve(self, end: _End, events: int) -> None:
        other = end.other
        assert other is not None
        try:
            if events & selectors.EVENT_READ:
                data = end.socket.recv(PIECE)
                if not data:
                    self._drop(end)
                    return
                other.waiting.append((time.monotonic() + self.delay_s, data))
                other.held += len(data)
            if events & selectors.EVENT_WRITE and end.waiting:
                due, data = end.waiting.popleft()
                sent = end.socket.send(data)
                end.held -= sent
                if sent < len(data):
                    end.waiting.appendleft((due, data[sent:]))
        except BlockingIOError:
            pass
        except OSError:
            self._drop(end)

    def _drop(self, end: _End) -> None:
        for each in (end, end.other):
            if each is not None and each in self._ends:
                self._ends.remove(each)
                each.socket.close()

    def _drop_all(self) -> None:
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            end.socket.close()
        self._ends.clear()
