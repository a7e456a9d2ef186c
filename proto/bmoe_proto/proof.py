"""The secret a phone and its collectors share, and the proofs both make with it.

In: the secret, nonces, names, the bytes of a call. Out: proofs, and whether one is right. Pure but for `new_secret` and
`new_nonce`, which ask the system for random bytes. The secret itself never crosses the wire.

Hello. The client sends a nonce and its store's id; the agent answers with its own nonce and a proof of 64 bytes:

    HMAC(secret, "agent"  | facts)  |  HMAC(secret, "socket" | facts | name of the socket)
    facts = protocol, client nonce, server nonce, store id, agent's uuid     (each with its length before it)

A relay that listens on another name passes the first half on and fails at the second: the client puts in the name that
it asked adb for. Something that squats the agent's own name knows no secret and fails at both.

Calls. Both sides derive a session key from the same facts and the name. Every call carries in its metadata

    bmoe-proof: 1.<server nonce, hex>.<counter>.<HMAC(key, "call" | method | counter | sha256 of the request), hex>

The agent takes every counter of a session once, in any order within a window, so a recorded call is refused when it
comes again, on another method, or with other bytes. For a stream the request is its first message. The answer carries
`bmoe-answer: HMAC(key, "answer" | method | counter | sha256 of the reply)` (for a stream: of no bytes, before its first
message), so whoever took over the socket's name after hello is found out before a byte of its answer is believed.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import zlib
from dataclasses import dataclass, field

PROTOCOL = 1
OLDEST_PROTOCOL = 1
PROOF_KEY = "bmoe-proof"
ANSWER_KEY = "bmoe-answer"
SECRET_BYTES = 32
NONCE_BYTES = 32
WINDOW = 4096
"""How far behind the newest counter an unused one is still taken: calls of one session may overtake each other."""


class ProofError(Exception):
    """A proof that is not right; the message says in which way."""


# -------------------------------------------------------------------- the secret


def new_secret() -> bytes:
    """A new random secret."""
    return secrets.token_bytes(SECRET_BYTES)


def new_nonce() -> bytes:
    """A new random nonce."""
    return secrets.token_bytes(NONCE_BYTES)


def secret_text(secret: bytes) -> str:
    """The secret as people copy it: base32 in groups of four, with a check against typing errors."""
    check = zlib.crc32(secret).to_bytes(4, "big")[:3]
    text = base64.b32encode(secret + check).decode("ascii").rstrip("=").lower()
    return "-".join(text[at : at + 4] for at in range(0, len(text), 4))


def parse_secret(text: str) -> bytes:
    """The secret from what somebody typed or pasted; raises ProofError when it cannot be one."""
    plain = "".join(text.split()).replace("-", "").upper()
    try:
        data = base64.b32decode(plain + "=" * (-len(plain) % 8))
    except ValueError:
        raise ProofError("not a secret: it has letters and the digits 2 to 7 alone, in groups of four") from None
    secret, check = data[:SECRET_BYTES], data[SECRET_BYTES:]
    if len(secret) != SECRET_BYTES or zlib.crc32(secret).to_bytes(4, "big")[:3] != check:
        raise ProofError("not a whole secret: a character is wrong or missing; copy it again")
    return secret


def fingerprint(secret: bytes) -> str:
    """Eight hex digits by which two people can see whether they mean the same secret; tells nothing else of it."""
    return _mac(secret, b"fingerprint").hex()[:8]


# -------------------------------------------------------------------- hello


@dataclass(frozen=True, slots=True)
class Handshake:
    """What both sides know after hello; `name` is the abstract socket's name (or the address, over TCP)."""

    client_nonce: bytes
    server_nonce: bytes
    store_id: bytes
    agent_uuid: bytes
    name: str
    protocol: int = PROTOCOL

    def facts(self) -> bytes:
        """All but the name, unambiguously."""
        return _joined(
            str(self.protocol).encode(), self.client_nonce, self.server_nonce, self.store_id, self.agent_uuid
        )


def hello_proof(secret: bytes, handshake: Handshake) -> bytes:
    """The agent's proof, 64 bytes."""
    facts = handshake.facts()
    return _mac(secret, b"agent", facts) + _mac(secret, b"socket", facts, handshake.name.encode())


