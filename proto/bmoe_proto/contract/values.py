"""One telemetry object: the JSON text behind a `BMOE_<TAG>` in, values as the table of columns promises them out.

Engines write JSON with printf: strings hold raw bytes that need not be UTF-8, control bytes stand unescaped, and numbers
may be `nan`, `-nan` or `inf`. Strings come out decoded with surrogateescape where they are text to be joined as bytes,
readable otherwise. This is the one place that turns a contract's -1 into None (law 5).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from bmoe_proto.contract.columns import Column, Table
from bmoe_proto.contract.deltas import without_lone_surrogates
from bmoe_proto.contract.text import readable_str

INF = math.inf
INT64 = 1 << 63
# A string without an end is taken whole, so that a line of nothing but quotes is gone through once.
_NOT_JSON = re.compile(r'"(?:[^"\\]|\\.)*"?|[-+]?\b(?:nan|inf|infinity)\b', re.IGNORECASE | re.DOTALL)
_decode_json = json.JSONDecoder(strict=False, parse_constant=lambda _: None).raw_decode


class MalformedError(ValueError):
    """A telemetry line that is not what its tag promises."""


def json_object(line: bytes, at: int) -> dict[str, Any]:
    """The JSON object that is the rest of a line, its strings decoded with surrogateescape.

    Raises ValueError (RecursionError for absurd nesting) for anything else.
    """
    text = line.decode("utf-8", "surrogateescape")
    if "\\ud" in text or "\\uD" in text:
        text = without_lone_surrogates(text)
    try:
        found, end = _decode_json(text, at)
    except json.JSONDecodeError:
        text = _NOT_JSON.sub(lambda m: m[0] if m[0][0] == '"' else "null", text)
        found, end = _decode_json(text, at)
    if type(found) is not dict or (end != len(text) and text[end:].strip()):
        raise MalformedError
    return found


def checked(column: Column, value: Any) -> Any:
    """A value as its column promises it; None for what is unmeasured or not finite. Raises MalformedError."""
    if value is None:
        return None
    kind = column.type
    if kind in ("int", "float"):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise MalformedError
        if (column.minus_one and value == -1) or value in (INF, -INF):
            return None
        if kind == "float":
            if isinstance(value, int) and not -INT64 <= value < INT64:
                raise MalformedError
            return value
        if value != int(value) or not -INT64 <= value < INT64:
            raise MalformedError
        return int(value)
    if kind == "bool":
        if isinstance(value, (bool, int)) and value in (0, 1):
            return bool(value)
        raise MalformedError
    if not isinstance(value, str if kind == "str" else list):
        raise MalformedError
    return clean(value)


def clean(value: Any) -> Any:
    """A value of an unknown key, or inside one: strings readable, numbers finite."""
    if isinstance(value, str):
        return readable_str(value)
    if isinstance(value, float):
        return None if value in (INF, -INF) else value
    if isinstance(value, list):
        return [clean(each) for each in value]
    if isinstance(value, dict):
        return {readable_str(key): clean(each) for key, each in value.items()}
    return value


def checked_all(table: Table, found: Mapping[str, Any]) -> dict[str, Any]:
    """Every value of an object by its table; unknown keys stay under their names."""
    out: dict[str, Any] = {}
    for key, value in found.items():
        column = table.get(key)
        out[readable_str(key)] = clean(value) if column is None else checked(column, value)
    return out


def take_text(found: dict[str, Any], key: str) -> str | None:
    """Take a text out of an object, still decoded with surrogateescape. Raises MalformedError for what is no text."""
    value = found.pop(key, None)
    if value is not None and not isinstance(value, str):
        raise MalformedError
    return value


class Shapes:
    """Remembers what lines look like: those of one engine have the same keys with the same types of values.

    For a shape seen before, only what can differ between two such lines is looked at: -1, infinities, huge integers.
    """

    _MOST = 64

    def __init__(self, table: Table, required: str) -> None:
        self._table = table
        self._required = required
        self._known: dict[Any, tuple[tuple[str, ...], tuple[str, ...]] | None] = {}

    def check(self, found: dict[str, Any]) -> dict[str, Any]:
        """The values of an object by the table; `found` itself where nothing had to change. Raises MalformedError."""
        kinds = found.values()
        signature = (tuple(found), tuple(map(type, kinds)))
        try:
            plain = self._known[signature]
        except KeyError:
            plain = self._learn(found, signature)
        if plain is None or INF in kinds or -INF in kinds:
            return checked_all(self._table, found)
        sentinels, ints = plain
        for key in ints:
            if not -INT64 <= found[key] < INT64:
                raise MalformedError
        for key in sentinels:
            if found[key] == -1:
                found[key] = None
        return found

    def _learn(self, found: dict[str, Any], signature: Any) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
        if not isinstance(found.get(self._required), (int, float)):
            raise MalformedError
        checked_all(self._table, found)
        plain = all(self._is_plain(key, value) for key, value in found.items())
        known = None
        if plain:
            sentinels = tuple(key for key in found if key in self._table and self._table[key].minus_one)
            ints = tuple(key for key, value in found.items() if isinstance(value, int) and not isinstance(value, bool))
            known = (tuple(key for key in sentinels if found[key] is not None), ints)
        if len(self._known) >= self._MOST:
            self._known.clear()
        self._known[signature] = known
        return known

    def _is_plain(self, key: str, value: Any) -> bool:
        """Whether a value of this type needs no conversion under this key, whatever it is."""
        column = self._table.get(key)
        if column is None:
            return key.isascii() and isinstance(value, (int, float, bool, type(None)))
        if value is None:
            return True
        return column.type == "float" or (column.type == "int" and type(value) is int)
