"""Numbers as a person reads them: a value or None in, short text out. None is "–", never 0 (law 5)."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

NOTHING = "–"
_BARS = "▁▂▃▄▅▆▇█"


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    """`value` with at most `digits` decimals and its unit."""
    if value is None or not math.isfinite(value):
        return NOTHING
    text = f"{value:.{digits}f}" if digits else f"{value:.0f}"
    return f"{text} {unit}" if unit else text


def significant(value: float | None, unit: str = "") -> str:
    """`value` with three digits that mean something, whatever its size."""
    if value is None or not math.isfinite(value):
        return NOTHING
    digits = 0 if value == 0 else max(0, 2 - math.floor(math.log10(abs(value))))
    return number(value, min(digits, 6), unit)


def share(value: float | None, digits: int = 1) -> str:
    """A fraction as per cent."""
    return NOTHING if value is None or not math.isfinite(value) else f"{100 * value:.{digits}f} %"


def mib(value: float | None) -> str:
    """Mebibytes, gibibytes from 10 GiB on."""
    if value is None or not math.isfinite(value):
        return NOTHING
    return f"{value / 1024:.1f} GiB" if value >= 10240 else f"{value:.0f} MiB" if value >= 10 else f"{value:.1f} MiB"


def size(value: float | None) -> str:
    """Bytes."""
    if value is None:
        return NOTHING
    return (
        f"{value:.0f} B" if value < 10240 else f"{value / 1024:.0f} KiB" if value < 1 << 20 else mib(value / (1 << 20))
    )


def seconds(value: float | None) -> str:
    """A duration: milliseconds below one second, minutes from two of them on."""
    if value is None or not math.isfinite(value):
        return NOTHING
    if abs(value) < 1:
        return significant(value * 1e3, "ms")
    return f"{value:.2f} s" if value < 120 else f"{value / 60:.1f} min"


def yes(value: object) -> str:
    """A flag."""
    return NOTHING if value is None else "yes" if value else "no"


def wall(wall_ns: int | None) -> str:
    """A wall-clock time of this host's zone."""
    if not wall_ns:
        return NOTHING
    return time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(wall_ns / 1e9))


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """A curve in one line: means of equal stretches between the lowest and the highest value."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return ""
    count = min(width, len(known))
    means = []
    for at in range(count):
        part = known[at * len(known) // count : (at + 1) * len(known) // count]
        means.append(sum(part) / len(part))
    low, high = min(means), max(means)
    if high - low <= abs(high) * 1e-9:
        return _BARS[3] * count
    return "".join(_BARS[min(int((mean - low) / (high - low) * len(_BARS)), len(_BARS) - 1)] for mean in means)


def bar(part: float | None, whole: float | None, width: int = 30) -> str:
    """A bar as long as the part is of the whole; over the whole it ends in an arrow, because nothing is rescaled."""
    if part is None or part <= 0 or not whole or whole <= 0:
        return ""
    length = part / whole * width
    if length > width:
        return "█" * (width - 1) + "▶"
    full = int(length)
    return "█" * full + ("▌" if length - full >= 0.5 else "")
