"""A pressure sidecar (`NAME.metrics` beside `NAME.csv`): bytes in, its values out.

Plain `key=value` lines (generations "Metrics CSV headers"): kilobytes, tenths and thousandths of a degree, as whole numbers; a value
may be empty, which is None. Older metrics CSVs were named `*.metrics` too: those are `metrics.parse_metrics`'s.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bmoe_proto.contract.columns import SIDECAR
from bmoe_proto.contract.metrics import NotOursError
from bmoe_proto.contract.preamble import typed
from bmoe_proto.contract.tables import Problem, Problems
from bmoe_proto.contract.text import readable, to_utf8

_PAIR = re.compile(r"\s*([A-Za-z_]\w*)=(.*?)\s*")


@dataclass(frozen=True, slots=True)
class Sidecar:
    """The values by key, in the file's units; unknown keys are kept."""

    values: Mapping[str, Any]
    problems: Sequence[Problem]


def parse_sidecar(data: bytes) -> Sidecar:
    """Read a sidecar. Raises NotOursError when not one of its keys is known."""
    utf8, _ = to_utf8(data)
    values: dict[str, Any] = {}
    problems = Problems()
    for number, line in enumerate(readable(utf8).split("\n"), 1):
        if not line.strip():
            continue
        found = _PAIR.fullmatch(line)
        if found is None:
            problems.tell(number, f"no key=value: {line[:80]!r}")
            continue
        key, text = found[1], found[2]
        value = typed(text, SIDECAR.get(key)) if text else None
        if key in SIDECAR and isinstance(value, str):
            problems.tell(number, f"{key} is no number: {text[:40]!r}")
            value = None
        values[key] = value
    if not SIDECAR.keys() & values.keys():
        raise NotOursError("no pressure sidecar: none of its keys is there")
    return Sidecar(values, problems)
