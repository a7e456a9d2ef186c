"""`key=value` text of `#` lines: preambles and trailers in, typed values out.

Keys are whitespace-separated and order-independent; a value reaches to the next key, so `model=` may hold spaces (field
notes 8). Inside a model's name only keys of the table end it, since a file name may hold ` a=b` too. Values are typed by the
table; an unknown key's value is a number when it reads as one.
"""

from __future__ import annotations

import math
import re
from typing import Any

from bmoe_proto.contract.columns import Column, Table

_KEY = re.compile(r"(?:(?<=\s)|^)([A-Za-z_][A-Za-z0-9_./-]*)=")
_INT = re.compile(r"[-+]?\d{1,18}")
_FLOAT = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?(?:nan|inf)", re.IGNORECASE)


def read_pairs(text: str, table: Table) -> dict[str, Any]:
    """The pairs of one line's text (without its `#`), by the engine's spelling."""
    return {key: typed(value, table.get(key)) for key, value in raw_pairs(text, table)}


def raw_pairs(text: str, table: Table) -> list[tuple[str, str]]:
    """The pairs of a text as written."""
    starts: list[re.Match[str]] = []
    for found in _KEY.finditer(text):
        if starts and starts[-1][1] == "model" and found[1] not in table:
            continue
        starts.append(found)
    if not starts:
        return []
    ends = [found.start() for found in starts[1:]] + [len(text)]
    return [(found[1], text[found.end() : end].strip()) for found, end in zip(starts, ends, strict=True)]


def typed(text: str, column: Column | None) -> Any:
    """A value as its column says it is; as text where it is not what the column promises; None where unmeasured."""
    if column is not None and column.type == "str":
        return text
    if not text and column is not None:
        return None
    value: int | float
    if _INT.fullmatch(text):
        value = int(text)
        if column is not None and column.type == "float":
            value = float(value)
    elif _FLOAT.fullmatch(text):
        value = float(text)
        if not math.isfinite(value):
            return None
    else:
        return text
    return None if column is not None and column.minus_one and value == -1 else value
