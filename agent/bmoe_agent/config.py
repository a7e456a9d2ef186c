"""Who this agent is and what it may run: the agent's home directory.

In: the home directory (`--home`, `BMOE_AGENT_HOME`, else `~/.bmoe-agent`). Out: a `Config`, or `ConfigError` saying
which file is wrong, where, and what to do.

    config.toml      written by `bmoe-agent init` (initialise.py), edited by hand afterwards
    uuid             32 hex digits, made once; the phone *is* this number
    secret           64 hex digits, mode 0600; shown once by `init`
    store            32 hex digits: the one store this phone keeps its records for; absent when unpaired
    spool/ plans/ cache/ baseline.json   made as they are needed
    lock             locked by the one agent that works here
    wake-lock        there while that agent holds Termux's wake lock

config.toml:

    [agent]
    name = "pixel-7"                # shown to people
    socket = "bmoe-agent-1f2e3d4c5b6a"   # abstract socket name; optional
    tcp_port = 50161                # only when asked for: loopback is open to every app of the phone
    quota_mib = 4096                # how much the spool may hold
    default_engine = "bmoe"         # optional; else the only or the first engine
    [engines]
    bmoe = "/data/data/com.termux/files/home/bmoe-cli"
    [engines.patched]               # long form
    path = "/data/data/com.termux/files/home/patched/bmoe-cli"
    ld_library_path = "/data/data/com.termux/files/home/patched"
    [models]
    dirs = ["/data/data/com.termux/files/home/models"]
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DEFAULT_QUOTA_MIB = 4096
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SOCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_KNOWN = {
    "agent": {"name", "socket", "tcp_port", "quota_mib", "default_engine"},
    "models": {"dirs"},
}


class ConfigError(Exception):
    """The home directory cannot be used as it is; the message names the file and what to do."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One engine that may be launched."""

    name: str
    path: Path
    ld_library_path: str = ""


@dataclass(frozen=True, slots=True)
class Config:
    """Everything `config.toml`, `uuid`, `secret` and `store` say."""

    home: Path
    uuid: bytes
    secret: bytes
    name: str
    socket: str
    tcp_port: int | None = None
    quota_bytes: int = DEFAULT_QUOTA_MIB << 20
    engines: Mapping[str, EngineConfig] = field(default_factory=dict)
    default_engine: str = ""
    model_dirs: tuple[Path, ...] = ()
    kept_for_store: bytes = b""

    def engine(self, name: str) -> EngineConfig:
        """The engine of that name, or the default one for an empty name. Raises `ConfigError`."""
        wanted = name or self.default_engine
        if not wanted:
            raise ConfigError(
                f"{self.home / 'config.toml'}: no engine is configured: run bmoe-agent init --engine PATH"
            )
        found = self.engines.get(wanted)
        if found is None:
            known = ", ".join(sorted(self.engines)) or "none"
            raise ConfigError(f"engine {wanted!r} is not configured here (configured: {known})")
        return found

    def model(self, name: str) -> Path:
        """The file of a model's name, found inside the model directories only. Raises `ConfigError`.

        A name is relative ("qwen3.gguf", "sub/qwen3.gguf", or without ".gguf"); one that climbs out is refused, so is
        an absolute path outside the directories. A symbolic link placed in a model directory by the phone's owner is
        the owner's choice and is followed.
        """
        if not self.model_dirs:
            raise ConfigError(f"{self.home / 'config.toml'}: no model directory: run bmoe-agent init --models DIR")
        if not name or "\0" in name or ".." in Path(name).parts:
            raise ConfigError(f"model name {name[:80]!r} is not a name inside a model directory")
        for directory in self.model_dirs:
            for candidate in (directory / name, directory / f"{name}.gguf"):
                if _inside(candidate, directory) and os.path.isfile(candidate):  # False for a name too long, too
                    return candidate
        where = ", ".join(str(directory) for directory in self.model_dirs)
        raise ConfigError(f"model {name[:80]!r} is not in {where}")

    def models(self) -> list[str]:
        """Names of all models here; of a split model its first shard."""
        names: set[str] = set()
        for directory in self.model_dirs:
            for root, folders, files in os.walk(directory):
                folders[:] = [folder for folder in folders if not folder.startswith(".")]
                for file in files:
                    later_shard = re.search(r"-(\d{5})-of-\d{5}\.gguf$", file)
                    if file.endswith(".gguf") and not (later_shard and int(later_shard[1]) != 1):
                        names.add(str((Path(root) / file).relative_to(directory)))
        return sorted(names)


def home_directory(given: str | None = None) -> Path:
    """Where this agent lives."""
    return Path(given or os.environ.get("BMOE_AGENT_HOME") or "~/.bmoe-agent").expanduser().absolute()


def load(home: Path) -> Config:
    """Read a home directory. Raises `ConfigError`."""
    path = home / "config.toml"
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{home}: no agent lives here: run bmoe-agent init") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    uuid = hex_file(home / "uuid", 16)
    secret = hex_file(home / "secret", 32)
    kept = hex_file(home / "store", 16) if (home / "store").exists() else b""
    return from_document(home, document, uuid, secret, kept)


