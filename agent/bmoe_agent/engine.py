"""What engine a binary is: its hash, what it says of itself, which flags it takes.

In: the path of a configured binary. Out: `EngineFacts`, asked once per binary and kept in a cache by content; and, for a list
of flags, the reasons why this binary would refuse them. `engine=` in its files is not unique, so a build is its sha256
(field notes, section 8).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bmoe_proto.contract.flags import BY_SPELLING
from bmoe_proto.v1 import telemetry_pb2 as pb
from google.protobuf import json_format

_TIMEOUT_S = 20
_LOOK_S = 0.05
_TEXT_LIMIT = 256 * 1024
_PIPE_BYTES = 1 << 20  # the most an unprivileged program's pipe holds
_BLOCK = 1 << 20
_FLAG = re.compile(r"(?<![\w-])(--?[A-Za-z][A-Za-z0-9-]*)")
# The dynamic linkers of Android and glibc, and the kernel's answer to a binary of another machine.
_LINKER = re.compile(
    r"CANNOT LINK EXECUTABLE|error while loading shared libraries|library \"[^\"]+\" not found|"
    r"has unexpected e_type|is 32-bit instead of 64-bit|cannot locate symbol"
)


class EngineError(Exception):
    """A binary that cannot be asked; the message says what happened and what to do."""


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment engines are started with: nothing that stands in for a flag, nothing preloaded."""
    kept = {
        name: os.environ[name]
        for name in ("HOME", "PATH", "TMPDIR", "LANG", "ANDROID_ROOT", "ANDROID_DATA")
        if name in os.environ
    }
    return {**kept, **(extra or {})}


def describe(
    path: str | os.PathLike[str],
    cache_dir: Path,
    name: str = "",
    environment: Mapping[str, str] | None = None,
    stopping: Callable[[], bool] = lambda: False,
) -> pb.EngineFacts:
    """Facts of the binary. Raises EngineError when it is not there or does not start, or when `stopping` says so meanwhile.

    Two cached steps: (path, size, mtime, inode) to sha256, sha256 (and what the environment changes) to the texts.
    """
    binary = os.path.realpath(path)
    try:
        stat = os.stat(binary)
    except OSError as problem:
        raise EngineError(
            f"{path}: {problem.strerror}: name an existing engine with `bmoe-agent init --engine PATH`"
        ) from problem
    if not os.path.isfile(binary) or not os.access(binary, os.X_OK):
        raise EngineError(
            f"{path}: not an executable file: chmod +x it, and keep it under Termux's home, where files may be executed"
        )
    digest = _cached_sha256(binary, stat, cache_dir)
    marks = repr((binary, sorted((environment or {}).items()))).encode()
    place = cache_dir / f"engine-{digest}-{hashlib.sha256(marks).hexdigest()[:12]}.json"
    facts = _load(place)
    if facts is None:
        version, help_text = (_ask(binary, flag, environment, stopping) for flag in ("--version", "--help"))
        facts = pb.EngineFacts(version_text=version, help_text=help_text)
        _store(place, facts)
    facts.name, facts.path, facts.size, facts.sha256 = name, str(path), stat.st_size, digest
    facts.simulated = "simulat" in facts.version_text.lower()
    return facts


def flags_of(help_text: str) -> frozenset[str]:
    """Every flag a usage text names."""
    return frozenset(_FLAG.findall(help_text))


def check_flags(facts: pb.EngineFacts, flags: Sequence[str], allow_unknown: bool = False) -> list[str]:
    """Reasons why this binary would not take these flags as they are meant; empty when it would.

    Values are told from flags by the flag table: a flag this binary's help does not name is refused, whatever the table says.
    """
    offered = flags_of(facts.help_text)
    problems: list[str] = []
    if not offered:
        return (
            []
            if allow_unknown
            else [f"{facts.name or facts.path}: its --help names no flags, so none can be checked: allow unknown flags"]
        )
    at = 0
    while at < len(flags):
        flag = flags[at]
        at += 1
        if not re.fullmatch(r"--?[A-Za-z][\w-]*", flag):
            problems.append(f"{flag!r} is no flag and belongs to none before it")
            continue
        known = BY_SPELLING.get(flag)
        takes_value = known.arity > 0 if known else at < len(flags) and not flags[at].startswith("-")
        if takes_value:
            if at >= len(flags):
                problems.append(f"{flag} needs a value and has none")
                break
            at += 1
        spellings = known.spellings if known else (flag,)
        if offered.isdisjoint(spellings) and not allow_unknown:
            near = [other for other in sorted(offered) if other.startswith(flag[:6]) and other != flag][:3]
            hint = f" (it has {', '.join(near)})" if near else ""
            problems.append(f"{flag}: this engine ({_first_line(facts.version_text)}) does not take it{hint}")
    return problems


