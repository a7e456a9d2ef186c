"""Joining of text deltas: pieces of one generation in, bytes and characters out.

An engine cuts its text between bytes, so a line can hold half a character (contract "Per-token lines", field notes 8).
`TextStream` joins the pieces of one text as bytes, honours `reset`, and decodes them as the one byte stream they are:
half a character waits for its other half; U+FFFD stands only for bytes that are truly invalid.
"""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass, field

_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|.)", re.DOTALL)
_utf_8_decode = codecs.utf_8_decode


@dataclass(slots=True)
class TextStream:
    """One text of one generation, growing by deltas."""

    whole: bytearray = field(default_factory=bytearray)
    _waiting: bytes = b""

    @property
    def waiting(self) -> bool:
        """Whether half a character waits for its other half."""
        return bool(self._waiting)

    def add(self, delta: str) -> tuple[bytes, str]:
        """Append a delta (decoded with surrogateescape): its bytes, and the characters it completes."""
        if not self._waiting and delta.isascii():
            data = delta.encode()
            self.whole += data
            return data, delta
        data = delta.encode("utf-8", "surrogateescape")
        self.whole += data
        return data, self._decode(data)

    def replace(self, snapshot: str) -> tuple[bytes, str]:
        """Start over with a full text (`reset`)."""
        self.clear()
        return self.add(snapshot)

    def grow_to(self, cumulative: str) -> tuple[bytes, bool]:
        """Take the whole text so far (engines before 0.18): the new bytes, and whether they replace the old ones."""
        data = cumulative.encode("utf-8", "surrogateescape")
        if data[: len(self.whole)] == self.whole:
            new = data[len(self.whole) :]
            self.whole += new
            return new, False
        self.whole[:] = data
        return data, True

    def clear(self) -> None:
        """Forget everything: a new text begins."""
        self.whole.clear()
        self._waiting = b""

    def _decode(self, data: bytes) -> str:
        stream = self._waiting + data
        text, used = _utf_8_decode(stream, "replace", False)
        self._waiting = stream[used:]
        return text


def so_far(cumulative: bytes) -> str:
    """A growing text as far as its characters are complete."""
    return _utf_8_decode(cumulative, "replace", False)[0]


def without_lone_surrogates(json_text: str) -> str:
    r"""JSON in which `\uD800`-`\uDFFF` escapes that are half a pair stand as `\ufffd`.

    Decoding with surrogateescape uses lone low surrogates for stray bytes, so an escaped one must not look like it.
    """
    out: list[str] = []
    at = 0
    high: re.Match[str] | None = None
    for found in _ESCAPE.finditer(json_text):
        code = int(found.group(1), 16) if found.group(1) else 0
        if high is not None:
            if 0xDC00 <= code <= 0xDFFF and found.start() == high.end():
                high = None
                continue
            out += (json_text[at : high.start()], "\\ufffd")
            at = high.end()
            high = None
        if 0xD800 <= code <= 0xDBFF:
            high = found
        elif 0xDC00 <= code <= 0xDFFF:
            out += (json_text[at : found.start()], "\\ufffd")
            at = found.end()
    if high is not None:
        out += (json_text[at : high.start()], "\\ufffd")
        at = high.end()
    out.append(json_text[at:])
    return "".join(out)
