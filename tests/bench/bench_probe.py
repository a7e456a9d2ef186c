"""What the host's probe costs a phone: CPU of its loop for one sample, and bytes through the link and into the database.

    python tests/bench/bench_probe.py [samples] [shell]

Measured on this machine's processes; a phone has several hundred, so the figure for one process is printed too. What adbd and the
services behind `dumpsys` use is not in it: they show in the samples as processes of their own.
"""

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from bmoe_collector.probe import reading
from bmoe_collector.probe.frames import Frame, FrameParser
from bmoe_collector.probe.processes import listing, own_ticks
from bmoe_collector.probe.script import request, script

TOKEN = "0123abcd"


def run(count: int = 100, shell: Sequence[str] = ("sh",)) -> list[dict[str, Any]]:
    """CPU of the loop for `count` samples, as a share of a core at one sample every 5 s."""
    process = subprocess.Popen(
        [*shell, "-c", script(TOKEN, "be" * 16, "cd" * 16)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    parser, state, stored, through, number = FrameParser(TOKEN), reading.State(), 0, 0, 0
    parser.feed(process.stdout.readline())
    sizes: list[int] = []

    def ask(*asked: tuple[str, str]) -> list[Frame]:
        nonlocal number, through
        process.stdin.write(b"".join(request(number + 1 + at, *one) for at, one in enumerate(asked)))
        process.stdin.flush()
        number += len(asked)
        found: list[Frame] = []
        while len(found) < len(asked):
            data = process.stdout.read1(65536)
            through += len(data)
            found += [one for one in parser.feed(data) if isinstance(one, Frame)]
        return found

    before = own_ticks(ask(("cost", ""))[0].data) or 0
    for at in range(count):
        frames = ask(("files", f"/proc/uptime {reading.fast_files(state)}"), ("procs", ""), ("cost", ""))
        sizes.append(len(listing(frames[1].data)))
        answers = dict(zip(("files", "procs", "cost"), frames, strict=True))
        stored += len(reading.read(state, "fast", answers, (at, 1), whole=False).text)
    after = own_ticks(ask(("cost", ""))[0].data) or 0
    process.stdin.close()
    process.wait(30)
    process.stdout.close()
    each_ms = 10 * (after - before) / count
    mean = sum(sizes) / len(sizes)
    detail = f"{each_ms:.2f} ms CPU a sample of {mean:.0f} processes, {stored / count:.0f} bytes stored, {through // count} sent"
    share = each_ms / 50
    return [
        {"bench": "probe", "what": "host probe every 5 s, % of a core", "ratio": round(share, 3), "limit": "<= 1", "ok": share <= 1, "detail": detail}
    ]  # fmt: skip


if __name__ == "__main__":
    samples = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    print(*run(samples, sys.argv[2].split() if len(sys.argv) > 2 else ["sh"]), sep="\n")
