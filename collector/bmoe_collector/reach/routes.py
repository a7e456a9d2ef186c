"""Ways to agents: what adb shows, which sockets phones have, and how one is opened.

In: the adb server, this host's secrets, names of agents on this very machine. Out: `Sighting`s (a transport or
socket and the state it is in) and authenticated clients. A phone is its agent's uuid: two sightings of one uuid are
one phone reached twice (USB and Wi-Fi), one serial seen on two transports is two phones.

States of a sighting before anybody talked to an agent; `bmoe_collector.reach.states` has the whole list:
`reachable` (paired, a socket is there), `unpaired`, `no_agent`, `offline`, `unauthorized`, `silent` (the phone's shell
does not answer).
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from bmoe_proto import calls

from bmoe_collector.common import UserError
from bmoe_collector.host import HostHome, PairedPhone
from bmoe_collector.reach.adb import Adb, AdbError, Transport
from bmoe_collector.reach.forwards import Forwards

SHELL_S = 8.0
PREFIX = "bmoe-agent-"
LOCAL = "local:"


@dataclass(frozen=True, slots=True)
class Sighting:
    """One way to one agent, or to a phone on which none was found."""

    where: str  # adb serial, or "local:<socket>"
    state: str
    detail: str = ""
    socket: str = ""
    uuid: bytes = b""  # of the paired phone this is; empty when it is not known
    transport: Transport | None = None

    @property
    def preference(self) -> tuple[bool, int]:
        """A cable before Wi-Fi; of two cables the one seen first."""
        return (
            self.transport is not None and self.transport.is_address,
            self.transport.transport_id if self.transport else 0,
        )


class Reach:
    """Everything this host can reach. Close it: its forwards are removed."""

    def __init__(
        self,
        host: HostHome,
        store_id: bytes,
        *,
        local: Sequence[str] = (),
        remembered: bool = False,
        use_adb: bool = True,
    ) -> None:
        """`local` are sockets of agents on this machine, without the `local:` before them.

        With `remembered`, agents on this machine that were paired are looked for as well.
        """
        self.host = host
        self.store_id = store_id
        self.local = tuple(local)
        self._remembered = remembered
        self.adb_problem = ""  # why the newest look saw nothing through adb
        self.adb = Adb() if use_adb else None
        self._forwards: Forwards | None = None
        self._lock = threading.Lock()

    def sightings(self) -> list[Sighting]:
        """Look once. Raises `AdbError` when the adb server cannot be had and nothing is here without it."""
        paired = self.host.phones()
        here = [*self.local, *(_local_agents(paired, self.local) if self._remembered else ())]
        found = [self._local_sighting(name, paired) for name in here]
        if self.adb is None:
            return found
        self.adb_problem = ""
        try:
            transports = self.adb.transports()
        except AdbError as error:
            if not found:
                raise
            self.adb_problem = str(error)
            return found
        if transports:
            with ThreadPoolExecutor(min(8, len(transports)), "look") as pool:
                for group in pool.map(lambda transport: self._on(transport, paired), transports):
                    found.extend(group)
        return found

    def open(self, sighting: Sighting, secret: bytes | None = None, uuid: bytes | None = None) -> calls.AgentClient:
        """Connect and prove each other. Raises `calls.CallError`, `AdbError`.

        Without `secret` the stored one of the sighting's phone is used, and its uuid must be the agent's.
        """
        if secret is None:
            phone = self.host.phone(sighting.uuid) if sighting.uuid else None
            if phone is None:
                raise UserError(f"{sighting.where}: not paired: `bmoe pair {sighting.where}`")
            if phone.next_secret:
                return self._open_rotating(sighting, phone)
            secret, uuid = phone.secret, phone.uuid
        return calls.connect(self._target(sighting), secret, self.store_id, expect_uuid=uuid, name=sighting.socket)

    def _open_rotating(self, sighting: Sighting, phone: PairedPhone) -> calls.AgentClient:
        """A rotation was cut short: nobody knows whether the phone took the new secret, so ask with both."""
        target = self._target(sighting)
        for secret in (phone.next_secret, phone.secret):
            with contextlib.suppress(calls.WrongSecret):
                client = calls.connect(target, secret, self.store_id, expect_uuid=phone.uuid, name=sighting.socket)
                self.host.remember(replace(phone, secret=secret, next_secret=b""))
                return client
        raise calls.WrongSecret(f"{sighting.where}: neither the old secret nor the new one of a rotation is right")

    def close(self) -> None:
        """Remove our forwards."""
        with self._lock:
            if self._forwards is not None:
                self._forwards.close()
                self._forwards = None

    def __enter__(self) -> Reach:
        """Close at the end of a `with`."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _target(self, sighting: Sighting) -> str:
        if sighting.transport is None:
            return f"unix-abstract:{sighting.socket}"
        if self.adb is None:
            raise AdbError("adb is not used here")
        with self._lock:
            if self._forwards is None:
                self._forwards = Forwards(self.adb)
            forwards = self._forwards
        return f"unix:{forwards.path_to(sighting.transport, sighting.socket)}"

    @staticmethod
    def _local_sighting(name: str, paired: Sequence[PairedPhone]) -> Sighting:
        phone = _phone_of(name, paired)
        state = "reachable" if phone else "unpaired"
        return Sighting(LOCAL + name, state, socket=name, uuid=phone.uuid if phone else b"")

    def _on(self, transport: Transport, paired: Sequence[PairedPhone]) -> list[Sighting]:
        """What one transport leads to: a sighting for each agent's socket, else one that says why there is none."""
        if transport.state != "device":
            state = {"unauthorized": "unauthorized", "authorizing": "unauthorized"}.get(transport.state, "offline")
            return [Sighting(transport.serial, state, f"adb says {transport.state}", transport=transport)]
        assert self.adb is not None
        try:
            text = self.adb.shell(transport.transport_id, "cat /proc/net/unix", SHELL_S).decode("utf-8", "replace")
        except AdbError as error:
            return [Sighting(transport.serial, "silent", str(error), transport=transport)]
        sockets = listening(text)
        known = {phone.socket for phone in paired}
        ours = [name for name in sockets if name.startswith(PREFIX) or name in known]
        if not ours:
            detail = "no agent's socket in /proc/net/unix"
            if not text.startswith("Num"):
                detail = f"/proc/net/unix cannot be read: {text.strip().splitlines()[-1:] or ['nothing came']}"
                # sockets cannot be listed: the names of paired phones are all there is to try
                ours = sorted(known)
            if not ours:
                return [Sighting(transport.serial, "no_agent", detail, transport=transport)]
        seen = []
        for name in ours:
            phone = _phone_of(name, paired)
            state = "reachable" if phone else "unpaired"
            uuid = phone.uuid if phone else b""
            seen.append(Sighting(transport.serial, state, socket=name, uuid=uuid, transport=transport))
        return seen


