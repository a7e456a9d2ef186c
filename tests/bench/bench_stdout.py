"""How much a progress line costs beside the least that can be done with it: decode it and read its JSON.

Prints one JSON object a ratio. Run alone: `python tests/bench/bench_stdout.py`.
"""

import json
import time
from collections.abc import Callable
from typing import Any

from bmoe_proto.contract.stdout import StdoutParser

LINES = 20_000
ROUNDS = 7
LIMIT = 2.5


def _lines() -> list[bytes]:
    words = ["The", " history", " of", " computing", " is", " a", " long", " one,", "\\n", " caf\u00e9", "\\u0008", ""]
    out = []
    for step in range(1, LINES + 1):
        wall = 90 + step % 37 + step / 997
        head = (
            f'BMOE_PROGRESS {{"step":{step},"steps":{LINES},"wall_ms":{wall:.1f},"io_ms":{wall / 3:.1f},'
            f'"compute_ms":{wall / 2:.1f},"mgmt_ms":{wall / 90:.1f},"stall_ms":{wall / 7:.1f},"read_mb":{wall / 5:.2f},'
            f'"cache_hit_pct":{40 + step % 50:.1f},"majflt":{step % 3},"cpu_ms":{wall * 3.7:.1f},'
            f'"dense_resident_frac":-1.000,"delta_reasoning":"","delta_text":"{words[step % len(words)]}"}}'
        ).encode()
        # every eleventh token ends in the middle of a character, as real ones do
        out.append(head[:-2] + b'\xe2\x82"}' if step % 11 == 0 else head[:-2] + b'\xac"}' if step % 11 == 1 else head)
    return out


def _seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def run() -> list[dict[str, Any]]:
    """The ratio, its limit, and both figures. Best of interleaved rounds, so that load hits both alike."""
    lines = _lines()
    data = b"\n".join(lines) + b"\n"
    pieces = [data[at : at + (1 << 16)] for at in range(0, len(data), 1 << 16)]

    def least() -> list[Any]:
        return [json.loads(line[14:].decode("utf-8", "surrogateescape")) for line in lines]

    def ours() -> list[Any]:
        parser = StdoutParser()
        return [event for piece in pieces for event in parser.feed(piece)] + parser.close()

    if len(ours()) != LINES:
        raise AssertionError("not every line became an event")
    rounds = [(_seconds(least), _seconds(ours)) for _ in range(ROUNDS)]
    base = min(first for first, _ in rounds) / LINES * 1e6
    cost = min(second for _, second in rounds) / LINES * 1e6
    return [
        {
            "bench": "stdout",
            "what": "progress line: parsed to an event / decoded and json.loads",
            "ratio": round(cost / base, 3),
            "limit": LIMIT,
            "ok": cost / base <= LIMIT,
            "detail": f"{cost:.2f} us a line against {base:.2f} us",
        }
    ]


def main() -> None:
    """Print the ratios."""
    for each in run():
        print(json.dumps(each))


if __name__ == "__main__":
    main()
