"""This host: adb, the database, secrets, room. In: this machine. Out: checks. Starts nothing and changes nothing."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from bmoe_collector.common import BmoeError, artifacts_url, counted, database_url, open_db
from bmoe_collector.doctor.check import FAIL, OK, UNKNOWN, WARN, Check
from bmoe_collector.host import HostHome

_ASK_S = 15.0
_LITTLE_BYTES = 1 << 30


def examine(db: str | None, host: HostHome) -> list[Check]:
    """All checks of this host; one that breaks is `unknown` and the others go on."""
    found: list[Check] = []
    lookers: dict[str, Callable[[], Iterator[Check]]] = {
        "adb": adb,
        "database": lambda: database(db),
        "secrets": lambda: secrets(host),
        "system": system,
    }
    for name, look in lookers.items():
        try:
            found.extend(look())
        except Exception as problem:
            found.append(Check(name, UNKNOWN, f"this check failed itself: {type(problem).__name__}: {problem}"))
    return found


def adb() -> Iterator[Check]:
    """The adb binary, whether another one of another version is about, and the server that runs."""
    from adbutils import AdbClient, adb_path

    try:
        ours = adb_path()
    except Exception as problem:  # adbutils raises its own and others' errors
        yield Check("adb", FAIL, f"no adb: {problem}", ["apt install adb"])
        return
    version = client_version(ours)
    if version is None:
        yield Check("adb", FAIL, f"{ours} does not run", ["apt install adb", "ADBUTILS_ADB_PATH names another"])
        return
    yield Check("adb", OK, f"{ours}, protocol {version}")
    other = shutil.which("adb")
    if other and os.path.realpath(other) != os.path.realpath(ours) and (theirs := client_version(other)) != version:
        seen = f"{other} speaks protocol {theirs}: each of the two ends the other's server"
        yield Check("adb", WARN, seen, [f"export ADBUTILS_ADB_PATH={other}"])
    client = AdbClient()
    running = server_version(client.host, client.port)
    if running is None:
        yield Check("adb_server", OK, f"none on port {client.port}: it is started when it is needed")
    elif running != version:
        seen = f"the server on port {client.port} speaks protocol {running}, this adb {version}"
        yield Check("adb_server", WARN, seen, ["adb kill-server"])
    else:
        yield Check("adb_server", OK, f"port {client.port}, protocol {running}")


def client_version(path: str) -> int | None:
    """The protocol of an adb binary: 41 of "Android Debug Bridge version 1.0.41"."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        ran = subprocess.run(
            [path, "version"], capture_output=True, timeout=_ASK_S, check=False, stdin=subprocess.DEVNULL
        )
        found = re.search(rb"version \d+\.\d+\.(\d+)", ran.stdout)
        return int(found[1]) if found else None
    return None


def server_version(host: str, port: int) -> int | None:
    """The protocol of the server that listens, None when none does. Not asked through adbutils, which would start one."""
    with contextlib.suppress(OSError, ValueError), socket.create_connection((host, port), timeout=3.0) as connection:
        connection.sendall(b"000chost:version")
        answer = b""
        while len(answer) < 12 and (part := connection.recv(12 - len(answer))):
            answer += part
        if answer[:4] == b"OKAY":
            return int(answer[8:12], 16)
    return None


def database(db: str | None) -> Iterator[Check]:
    """Whether the database opens and its files have room."""
    try:
        url = database_url(db)
        with contextlib.closing(open_db(db)) as store:
            shown = store.engine.url.render_as_string(hide_password=True)
            files = artifacts_url(store)
    except BmoeError as problem:
        yield Check("database", FAIL, str(problem), ["bmoe db upgrade", "bmoe db check"])
        return
    yield Check("database", OK, shown)
    place = Path(url.removeprefix("sqlite:///")) if url.startswith("sqlite:///") else None
    if place is not None and (mode := stat.S_IMODE(place.stat().st_mode)) & 0o022:
        yield Check("database", WARN, f"{place} may be written by others (mode {mode:o})", [f"chmod go-w {place}"])
    if "://" in files:
        yield Check("artifacts", UNKNOWN, f"{files}: not asked")
        return
    folder = Path(files)
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not os.access(there, os.W_OK):
        yield Check("artifacts", FAIL, f"{there} may not be written", [f"chmod u+w {there}"])
        return
    free = shutil.disk_usage(there).free
    yield Check("artifacts", OK if free > _LITTLE_BYTES else WARN, f"{folder}, {free >> 20} MiB free")


def secrets(host: HostHome) -> Iterator[Check]:
    """Whether secrets of phones are this user's alone, and can be read."""
    if not host.folder.exists():
        yield Check("secrets", OK, f"{host.folder}: no phone is paired yet", ["bmoe pair"])
        return
    phones = host.folder / "phones"
    open_to_others = [
        path
        for path in (host.folder, *(phones.glob("*.json") if phones.is_dir() else ()))
        if stat.S_IMODE(path.stat().st_mode) & 0o077
    ]
    for path in open_to_others:
        mode = "700" if path.is_dir() else "600"
        seen = f"{path} is open to others (mode {stat.S_IMODE(path.stat().st_mode):o})"
        yield Check("secrets", FAIL, seen, [f"chmod {mode} {path}", "bmoe rotate PHONE   # who could read it may have"])
    try:
        paired = host.phones()
    except BmoeError as problem:
        yield Check("secrets", FAIL, str(problem))
        return
    for why in host.damaged.values():
        yield Check("secrets", FAIL, why, ["bmoe pair"])
    if not open_to_others and not host.damaged:
        yield Check("secrets", OK, f"{host.folder}: {counted(len(paired), 'phone')} paired")


def system() -> Iterator[Check]:
    """Whether this kind of host was tested."""
    if sys.platform == "linux":
        yield Check("system", OK, f"{os.uname().sysname} {os.uname().release}")
    elif sys.platform == "darwin":
        yield Check("system", UNKNOWN, "macOS: the way to phones is the same as on Linux; untested")
    else:
        yield Check("system", UNKNOWN, f"{sys.platform}: gRPC has no unix sockets here; untested")
