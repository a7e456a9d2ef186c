"""A link between adb and a phone's adbd that delays, stalls, half-opens and cuts: a Wi-Fi in userspace.

In: where adbd listens. Out: a port of this machine that leads there. One thread moves the bytes; what goes wrong is set
from outside: `delay_s` for every piece, `lost` (how likely a piece is to wait for its repetition, and what follows it with it),
`stalled` (nothing moves, nothing is closed), `deaf` (what the phone says is not delivered, what it is told is), `mute` (the other
way round), `refusing` (no new connection), `forget` (the phone's ends are reset, the host's stay open and silent) and `cut`
(every connection is reset).
"""

from __future__ import annotations

import contextlib
import random
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


class Wifi:
    """The proxy; `port` is where adb connects."""

    def __init__(self, address: tuple[str, int], port: int) -> None:
        self.delay_s = 0.0
        self.lost = 0.0
        self.stalled = False
        self.deaf = False
        self.mute = False
        self.refusing = False
        self.port = port
        self._address = address
        self._cut = threading.Event()
        self._forget = threading.Event()
        self._draw = random.Random(port)
        self._closed = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", port))
        self._listener.setblocking(False)
        self._ends: list[_End] = []
        self._thread = threading.Thread(target=self._run, name="wifi", daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """Reset every connection."""
        self._cut.set()

    def forget(self) -> None:
        """The phone loses its connections; the host's ends are not told."""
        self._forget.set()

    def heal(self) -> None:
        """A link without fault."""
        self.delay_s, self.lost = 0.0, 0.0
        self.stalled, self.deaf, self.mute, self.refusing = False, False, False, False

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
                if self._forget.is_set():
                    self._forget.clear()
                    self._drop_phone()
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
                if other is not None and not self._silent(end) and other.held < MOST_WAITING:
                    events |= selectors.EVENT_READ
                if end.waiting and end.waiting[0][0] <= now:
                    events |= selectors.EVENT_WRITE
                if events:
                    selector.register(end.socket, events, end)
            ready = selector.select(0.01 if any(end.waiting for end in self._ends) else 0.05)
        for key, events in ready:
            if key.data is not None and key.data in self._ends:
                self._serve(key.data, events)

    def _silent(self, end: _End) -> bool:
        """Whether what this end says is left where it is."""
        return self.deaf if end.from_phone else self.mute

    def _wait_s(self) -> float:
        """How long a piece takes: a lost one is sent again after 0.2 s, then after twice as long each time."""
        wait_s, again_s = self.delay_s, 0.2
        while self._draw.random() < self.lost and again_s < 2:
            wait_s, again_s = wait_s + again_s, again_s * 2
        return wait_s

    def _serve(self, end: _End, events: int) -> None:
        other = end.other
        try:
            if events & selectors.EVENT_READ and other is not None:
                data = end.socket.recv(PIECE)
                if not data:
                    self._drop(end)
                    return
                other.waiting.append((time.monotonic() + self._wait_s(), data))
                other.held += len(data)
            if events & selectors.EVENT_WRITE and end.waiting:
                due, data = end.waiting[0]
                sent = end.socket.send(data)
                end.held -= sent
                end.waiting.popleft()
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

    def _drop_phone(self) -> None:
        """Close the phone's ends with a reset and keep the host's open, joined to nothing."""
        for end in [each for each in self._ends if each.from_phone]:
            if end.other is not None:
                end.other.other = None
                end.other.waiting.clear()
            self._ends.remove(end)
            _reset(end.socket)

    def _drop_all(self) -> None:
        for end in self._ends:
            _reset(end.socket)
        self._ends.clear()


def _reset(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end.close()
