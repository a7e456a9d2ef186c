"""Text from engines, phones and files made harmless for a terminal: any string or bytes in, printable text out.

Generated text can hold anything: escape sequences that repaint the screen or set its title, carriage returns that
overwrite what was printed, right-to-left overrides that reorder it, NUL. Each such character is shown as what it is
and never acts. The stored text is untouched; only its display goes through here.
"""

from __future__ import annotations

import unicodedata

_SHORT = {"\a": "\\a", "\b": "\\b", "\f": "\\f", "\r": "\\r", "\v": "\\v", "\0": "\\0", "\x1b": "\\e"}
# Control, format (bidirectional overrides, zero-width), surrogate, private use, unassigned, line and paragraph breaks.
_HARMFUL = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def _shown(character: str) -> str:
    if character in _SHORT:
        return _SHORT[character]
    code = ord(character)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def escape(text: object, *, lines: bool = False) -> str:
    """`text` with every character that could act on a terminal written out; line feeds and tabs stay if `lines`.

    Bytes are decoded as UTF-8 first; invalid ones show as U+FFFD.
    """
    whole = text.decode("utf-8", "replace") if isinstance(text, (bytes, bytearray)) else str(text)
    if whole.isascii() and whole.isprintable():
        return whole
    kept = "\n\t" if lines else ""
    out = []
    for character in whole:
        if character in kept or (character.isprintable() and unicodedata.category(character) not in _HARMFUL):
            out.append(character)
        elif character in "\n\t":
            out.append("\\n" if character == "\n" else "\\t")
        else:
            out.append(_shown(character))
    return "".join(out)


def clip(text: object, width: int) -> str:
    """One escaped line of at most `width` characters, an ellipsis where something was cut."""
    shown = escape(text)
    return shown if len(shown) <= width else shown[: max(width - 1, 0)] + "…"
