"""Play many schedules, a few at once: `python -m faults.harness [--count N] [--first SEED] [--scale F] [--jobs N]`.

Each is a process of its own. A JSON line each goes to `.cache/faults/<start>.jsonl`, and what a failed one left to
`.cache/faults/seed-N/`. Exit 1 when any of them found a problem.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from faults.harness import made

ROOT = Path(__file__).resolve().parents[3]
CACHE = ROOT / ".cache" / "faults"
ONE_S = 600
PLAYING: set[subprocess.Popen[str]] = set()
STARTING = threading.Lock()
"""Held while one is started, and for good by what ends early."""
SHARED: list[Path] = []
"""The folder that plays share; what ends early removes it."""


def one(seed: int, scale: float) -> int:
    """Play one here, and print its line."""
    from faults.harness.play import play
    from faults.harness.schedule import make

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started is ended
    result = play(make(seed, scale), CACHE)
    print(json.dumps(result.as_dict()), flush=True)
    return 1 if result.problems else 0


def apart(seed: int, scale: float) -> dict[str, Any]:
    """Play one in a process of its own; its line."""
    command = [sys.executable, "-m", "faults.harness", "--one", str(seed), "--scale", str(scale)]
    err = ""
    try:
        with STARTING:
            child = subprocess.Popen(
                command,
                cwd=ROOT / "tests",
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            PLAYING.add(child)
        out, err = child.communicate(timeout=ONE_S)
        return dict(json.loads(out))
    except subprocess.TimeoutExpired:
        why = f"did not end within {ONE_S} s"
    except ValueError:
        why = f"no result: {err[-2000:]}"
    finally:
        child.terminate()
        child.communicate()
        PLAYING.discard(child)
    return {"seed": seed, "scale": scale, "ok": False, "problems": [why]}


def stop(*_: object) -> None:
    """End early: every play ends what it started, and no other is begun."""
    for number in (signal.SIGTERM, signal.SIGINT):  # being told twice must not interrupt it
        signal.signal(number, signal.SIG_IGN)
    STARTING.acquire(timeout=10)
    for child in list(PLAYING):
        child.terminate()
    for child in list(PLAYING):
        child.wait()
    for folder in SHARED:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def main() -> int:
    """Play what was asked for."""
    parser = argparse.ArgumentParser(prog="faults.harness", description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=300, help="how many schedules (300)")
    parser.add_argument("--first", type=int, default=1, help="the first seed (1)")
    parser.add_argument("--scale", type=float, default=0.2, help="factor for every timer (0.2); 1 is as installed")
    parser.add_argument("--jobs", type=int, default=4, help="how many at once (4)")
    parser.add_argument("--one", type=int, metavar="SEED", help="play this one here")
    parser.add_argument("--seeds", help="these seeds, joined by commas, instead of a range")
    asked = parser.parse_args()
    if asked.one is not None:
        return one(asked.one, asked.scale)
    seeds = (
        [int(word) for word in asked.seeds.split(",")] if asked.seeds else range(asked.first, asked.first + asked.count)
    )
    CACHE.mkdir(parents=True, exist_ok=True)
    place = CACHE / time.strftime("%Y%m%d-%H%M%S.jsonl")
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    began = time.monotonic()
    bad: list[int] = []
    played = 0
    with made.shared() as folder, place.open("a") as file, ThreadPoolExecutor(asked.jobs) as pool:
        SHARED.append(folder)
        for line in pool.map(lambda seed: apart(seed, asked.scale), seeds):
            played += 1
            file.write(json.dumps(line) + "\n")
            file.flush()
            if not line["ok"]:
                bad.append(line["seed"])
            word = "ok" if line["ok"] else "; ".join(line["problems"])[:400]
            print(f"{played:4d} seed {line['seed']}: {word} ({line.get('took_s', 0)} s)", flush=True)
    print(
        f"{played} schedules in {time.monotonic() - began:.0f} s, {len(bad)} with problems {bad}; {place}", flush=True
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
