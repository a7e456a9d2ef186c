r"""A session's requests as the engine reads them: by text search, not as JSON.

Comes in: a line of stdin, raw bytes. Goes out: `Command`, or None for a line that names no command the engine knows.
A key is the first place where it stands in quotes, wherever that is, so a prompt that holds `"id"` before the real
one answers for it; `\uXXXX` keeps only its low byte (generations: Sessions).
"""

from dataclasses import dataclass, field

_SIMPLE = {ord("n"): b"\n", ord("r"): b"\r", ord("t"): b"\t"}


@dataclass
class Command:
    """One request."""

    cmd: str
    id: int = 0
    prompt: bytes = b""
    n_predict: int = 0
    think: bool = True
    clear_kv: bool = True
    prefix: bytes = b""
    suffix: bytes = b""
    choices: list[bytes] = field(default_factory=list)
    reuse_prefix: bool = True


def parse(line: bytes, n_predict: int, *, think: bool) -> Command | None:
    """Read one line; what it leaves out is the process's own."""
    cmd = _string(line, b"cmd")
    if cmd is None:
        return None
    return Command(
        cmd.decode("utf-8", "replace"),
        _integer(line, b"id", 0),
        _string(line, b"prompt") or b"",
        _integer(line, b"n_predict", n_predict),
        _boolean(line, b"think", default=think),
        _boolean(line, b"clear_kv", default=True),
        _string(line, b"prefix") or b"",
        _string(line, b"suffix") or b"",
        _strings(line, b"choices"),
        _boolean(line, b"reuse_prefix", default=True),
    )


def _value_at(line: bytes, key: bytes) -> int:
    at = line.find(b'"' + key + b'"')
    colon = line.find(b":", at + len(key) + 2) if at >= 0 else -1
    return colon + 1 if colon >= 0 else -1


def _skip(line: bytes, at: int, blanks: bytes) -> int:
    while at < len(line) and line[at] in blanks:
        at += 1
    return at


def _read_string(line: bytes, at: int) -> tuple[bytes, int]:
    """The string that starts at `at` and the index behind it; -1 where there is none."""
    at = _skip(line, at, b" \t")
    if at >= len(line) or line[at] != ord('"'):
        return b"", -1
    out = bytearray()
    at += 1
    while at < len(line):
        byte = line[at]
        if byte == ord('"'):
            return bytes(out), at + 1
        if byte == ord("\\") and at + 1 < len(line):
            code = line[at + 1]
            at += 2
            if code == ord("u"):
                try:
                    out.append(int(line[at : at + 4], 16) & 0xFF)
                except ValueError:
                    out.append(0)
                at += 4
            else:
                out += _SIMPLE.get(code, bytes([code]))
            continue
        out.append(byte)
        at += 1
    return bytes(out), -1


def _string(line: bytes, key: bytes) -> bytes | None:
    at = _value_at(line, key)
    if at < 0:
        return None
    value, end = _read_string(line, at)
    return value if end >= 0 else None


def _strings(line: bytes, key: bytes) -> list[bytes]:
    at = _value_at(line, key)
    at = _skip(line, at, b" \t") if at >= 0 else -1
    if at < 0 or at >= len(line) or line[at] != ord("["):
        return []
    at += 1
    out: list[bytes] = []
    while True:
        at = _skip(line, at, b" \t,")
        if at >= len(line) or line[at] == ord("]"):
            return out
        value, at = _read_string(line, at)
        if at < 0:
            return []
        out.append(value)


def _integer(line: bytes, key: bytes, default: int) -> int:
    at = _value_at(line, key)
    if at < 0:
        return default
    at = _skip(line, at, b" \t")
    end = at + 1 if line[at : at + 1] in {b"-", b"+"} else at
    while end < len(line) and chr(line[end]).isdigit():
        end += 1
    try:
        return int(line[at:end])
    except ValueError:
        return 0


def _boolean(line: bytes, key: bytes, *, default: bool) -> bool:
    at = _value_at(line, key)
    if at < 0:
        return default
    at = _skip(line, at, b" \t")
    return line[at : at + 4] == b"true"
