"""Labels that file names carry: names in, labels out. Pure.

People name files after what they varied, and a preamble can omit just that. `cache=2000_overlap=1.csv` gives `cache` and
`overlap`; so does `cache2000-k4-run2.csv` (`cache`, `k`, `run`). The whole stem is the label `file`, the folder's name the
label `folder`.
"""

from __future__ import annotations

import os
import re

from bmoe_proto.contract.text import readable_str

from bmoe_collector.importer.grouping import Group

_SPLIT = re.compile(r"[_\s,+]+|-(?=[A-Za-z])|(?<=\d)-")
_EQUALS = re.compile(r"([A-Za-z][\w.-]*)=(.+)")
_NUMBERED = re.compile(r"([A-Za-z]{1,16})[-:]?(\d+(?:\.\d+)?)(?:[A-Za-z%]{0,4})")


def from_name(name: str) -> dict[str, str]:
    """Labels of one name without extension."""
    found: dict[str, str] = {}
    for word in _SPLIT.split(name):
        if told := _EQUALS.fullmatch(word):
            found.setdefault(told[1], told[2])
        elif told := _NUMBERED.fullmatch(word):
            found.setdefault(told[1].lower(), told[2])
    return found


def of(group: Group) -> dict[str, str]:
    """Labels of a group from its stem and folder; the stem's stand over the folder's."""
    folder = readable_str(os.path.basename(os.path.abspath(group.folder)))
    found = from_name(folder) | from_name(group.name)
    return found | {"file": group.name, "folder": folder}