def keep_for_store(home: Path, store_id: bytes) -> None:
    """Remember the store whose acknowledgements free space; empty forgets it."""
    if store_id:
        write_private(home / "store", store_id.hex() + "\n")
    else:
        (home / "store").unlink(missing_ok=True)


def replace_secret(home: Path, secret: bytes) -> None:
    """Put a new secret in the old one's place, atomically and durably."""
    write_private(home / "secret", secret.hex() + "\n")


def write_private(path: Path, text: str) -> None:
    """Replace a small file atomically and durably, mode 0600."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make names in a directory durable; a filesystem that cannot is left as it is."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def from_document(
    home: Path, document: Mapping[str, Any], uuid: bytes, secret: bytes = b"", kept: bytes = b""
) -> Config:
    """What a config.toml says. Raises `ConfigError`."""
    path = home / "config.toml"
    for section, keys in _KNOWN.items():
        table = document.get(section, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: [{section}] must be a table")
        for key in table:
            if key not in keys:
                raise ConfigError(f"{path}: [{section}] {key}: no such setting (known: {', '.join(sorted(keys))})")
    agent = document.get("agent", {})
    name = _text(path, agent, "agent", "name") or own_name()
    socket_name = _text(path, agent, "agent", "socket") or f"bmoe-agent-{uuid.hex()[:12]}"
    if not _SOCKET.fullmatch(socket_name):
        raise ConfigError(f"{path}: [agent] socket = {socket_name!r}: letters, digits, '.', '_' and '-', at most 100")
    quota = agent.get("quota_mib", DEFAULT_QUOTA_MIB)
    if isinstance(quota, bool) or not isinstance(quota, int) or quota < 16:
        raise ConfigError(f"{path}: [agent] quota_mib = {quota!r}: a whole number of MiB, at least 16")
    port = agent.get("tcp_port")
    if port is not None and (isinstance(port, bool) or not isinstance(port, int) or not 0 <= port < 65536):
        raise ConfigError(f"{path}: [agent] tcp_port = {port!r}: a port number")
    engines = _engines(path, document.get("engines", {}))
    default = _text(path, agent, "agent", "default_engine") or next(iter(engines), "")
    if default and default not in engines:
        raise ConfigError(f"{path}: [agent] default_engine = {default!r} is not in [engines]")
    directories = document.get("models", {}).get("dirs", [])
    if not isinstance(directories, list) or not all(isinstance(item, str) and item for item in directories):
        raise ConfigError(f"{path}: [models] dirs must be a list of directories")
    return Config(
        home=home,
        uuid=uuid,
        secret=secret,
        name=name,
        socket=socket_name,
        tcp_port=port,
        quota_bytes=quota << 20,
        engines=engines,
        default_engine=default,
        model_dirs=tuple(Path(item).expanduser() for item in directories),
        kept_for_store=kept,
    )


def _engines(path: Path, table: object) -> dict[str, EngineConfig]:
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: [engines] must be a table of NAME = PATH")
    engines: dict[str, EngineConfig] = {}
    for name, value in table.items():
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{path}: [engines] {name!r}: letters, digits, '.', '_' and '-', at most 64")
        entry = {"path": value} if isinstance(value, str) else value
        if not isinstance(entry, dict) or not isinstance(entry.get("path"), str) or not entry["path"]:
            raise ConfigError(f"{path}: [engines] {name}: a path, or a table with path and ld_library_path")
        if unknown := set(entry) - {"path", "ld_library_path"}:
            raise ConfigError(f"{path}: [engines.{name}] {min(unknown)}: no such setting")
        library_path = _text(path, entry, f"engines.{name}", "ld_library_path")
        engines[name] = EngineConfig(name, Path(entry["path"]).expanduser(), library_path)
    return engines


def _text(path: Path, table: Mapping[str, Any], section: str, key: str) -> str:
    value = table.get(key, "")
    if not isinstance(value, str):
        raise ConfigError(f"{path}: [{section}] {key} = {value!r}: must be text in quotes")
    return value


def hex_file(path: Path, size: int) -> bytes:
    """`size` bytes written as hex digits. Raises `ConfigError`."""
    try:
        value = bytes.fromhex(path.read_text(encoding="ascii").strip())
    except FileNotFoundError:
        raise ConfigError(f"{path}: missing: run bmoe-agent init") from None
    except (ValueError, OSError) as error:
        raise ConfigError(f"{path}: cannot be read as {size * 2} hex digits: {error}") from None
    if len(value) != size:
        raise ConfigError(
            f"{path}: {len(value)} bytes, expected {size}; restore it from a copy, or remove it and pair anew"
        )
    return value


def _inside(candidate: Path, directory: Path) -> bool:
    normal, base = os.path.normpath(candidate), os.path.normpath(directory)
    return normal.startswith(base.rstrip("/") + "/")


def own_name() -> str:
    """What people call a phone that was given no name."""
    return socket.gethostname() or "phone"
