"""The sessions that hellos began: who may call.

In: hellos, and the proofs of calls. Out: sessions, or ProofError. Sessions that never proved anything are kept apart and
few, so that a program that only says hello cannot push a collector's session out.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from bmoe_proto import proof
from bmoe_proto.calls import UNKNOWN_SESSION

MAX_UNPROVEN = 64
MAX_PROVEN = 256


class Sessions:
    """Every session of one service; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._unproven: OrderedDict[bytes, proof.Session] = OrderedDict()
        self._proven: OrderedDict[bytes, proof.Session] = OrderedDict()

    def begin(self, session: proof.Session) -> None:
        """A hello was answered."""
        with self._lock:
            self._unproven[session.server_nonce] = session
            while len(self._unproven) > MAX_UNPROVEN:
                self._unproven.popitem(last=False)

    def check(self, method: str, value: str, request: bytes) -> tuple[proof.Session, int]:
        """The session of a call and its counter; raises ProofError."""
        if not value:
            raise proof.ProofError("the call carries no proof: pair with this agent first")
        nonce, counter, mac = proof.parse_call_proof(value)
        with self._lock:
            session = self._proven.get(nonce) or self._unproven.get(nonce)
            if session is None:
                raise proof.ProofError(UNKNOWN_SESSION)
            session.take(method, counter, mac, request)
            self._unproven.pop(nonce, None)
            self._proven[nonce] = session
            self._proven.move_to_end(nonce)
            while len(self._proven) > MAX_PROVEN:
                self._proven.popitem(last=False)
        return session, counter

    def known(self, value: str) -> bool:
        """Whether a call's proof names a session: asked before waiting for a stream's first message."""
        try:
            nonce = proof.parse_call_proof(value)[0]
        except proof.ProofError:
            return False
        with self._lock:
            return nonce in self._proven or nonce in self._unproven

    def forget_all(self) -> None:
        """After a new secret: everybody proves anew."""
        with self._lock:
            self._unproven.clear()
            self._proven.clear()