def linker_failure(text: str) -> str:
    """The dynamic linker's own line when that is why a program did not start, else empty."""
    for line in text.splitlines():
        if _LINKER.search(line):
            return line.strip()
    return ""


def _ask(binary: str, flag: str, environment: Mapping[str, str] | None, stopping: Callable[[], bool]) -> str:
    """What the binary prints for one flag, both streams (0.19 prints usage on stdout, others on stderr)."""
    try:
        ran = subprocess.Popen(
            [binary, flag],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=clean_environment(environment),
            cwd=os.path.dirname(binary) or "/",
            start_new_session=True,
        )
    except OSError as problem:
        raise EngineError(
            f"{binary} {flag}: {problem.strerror}: is it built for this machine ({os.uname().machine})?"
        ) from problem
    with ran:
        try:
            said = _said(ran, stopping)
        finally:
            # Before it is waited for, so that the number is still its own; what it started goes with it.
            with contextlib.suppress(OSError):
                os.killpg(ran.pid, signal.SIGKILL)
    if said is None:
        why = (
            "the agent stops"
            if stopping()
            else f"no end after {_TIMEOUT_S} s: it is no bmoe-cli, or the phone is frozen"
        )
        raise EngineError(f"{binary} {flag}: {why}")
    texts = [part.decode("utf-8", "replace") for part in said]
    broken = linker_failure(texts[1]) or linker_failure(texts[0])
    if broken:
        raise EngineError(
            f"{binary} does not start: {broken} (put the library beside it and give the engine a library path, "
            "or use a binary with a RUNPATH)"
        )
    if ran.returncode < 0:
        raise EngineError(
            f"{binary} {flag}: ended by signal {-ran.returncode}: {_first_line(texts[1]) or 'it said nothing'}"
        )
    text = texts[0] if texts[0].strip() else texts[1]
    if not text.strip():
        raise EngineError(f"{binary} {flag}: exit {ran.returncode} and no text: it is no bmoe-cli")
    return text


def _said(ran: subprocess.Popen[bytes], stopping: Callable[[], bool]) -> list[bytearray] | None:
    """The beginning of what a program prints on each stream until it ends; None when it does not end.

    Whatever it prints costs no more memory than that, and a process that it left behind is not waited for.
    """
    assert ran.stdout is not None
    assert ran.stderr is not None
    texts = [bytearray(), bytearray()]
    deadline = time.monotonic() + _TIMEOUT_S
    with selectors.DefaultSelector() as waiting:
        for stream, text in zip((ran.stdout, ran.stderr), texts, strict=True):
            waiting.register(stream, selectors.EVENT_READ, text)
        while time.monotonic() < deadline and not stopping():
            ended = os.waitid(os.P_PID, ran.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
            if waiting.get_map():
                ready = waiting.select(0 if ended else _LOOK_S)
            else:
                ready = []
                time.sleep(0 if ended else _LOOK_S)
            for key, _ in ready:
                data = os.read(key.fd, _PIPE_BYTES)
                key.data.extend(data[: max(0, _TEXT_LIMIT - len(key.data))])
                if not data:
                    waiting.unregister(key.fileobj)
            if ended:
                return texts
    return None


def _cached_sha256(binary: str, stat: os.stat_result, cache_dir: Path) -> str:
    mark = f"{binary}\0{stat.st_size}\0{stat.st_mtime_ns}\0{stat.st_ino}"
    place = cache_dir / f"sha256-{hashlib.sha256(mark.encode('utf-8', 'surrogateescape')).hexdigest()[:24]}"
    try:
        known = place.read_text(encoding="ascii").strip()
        if re.fullmatch(r"[0-9a-f]{64}", known):
            return known
    except (OSError, UnicodeDecodeError):
        pass
    digest = hashlib.sha256()
    with open(binary, "rb") as file:
        while part := file.read(_BLOCK):
            digest.update(part)
    write_atomically(place, digest.hexdigest().encode())
    return digest.hexdigest()


def _load(place: Path) -> pb.EngineFacts | None:
    try:
        return json_format.Parse(place.read_bytes(), pb.EngineFacts())
    except (OSError, ValueError, json_format.ParseError):
        return None  # no cache, or a torn one: the binary is asked again


def _store(place: Path, facts: pb.EngineFacts) -> None:
    write_atomically(place, json_format.MessageToJson(facts, indent=None).encode())


def write_atomically(place: Path, data: bytes) -> None:
    """Replace a small file whole. A cache that cannot be written only costs time, so a refusal is not an error."""
    temporary = place.with_name(f".{place.name}.{os.getpid()}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(data)
        os.replace(temporary, place)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")
