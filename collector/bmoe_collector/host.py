"""What this host knows by itself: secrets of phones, their sockets' names, where they were reached.

In: `BMOE_HOME`, else the user's config directory. Out: a `HostHome`. Everything lies in files of mode 0600 in a folder of mode
0700; a secret is never printed, logged or put in argv.

    phones/<uuid: 32 hex>.json   {"secret": 64 hex, "socket": abstract name, "places": [adb serial, "host:port", "local:<socket>", ...],
                                  "next_secret": 64 hex while a rotation is under way, else ""}
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bmoe_proto import proof

from bmoe_collector.common import OutsideError, UserError, say

SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class PairedPhone:
    """One phone that was paired with this host."""

    uuid: bytes
    secret: bytes
    socket: str
    places: tuple[str, ...] = ()
    """adb serials, the latest first; "host:port" without a cable; "local:<socket>" on this host."""
    next_secret: bytes = b""

    def __repr__(self) -> str:
        """Without the secret: this may end up in a log."""
        return f"PairedPhone({self.uuid.hex()}, socket={self.socket!r}, places={self.places})"


class HostHome:
    """The folder; every method reads or writes at once, so several processes see each other's changes."""

    def __init__(self, folder: Path | None = None) -> None:
        """Use `folder`, else `BMOE_HOME`, else the user's config directory."""
        if folder is None:
            named = os.environ.get("BMOE_HOME")
            if named:
                folder = Path(named).expanduser().absolute()
            else:
                from platformdirs import user_config_path

                folder = user_config_path("bmoe-fleet", appauthor=False)
        self.folder = folder
        self.damaged: dict[str, str] = {}
        """Files that could not be understood, and why, as `phones` met them."""

    @property
    def _phones(self) -> Path:
        return self.folder / "phones"

    def phones(self) -> list[PairedPhone]:
        """Every paired phone, by uuid. One whose file cannot be understood keeps no other from its work: it is said, once."""
        try:
            names = sorted(name for name in os.listdir(self._phones) if re.fullmatch(r"[0-9a-f]{32}\.json", name))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise OutsideError(f"{self._phones}: {error.strerror}") from None
        found: list[PairedPhone] = []
        for name in names:
            try:
                phone = self._read(self._phones / name)
            except OutsideError as error:
                if name not in self.damaged:
                    say(str(error))
                self.damaged[name] = str(error)
                continue
            self.damaged.pop(name, None)
            if phone is not None:
                found.append(phone)
        return found

    def phone(self, uuid: bytes) -> PairedPhone | None:
        """The phone with that uuid, if it is paired."""
        return self._read(self._phones / f"{uuid.hex()}.json")

    def by_socket(self, socket: str) -> PairedPhone | None:
        """The phone whose agent serves under that abstract socket name, if it is paired."""
        return next((phone for phone in self.phones() if phone.socket == socket), None)

    def remember(self, phone: PairedPhone) -> None:
        """Write a phone, replacing what was known of it."""
        document = {
            "secret": phone.secret.hex(),
            "next_secret": phone.next_secret.hex(),
            "socket": phone.socket,
            "places": list(phone.places),
        }
        try:
            self._phones.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.folder.chmod(0o700)
            path = self._phones / f"{phone.uuid.hex()}.json"
            temporary = path.with_name(f".{secrets.token_hex(6)}")
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                with os.fdopen(descriptor, "w", encoding="ascii") as file:
                    json.dump(document, file)
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
        except OSError as error:
            raise OutsideError(f"{self.folder}: {error.strerror}; BMOE_HOME names another folder") from None

    def add_place(self, uuid: bytes, place: str) -> None:
        """Remember where a phone was reached, the latest first."""
        phone = self.phone(uuid)
        if phone is not None and phone.places[:1] != (place,):
            rest = tuple(known for known in phone.places if known != place)
            self.remember(replace(phone, places=(place, *rest)[:8]))

    def forget(self, uuid: bytes) -> bool:
        """Remove a phone and its secret; False when it was not there."""
        with contextlib.suppress(FileNotFoundError):
            (self._phones / f"{uuid.hex()}.json").unlink()
            return True
        return False

    def _read(self, path: Path) -> PairedPhone | None:
        try:
            document: Any = json.loads(path.read_text(encoding="ascii"))
            secret = bytes.fromhex(document["secret"])
            if len(secret) != SECRET_BYTES:
                raise ValueError("the secret is not 64 hex digits")
            return PairedPhone(
                bytes.fromhex(path.stem),
                secret,
                str(document["socket"]),
                tuple(str(item) for item in document.get("places", [])),
                bytes.fromhex(document.get("next_secret", "")),
            )
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise OutsideError(f"{path}: {error}; remove it and pair the phone again") from None
        except OSError as error:
            raise OutsideError(f"{path}: {error.strerror}") from None


def parse_secret(text: str) -> bytes:
    """Return the secret a person typed or piped, in either form agents print. Never repeats it in a message."""
    plain = re.sub(r"[\s:-]", "", text)
    if re.fullmatch(r"[0-9a-fA-F]{64}", plain):
        return bytes.fromhex(plain)
    if not plain:
        raise UserError("no secret came: type it at the prompt, or pipe it in")
    try:
        return proof.parse_secret(text)
    except proof.ProofError as error:
        raise UserError(f"{error}; `bmoe-agent init` on the phone showed it") from None