def _local_agents(paired: Sequence[PairedPhone], known: Sequence[str]) -> list[str]:
    """Sockets of paired agents that were reached on this machine and serve on it now, without the known ones."""
    names = [phone.socket for phone in paired if LOCAL + phone.socket in phone.places and phone.socket not in known]
    if not names:
        return []
    try:
        serving = listening(Path("/proc/net/unix").read_text(encoding="utf-8", errors="replace"))
    except OSError:  # no Linux: no abstract sockets either
        return []
    return [name for name in names if name in serving]


def listening(proc_net_unix: str) -> list[str]:
    """Abstract names that accept connections: `/proc/net/unix` lines with the accept flag (0x10000) and an `@` path."""
    names = []
    for line in proc_net_unix.splitlines()[1:]:
        words = line.split(maxsplit=7)
        if len(words) == 8 and words[7].startswith("@") and re.fullmatch(r"[0-9A-Fa-f]{8}", words[3]):
            name = words[7][1:].rstrip("@\r\n")
            if int(words[3], 16) & 0x10000 and name not in names:
                names.append(name)
    return names


def best_routes(sightings: Sequence[Sighting]) -> dict[bytes, list[Sighting]]:
    """Reachable phones by uuid, each with its ways in the order to try them."""
    routes: dict[bytes, list[Sighting]] = {}
    for sighting in sightings:
        if sighting.state == "reachable":
            routes.setdefault(sighting.uuid, []).append(sighting)
    for ways in routes.values():
        ways.sort(key=lambda way: way.preference)
    return routes


def _phone_of(name: str, paired: Sequence[PairedPhone]) -> PairedPhone | None:
    return next((phone for phone in paired if phone.socket == name), None)
