"""What a column meant in the build that wrote it: a version text in, the meaning (or None, not known) out.

`stall_ms` changed meaning without a new name: the summed waits of the compute threads divided by their number up to
0.19, the union of the stalled intervals from 0.23; between the two, and for an unknown build, nobody can say
(generations.md, Standard output). A number of unknown meaning compares with nothing.
"""

from __future__ import annotations

import re
from collections.abc import Collection

Version = tuple[int, ...]

STALL_MEAN = "per-thread mean"
STALL_UNION = "union of intervals"

_VERSION = re.compile(r"(?<![\w.])v?(\d+)\.(\d+)(?:\.(\d+))?")


def version_of(text: object) -> Version | None:
    """The (major, minor, patch) in a version text like "0.19.0" or "bmoe-cli 0.23.1 (sim)"; None without one."""
    found = _VERSION.search(str(text)) if text else None
    return tuple(int(part or 0) for part in found.groups()) if found else None


def stall_meaning(version: Version | None) -> str | None:
    """What `stall_ms`, `stall_s_tok` and `prefill_stall_s` measure in this build."""
    if version is None:
        return None
    if version[:2] <= (0, 19):
        return STALL_MEAN
    return STALL_UNION if version[:2] >= (0, 23) else None


def default_cache_mb(version: Version | None) -> int | None:
    """What leaving `--cache-mb` out means: 0 up to 0.23, later possibly `auto` (None: ask the preamble)."""
    return 0 if version is not None and version[:2] <= (0, 23) else None


def version_by_columns(columns: Collection[str], preamble_version: int | None) -> Version | None:
    """The newest version that can have written a metrics file which does not name its engine.

    A v1 preamble and every file without a preamble are from before 0.17 (generations.md, Metrics CSV headers), which
    settles what their columns mean although the version itself is not known.
    """
    if preamble_version == 1:
        return (0, 16, 0)
    if preamble_version is None and columns and "loop_overhead_ms" not in columns:
        return (0, 16, 0)
    return None
