"""The console that tables for eyes are printed on.

In: stdout. Out: a console as wide as the terminal, or as COLUMNS says; a pipe has no width of its own and gets `PIPE` columns.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

PIPE = 120


def console() -> Console:
    """A console on stdout that paints nothing by itself."""
    from rich.console import Console

    wide = None if sys.stdout.isatty() or os.environ.get("COLUMNS") else PIPE
    return Console(highlight=False, width=wide)
