"""Progress lines of the usual shape, read without JSON: for whoever takes tokens by the thousand.

In: bytes at the start of a line. Out: a match whose groups are the texts of the values, in the order of `VALUES`, with
those of the BMOE_LOAD before them. `StdoutParser` is the reader of the format and defines what a line means; this is its
short cut for lines with every key of the contract in the contract's order, plain ASCII text without escapes, and a step
after the first. Whatever does not match is the parser's, which is told what was taken (`StdoutParser.took`).
"""

from __future__ import annotations

import re

from bmoe_proto.contract.columns import PROGRESS

VALUES = tuple(name for name, column in PROGRESS.items() if column.type != "str" and name != "reset")
"""The values of a line, in the order of the groups behind the two of BMOE_LOAD."""

_NUMBER = {"int": rb"(\d{1,15})", "float": rb"(\d{1,15}\.\d{1,9})"}
_TEXT = rb'"([^"\\\x00-\x1f\x7f-\xff]*)"'


def _value(name: str) -> bytes:
    column = PROGRESS[name]
    if name == "step":
        return rb"([2-9]|[1-9]\d{1,8})"  # the first step may begin a new text, which the parser must see
    if column.minus_one:
        return rb"(-1(?:\.0{1,9})?|\d{1,15}\.\d{1,9})"
    return _NUMBER[column.type]


LINE = re.compile(
    rb'(?:BMOE_LOAD \{"mb":(\d{1,15}\.\d{1,9}),"ms":(\d{1,15}\.\d{1,9})\}\n)?BMOE_PROGRESS \{'
    + b",".join(b'"%s":%s' % (name.encode(), _value(name)) for name in VALUES)
    + rb',"delta_reasoning":'
    + _TEXT
    + rb',"delta_text":'
    + _TEXT
    + rb"\}\n"
)
"""A whole line with its end, and the BMOE_LOAD line before it where there is one."""
