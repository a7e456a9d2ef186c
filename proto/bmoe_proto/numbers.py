"""Text that came from elsewhere to whole numbers. `int` alone refuses what `str.isdigit` lets pass (`²`, 5000 digits), and takes
numbers that no 64 bits hold and no float can stand for.
"""

from __future__ import annotations

_LONGEST = 20  # digits of the largest unsigned 64-bit number


def count(text: str) -> int | None:
    """What a text of nothing but digits says, None for any other."""
    return int(text) if text.isdigit() and text.isascii() and len(text) <= _LONGEST else None


def integer(text: str) -> int | None:
    """What a text of digits with or without a sign says, None for any other."""
    try:
        return int(text) if len(text) <= _LONGEST + 1 else None
    except ValueError:
        return None
