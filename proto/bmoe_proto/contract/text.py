"""The encodings engine text is found in: UTF-8 with or without BOM, UTF-16 with BOM, LF or CRLF.

In: bytes in any pieces. Out: UTF-8 bytes without BOM. Bytes that are no UTF-8 pass through untouched, since deltas and
answers are byte streams and are decoded only once whole (design, "bmoe events"). Line ends are left to the reader of
each format, because a carriage return inside generated text is text.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass, field

_UTF8_BOM = codecs.BOM_UTF8
_UTF16_BOMS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


@dataclass(slots=True)
class Utf8Stream:
    """Turns a byte stream into UTF-8 without BOM, deciding by its first bytes."""

    encoding: str = ""  # "", until decided; then "utf-8", "utf-8-sig" or "utf-16"
    _head: bytes = b""
    _utf16: codecs.IncrementalDecoder | None = field(default=None, repr=False)

    def feed(self, data: bytes) -> bytes:
        """UTF-8 of what is certain so far; the first bytes may wait until a BOM can be told from text."""
        if self._utf16 is not None:
            return _encode(self._utf16.decode(data))
        if self.encoding:
            return data
        head = self._head + data
        if head.startswith(_UTF16_BOMS):
            self.encoding = "utf-16"
            self._utf16 = codecs.getincrementaldecoder("utf-16")(errors="replace")
            return _encode(self._utf16.decode(head))
        if head.startswith(_UTF8_BOM):
            self.encoding = "utf-8-sig"
            return head[3:]
        if len(head) < 3 and any(bom.startswith(head) for bom in (_UTF8_BOM, *_UTF16_BOMS)):
            self._head = head
            return b""
        self.encoding = "utf-8"
        return head

    def close(self) -> bytes:
        """What was still waiting; half a UTF-16 unit becomes U+FFFD."""
        if self._utf16 is not None:
            return _encode(self._utf16.decode(b"", final=True))
        if self.encoding:
            return b""
        self.encoding = "utf-8"
        return self._head


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def to_utf8(data: bytes) -> tuple[bytes, str]:
    """A whole file as UTF-8 without BOM, and the encoding it was in."""
    stream = Utf8Stream()
    out = stream.feed(data) + stream.close()
    return out, stream.encoding


def readable(data: bytes) -> str:
    """Bytes for a human or for JSON: U+FFFD for what is not UTF-8."""
    return data.decode("utf-8", "replace")


def readable_str(text: str) -> str:
    """Text decoded with surrogateescape, its stray bytes replaced by U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
