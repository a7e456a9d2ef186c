"""Answers of the loop on the phone (script.py says what they look like): bytes in, `Frame`s out. No sockets, no clocks.

A terminal's CRLF line ends, as very old phones send them, are taken for LF in the loop's own lines. Output larger than `LIMIT` is cut
and said to be.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

LIMIT = 8 << 20
"""Bytes of one answer: the largest useful one is a log of some hundred kilobytes."""


class FramesError(Exception):
    """The loop did not start, or its output is not what it should be; the message holds what came instead."""


@dataclass(frozen=True, slots=True)
class Greeting:
    """How the loop began: "ready", "busy" (another host's loop has this pid) or "nolock"."""

    state: str
    detail: str


@dataclass(frozen=True, slots=True)
class Frame:
    """One answer. Uptimes are seconds of the phone's /proc/uptime, None where this shell may not read it."""

    number: int
    status: int
    data: bytes
    uptime_before_s: float | None
    uptime_after_s: float | None
    cut: bool = False


class FrameParser:
    """Feed it what came; it gives back what is whole."""

    def __init__(self, token: str) -> None:
        """`token` is the loop's own."""
        self._mark = b"#bmoe-" + token.encode() + b" "
        self._buffer = bytearray()
        self._scanned = 0  # a mark does not begin before this
        self._open: tuple[int, float | None] | None = None
        self._greeted = False
        self._cut = False

    def feed(self, data: bytes) -> list[Greeting | Frame]:
        """Everything that `data` completes. Raises FramesError for output that cannot be the loop's."""
        self._buffer += data
        found: list[Greeting | Frame] = []
        while (line := self._line()) is not None:
            before, words = line
            if len(words) >= 2 and words[0] == "0" and words[1] in {"ready", "busy", "nolock"}:
                self._greeted = self._greeted or words[1] != "nolock"
                found.append(Greeting(words[1], " ".join(words[2:])))
            elif self._open is not None and len(words) >= 3 and words[1] == "end":
                number, uptime = self._open
                self._open = None
                if words[0] == str(number):
                    body = before.removesuffix(b"\r\n") if before.endswith(b"\r\n") else before.removesuffix(b"\n")
                    status = int(words[2]) if words[2].isdigit() else 255
                    after = _seconds(words[3]) if len(words) > 3 else None
                    found.append(Frame(number, status, body, uptime, after, self._cut))
                self._cut = False
            elif words and words[0].isdigit():
                self._open = (int(words[0]), _seconds(words[1]) if len(words) > 1 else None)
        if len(self._buffer) > LIMIT:
            if not self._greeted:
                raise FramesError(f"the shell prints something else than the loop: {bytes(self._buffer[:200])!r}")
            del self._buffer[LIMIT // 2 : -4096]
            self._scanned, self._cut = 0, True
        return found

    @property
    def unread(self) -> str:
        """What came and is no frame: the shell's own words when it could not start the loop."""
        return bytes(self._buffer[-400:]).decode("utf-8", "replace").strip()

    def _line(self) -> tuple[bytes, list[str]] | None:
        """The next whole line of the loop's, and the bytes before it."""
        at = self._scanned
        while (at := self._buffer.find(self._mark, at)) >= 0:
            if at and self._buffer[at - 1] != 0x0A:
                at += 1
                continue
            end = self._buffer.find(b"\n", at)
            if end < 0:
                self._scanned = at
                return None
            words = bytes(self._buffer[at + len(self._mark) : end]).decode("ascii", "replace").split()
            before = bytes(self._buffer[:at])
            del self._buffer[: end + 1]
            self._scanned = 0
            return before, words
        self._scanned = max(0, len(self._buffer) - len(self._mark))
        return None


def _seconds(text: str) -> float | None:
    return float(text) if re.fullmatch(r"\d{1,12}(\.\d{1,9})?", text) else None


_HEADER = re.compile(rb"(?:\A|\n)==> (/[^\n]*?) <==\r?\n")


def split_files(data: bytes) -> dict[str, bytes]:
    """Output of `files`: path to its bytes. head puts an empty line between two files, which is not theirs."""
    heads = list(_HEADER.finditer(data))
    found: dict[str, bytes] = {}
    for place, match in enumerate(heads):
        end = heads[place + 1].start() if place + 1 < len(heads) else len(data)
        found[match[1].decode("utf-8", "replace")] = data[match.end() : end]
    return found


_FAILED = re.compile(rb"(?:\A|\n)<== (\d+)\r?\n?\Z")


def split_tries(data: bytes) -> dict[str, bytes | str]:
    """Output of `try`: path to its bytes, or to the text of the refusal. An empty line ends each file."""
    found: dict[str, bytes | str] = {}
    for path, body in split_files(data.removesuffix(b"\n")).items():
        failed = _FAILED.search(body)
        found[path] = body if failed is None else refusal(body[: failed.start()].decode("utf-8", "replace"))
    return found


def refusal(said: str) -> str:
    """The reason in what a command said: `cat: /proc/stat: Permission denied` to `Permission denied`."""
    last = said.splitlines()[-1].strip() if said.strip() else ""
    return last.rsplit(": ", 1)[-1] or "it said nothing"