def check_hello(secret: bytes, handshake: Handshake, proof: bytes) -> str:
    """How a hello's proof fails: "" (it is right), "secret" (another secret), "name" (it listens elsewhere)."""
    expected = hello_proof(secret, handshake)
    if hmac.compare_digest(expected, proof):
        return ""
    return "name" if hmac.compare_digest(expected[:32], proof[:32]) else "secret"


def session_key(secret: bytes, handshake: Handshake) -> bytes:
    """The key of one session's proofs."""
    return _mac(secret, b"session", handshake.facts(), handshake.name.encode())


# -------------------------------------------------------------------- calls


def call_proof(key: bytes, server_nonce: bytes, method: str, counter: int, request: bytes) -> str:
    """The value of the metadata `bmoe-proof`; `method` is the full path, "/package.Service/Method"."""
    mac = _mac(key, b"call", method.encode(), str(counter).encode(), hashlib.sha256(request).digest())
    return f"1.{server_nonce.hex()}.{counter}.{mac.hex()}"


def parse_call_proof(text: str) -> tuple[bytes, int, bytes]:
    """Server nonce, counter and proof; raises ProofError."""
    parts = text.split(".")
    try:
        version, nonce, counter, mac = parts
        if version != "1" or len(counter) > 18 or not counter.isascii() or not counter.isdigit():
            raise ValueError(counter)
        return bytes.fromhex(nonce), int(counter), bytes.fromhex(mac)
    except ValueError:
        raise ProofError("the call's proof is malformed") from None


def answer_proof(key: bytes, method: str, counter: int, reply: bytes) -> str:
    """The value of the metadata `bmoe-answer`."""
    return _mac(key, b"answer", method.encode(), str(counter).encode(), hashlib.sha256(reply).digest()).hex()


def same(expected: str, given: str) -> bool:
    """Compare two texts in constant time."""
    return hmac.compare_digest(expected.encode(), given.encode())


@dataclass(slots=True)
class Session:
    """The agent's side of one session: its key, and which counters were used."""

    key: bytes
    server_nonce: bytes
    store_id: bytes
    proven: bool = False
    everything: bool = False  # its reader asked for backlog and files during measured cells too
    _newest: int = -1
    _used: set[int] = field(default_factory=set)

    def take(self, method: str, counter: int, mac: bytes, request: bytes) -> None:
        """Check a call's proof and use its counter up; raises ProofError."""
        expected = call_proof(self.key, self.server_nonce, method, counter, request).rsplit(".", 1)[1]
        if not same(expected, mac.hex()):
            raise ProofError("the call's proof is wrong")
        if counter in self._used or counter <= self._newest - WINDOW:
            raise ProofError("the call was made before: a proof is good for one call")
        self._used.add(counter)
        if counter > self._newest:
            self._newest = counter
            if len(self._used) > 2 * WINDOW:
                self._used = {used for used in self._used if used > counter - WINDOW}
        self.proven = True


# -------------------------------------------------------------------- rotation


def seal(secret: bytes, server_nonce: bytes, new: bytes) -> bytes:
    """The new secret for `Rotate`, readable only with the old one: nonce, new secret xor a one-time pad, HMAC."""
    nonce = secrets.token_bytes(16)
    pad = _mac(secret, b"seal pad", server_nonce, nonce)
    hidden = bytes(one ^ two for one, two in zip(new, pad, strict=True))
    return nonce + hidden + _mac(secret, b"seal check", server_nonce, nonce, hidden)


def unseal(secret: bytes, server_nonce: bytes, sealed: bytes) -> bytes:
    """The new secret; raises ProofError when it was not sealed with this one in this session."""
    nonce, hidden, check = sealed[:16], sealed[16 : 16 + SECRET_BYTES], sealed[16 + SECRET_BYTES :]
    if not hmac.compare_digest(_mac(secret, b"seal check", server_nonce, nonce, hidden), check):
        raise ProofError("the new secret is not sealed with the present one")
    pad = _mac(secret, b"seal pad", server_nonce, nonce)
    return bytes(one ^ two for one, two in zip(hidden, pad, strict=True))


def _joined(*parts: bytes) -> bytes:
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def _mac(key: bytes, *parts: bytes) -> bytes:
    return hmac.new(key, _joined(b"bmoe", *parts), hashlib.sha256).digest()
