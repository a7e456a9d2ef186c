"""What kind of file some bytes are, by content alone: names lie (`.metrics` that are CSVs, logs called anything).

In: a file's bytes, or its first and last ones. Out: a `Kind`. Nothing raises.
"""

from __future__ import annotations

import json
import re
from typing import Literal

from bmoe_proto.contract.columns import SIDECAR
from bmoe_proto.contract.metrics import NotOursError, is_header
from bmoe_proto.contract.report import read_line
from bmoe_proto.contract.text import readable, to_utf8
from bmoe_proto.contract.traces import read_header

Kind = Literal[
    "stdout",
    "stderr",
    "metrics",
    "route",
    "compute",
    "compute_layers",
    "io",
    "sidecar",
    "run.json",
    "empty",
    "unknown",
]
"""`stdout` is also a log that holds standard output and standard error together."""

ENOUGH = 1 << 16
"""First and last bytes that are looked at."""

_TELEMETRY = re.compile(rb"^BMOE_(?:LOAD|PROGRESS|READY|BEGIN|DONE|DECIDE|ERROR) \{", re.MULTILINE)
_BANNER = re.compile(rb"^=== (?:answer|perf) ===\r?$", re.MULTILINE)
_USAGE = re.compile(rb"^usage: \S*bmoe", re.MULTILINE | re.IGNORECASE)
_STDERR = re.compile(
    rb"^(?:llama_\w+|print_info|load_tensors|load|gguf_\w+|ggml_\w+|common_\w+|sched_\w+|graph_\w+|~?llama\w*|bmoe|CANNOT LINK EXECUTABLE"
    rb"|config error|error|warning|unknown arg|Segmentation fault|Aborted|terminate called)(?:[: (\"]|$)",
    re.MULTILINE,
)
_REPORT = re.compile(rb"^generation: [^\n]*", re.MULTILINE)
_PAIR = re.compile(rb"^\s*([A-Za-z_]\w*)=", re.MULTILINE)


def recognise(data: bytes) -> Kind:
    """The kind of a file. A long file's middle is not looked at."""
    utf8, _ = to_utf8(data if len(data) <= 2 * ENOUGH else data[:ENOUGH])
    if not utf8.strip():
        return "empty"
    end = utf8 if len(data) <= 2 * ENOUGH else _end(data)
    head = utf8[:ENOUGH]
    if head.lstrip()[:1] == b"{":
        return "run.json" if _is_run(data) else "unknown"
    if head.startswith(b"#"):
        return _preambled(head)
    if any(is_header(readable(line).strip()) for line in head.split(b"\n", 3)[:3]):
        return "metrics"
    if _TELEMETRY.search(head) or _TELEMETRY.search(end) or _BANNER.search(head) or _USAGE.search(head):
        return "stdout"
    if any((line := read_line(readable(found[0]).strip())) and line.facts for found in _REPORT.finditer(end)):
        return "stdout"
    if SIDECAR.keys() & {readable(key) for key in _PAIR.findall(head)}:
        return "sidecar"
    return "stderr" if _STDERR.search(head) else "unknown"


def _end(data: bytes) -> bytes:
    """The last bytes as UTF-8, in a file whose first bytes tell its encoding."""
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        # Where a unit begins is not known when only the ends of a file are at hand: the reading with lines in it is right.
        readings = [to_utf8(data[:2] + data[at:])[0] for at in (-ENOUGH, 1 - ENOUGH)]
        return max(readings, key=lambda text: text.count(b"\n"))
    return data[-ENOUGH:]


def _preambled(head: bytes) -> Kind:
    text = readable(head)
    if text.startswith("# bmoe_metrics v") or any(is_header(line.strip()) for line in text.split("\n", 50)):
        return "metrics"
    try:
        header = read_header(head)
    except NotOursError:
        return "unknown"
    if header.kind == "compute":
        return "compute_layers" if header.granularity == "layers" else "compute"
    return "io" if header.kind == "io" else "route"


def _is_run(data: bytes) -> bool:
    """Whether this is a `run.json`: an object with the argv of a run or its exit."""
    try:
        found = json.loads(to_utf8(data)[0])
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and (isinstance(found.get("argv"), list) or "exit" in found)
