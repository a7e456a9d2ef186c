"""Proofs: right ones hold, and every other use of what was seen on the wire does not."""

import pytest
from bmoe_proto import proof
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.agent

SECRET = bytes(range(32))
HANDSHAKE = proof.Handshake(b"c" * 32, b"s" * 32, b"t" * 16, b"u" * 16, "bmoe-agent-75")


@settings(max_examples=40)
@given(st.binary(min_size=32, max_size=32))
def test_a_secret_survives_being_copied_by_people(secret):
    text = proof.secret_text(secret)
    assert proof.parse_secret(f"  {text.upper()}\n") == secret
    assert proof.parse_secret(text.replace("-", " ")) == secret


@settings(max_examples=40)
@given(st.integers(0, 55), st.sampled_from("abcdefghijklmnopqrstuvwxyz234567"))
def test_a_wrong_character_is_noticed_before_it_is_believed(at, letter):
    text = list(proof.secret_text(SECRET).replace("-", ""))
    if text[at] == letter:
        return
    text[at] = letter
    with pytest.raises(proof.ProofError):
        proof.parse_secret("".join(text))


@pytest.mark.parametrize("text", ["", "abcd", "not a secret!", "1111-1111", proof.secret_text(SECRET)[:-2]])
def test_what_is_no_secret_is_refused(text):
    with pytest.raises(proof.ProofError, match="not a"):
        proof.parse_secret(text)


def test_the_agent_proves_the_secret_and_its_name():
    right = proof.hello_proof(SECRET, HANDSHAKE)
    assert proof.check_hello(SECRET, HANDSHAKE, right) == ""
    assert proof.check_hello(bytes(32), HANDSHAKE, right) == "secret"
    elsewhere = proof.Handshake(b"c" * 32, b"s" * 32, b"t" * 16, b"u" * 16, "bmoe-agent-76")
    assert proof.check_hello(SECRET, elsewhere, right) == "name"
    for changed in (
        proof.Handshake(b"d" * 32, b"s" * 32, b"t" * 16, b"u" * 16, HANDSHAKE.name),
        proof.Handshake(b"c" * 32, b"x" * 32, b"t" * 16, b"u" * 16, HANDSHAKE.name),
        proof.Handshake(b"c" * 32, b"s" * 32, b"y" * 16, b"u" * 16, HANDSHAKE.name),
        proof.Handshake(b"c" * 32, b"s" * 32, b"t" * 16, b"z" * 16, HANDSHAKE.name),
        proof.Handshake(b"c" * 32, b"s" * 32, b"t" * 16, b"u" * 16, HANDSHAKE.name, protocol=2),
    ):
        assert proof.check_hello(SECRET, changed, right) == "secret"
    assert proof.check_hello(SECRET, HANDSHAKE, b"") == "secret"
    assert proof.check_hello(SECRET, HANDSHAKE, right[:32]) == "name"


def session_and_call(counter=0, method="/s/Status", request=b"req"):
    key = proof.session_key(SECRET, HANDSHAKE)
    value = proof.call_proof(key, HANDSHAKE.server_nonce, method, counter, request)
    nonce, counter, mac = proof.parse_call_proof(value)
    assert nonce == HANDSHAKE.server_nonce
    return proof.Session(key, nonce, HANDSHAKE.store_id), counter, mac


def test_a_call_is_good_once_for_its_method_and_its_bytes():
    session, counter, mac = session_and_call()
    for method, request in [("/s/Submit", b"req"), ("/s/Status", b"other")]:
        with pytest.raises(proof.ProofError, match="wrong"):
            session.take(method, counter, mac, request)
    with pytest.raises(proof.ProofError, match="wrong"):
        session.take("/s/Status", counter + 1, mac, b"req")
    assert not session.proven
    session.take("/s/Status", counter, mac, b"req")
    assert session.proven
    with pytest.raises(proof.ProofError, match="made before"):
        session.take("/s/Status", counter, mac, b"req")


def test_calls_may_overtake_each_other_and_old_ones_run_out():
    session, _, _ = session_and_call()

    def take(counter):
        mac = proof.parse_call_proof(proof.call_proof(session.key, session.server_nonce, "/m", counter, b""))[2]
        session.take("/m", counter, mac, b"")

    for counter in (5, 3, 4, 0, 9):
        take(counter)
    for counter in (5, 3, 0, 9):
        with pytest.raises(proof.ProofError, match="made before"):
            take(counter)
    for counter in range(10, 3 * proof.WINDOW):
        take(counter)
    with pytest.raises(proof.ProofError, match="made before"):
        take(1)  # never used, but too old to know that
    assert len(session._used) <= 2 * proof.WINDOW + 1


@pytest.mark.parametrize("text", ["", "1.2.3", "2.aa.0.bb", "1.xx.0.bb", "1.aa.-1.bb", "1.aa.1e3.bb", "1.aa.٣.bb"])
def test_malformed_proofs_are_refused(text):
    with pytest.raises(proof.ProofError, match="malformed"):
        proof.parse_call_proof(text)


def test_a_new_secret_is_readable_with_the_old_one_in_its_session_alone():
    new = proof.new_secret()
    sealed = proof.seal(SECRET, b"n" * 32, new)
    assert new not in sealed
    assert proof.unseal(SECRET, b"n" * 32, sealed) == new
    for secret, nonce, data in [
        (bytes(32), b"n" * 32, sealed),
        (SECRET, b"m" * 32, sealed),
        (SECRET, b"n" * 32, sealed[:20] + bytes([sealed[20] ^ 1]) + sealed[21:]),
        (SECRET, b"n" * 32, b""),
    ]:
        with pytest.raises(proof.ProofError, match="sealed"):
            proof.unseal(secret, nonce, data)
    assert proof.seal(SECRET, b"n" * 32, new) != sealed
