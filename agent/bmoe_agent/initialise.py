"""Making or completing an agent's home: `bmoe-agent init`.

In: a home directory and settings. Out: what config.py reads there, and the secret if it was made now. Of several at once one makes the
identity; what is refused leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bmoe_agent.config import (
    Config,
    ConfigError,
    from_document,
    hex_file,
    load,
    own_name,
    replace_secret,
    write_private,
)


@dataclass(frozen=True, slots=True)
class Initialised:
    """What `init` did. `secret` is set only when the secret was made now: it is shown once."""

    config: Config
    secret: bytes | None
    changed: tuple[str, ...]


def init(
    home: Path,
    *,
    engines: Sequence[str] = (),
    models: Sequence[str] = (),
    name: str = "",
    socket_name: str = "",
) -> Initialised:
    """Make or complete a home. Identity and secret are made once and never replaced; settings given are put in.

    `engines` are `PATH` or `NAME=PATH`. Comments in an edited config.toml are kept unless a setting changes. What is refused
    leaves nothing behind: the secret is made last, so one that exists was shown.
    """
    asked = (engines, models, name, socket_name)
    if not home.is_dir():
        _checked(home, *asked)
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _alone(home):  # of two at once one makes the identity, and its secret is the one that counts
        return _complete(home, *asked)


def _complete(home: Path, *asked: Any) -> Initialised:
    document, before, uuid = _checked(home, *asked)
    changed: list[str] = []
    if not (home / "uuid").exists():
        write_private(home / "uuid", uuid.hex() + "\n")
        changed.append("identity made")
    path = home / "config.toml"
    if repr(document) != before or not path.exists():
        write_private(path, _to_toml(document))
        changed.append("config.toml written")
    secret = None
    if not (home / "secret").exists():
        secret = secrets.token_bytes(32)
        replace_secret(home, secret)
        changed.append("secret made")
    (home / "secret").chmod(0o600)
    return Initialised(load(home), secret, tuple(changed))


def _checked(
    home: Path, engines: Sequence[str], models: Sequence[str], name: str, socket_name: str
) -> tuple[dict[str, Any], str, bytes]:
    """What config.toml is to hold, how it reads now, and the identity there is or will be. Raises `ConfigError`."""
    path = home / "config.toml"
    try:
        document: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}; correct it by hand, init does not throw it away") from None
    before = repr(document)
    _put_in(document, engines, models, name, socket_name)
    uuid = hex_file(home / "uuid", 16) if (home / "uuid").exists() else secrets.token_bytes(16)
    if (home / "secret").exists():
        hex_file(home / "secret", 32)
    from_document(home, document, uuid)  # refuses what `load` would refuse
    return document, before, uuid


@contextlib.contextmanager
def _alone(home: Path) -> Iterator[None]:
    """Wait for others that work at this home's files; a lock that goes with the process."""
    descriptor = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _put_in(
    document: dict[str, Any], engines: Sequence[str], models: Sequence[str], name: str, socket_name: str
) -> None:
    """Settings that `init` was given into the document of a config.toml. Raises `ConfigError`."""
    for section in ("agent", "engines", "models"):
        if not isinstance(document.get(section, {}), dict):
            raise ConfigError(f"config.toml: [{section}] must be a table; correct it by hand")
    agent = document.setdefault("agent", {})
    if name:
        agent["name"] = name
    if "name" not in agent:
        agent["name"] = own_name()
    if socket_name:
        agent["socket"] = socket_name
    known = document.setdefault("engines", {})
    for spec in engines:
        label, _, text = spec.partition("=") if re.match(r"[A-Za-z0-9._-]+=", spec) else ("bmoe", "", spec)
        engine = Path(text).expanduser().absolute()
        if not os.access(engine, os.X_OK) or not engine.is_file():
            raise ConfigError(f"engine {engine}: not an executable file; on Android it must lie in Termux's own home")
        if isinstance(known.get(label), dict):
            known[label]["path"] = str(engine)
        else:
            known[label] = str(engine)
    directories = document.setdefault("models", {}).setdefault("dirs", [])
    for text in models:
        directory = Path(text).expanduser().absolute()
        if not directory.is_dir():
            raise ConfigError(f"models {directory}: not a directory")
        if str(directory) not in directories:
            directories.append(str(directory))


def _to_toml(document: Mapping[str, Any], prefix: str = "") -> str:
    """Tables of text, numbers, truth values and lists of text: all a config.toml holds."""
    lines: list[str] = []
    tables: list[str] = []
    for key, value in document.items():
        label = key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _quoted(key)
        if isinstance(value, dict):
            tables.append(f"\n[{prefix}{label}]\n{_to_toml(value, f'{prefix}{label}.')}")
        else:
            lines.append(f"{label} = {_value(value)}\n")
    return "".join(lines) + "".join(tables)


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, list):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    return _quoted(str(value))


def _quoted(text: str) -> str:
    escaped = "".join({"\\": "\\\\", '"': '\\"'}.get(c, c) if " " <= c != "\x7f" else f"\\u{ord(c):04x}" for c in text)
    return f'"{escaped}"'
