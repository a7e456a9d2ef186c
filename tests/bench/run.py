"""Run every bench and print what it found: `python tests/bench/run.py [NAME…]`.

Each `bench_*.py` beside this file has `run() -> list[dict]` with bench, what, ratio, limit, ok and detail; ratios are measured side
by side with their baseline in the same run. Out: a table, and one JSON object a line in .cache/bench.jsonl. Exit 1 when a limit
is missed or a bench breaks. Figures mean something on a quiet machine only; the load at the start is printed with them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
OUT = HERE.parent.parent / ".cache" / "bench.jsonl"


def main(names: list[str]) -> int:
    """Run the named benches, or all."""
    sys.path[:0] = [str(HERE), str(HERE.parent)]
    found = sorted(path.stem.removeprefix("bench_") for path in HERE.glob("bench_*.py"))
    unknown = set(names) - set(found)
    if unknown:
        print(f"no bench {', '.join(sorted(unknown))}: there are {', '.join(found)}", file=sys.stderr)
        return 2
    print(f"load {os.getloadavg()[0]:.1f} at the start")
    OUT.parent.mkdir(exist_ok=True)
    missed = 0
    for name in names or found:
        started = time.monotonic()
        try:
            rows = _load(name).run()
        except Exception:
            traceback.print_exc()
            rows = [{"bench": name, "what": "broke", "ratio": None, "limit": None, "ok": False, "detail": ""}]
        with OUT.open("a") as out:
            for row in rows:
                out.write(json.dumps({**row, "at": time.time()}, default=str) + "\n")
                missed += not row["ok"]
                verdict = "ok" if row["ok"] else "MISSED"
                print(
                    f"{verdict:<7}{row['bench']:<12}{row['what']}: {row['ratio']} (limit {row['limit']}) {row['detail']}",
                    flush=True,
                )
        print(f"       {name} took {time.monotonic() - started:.0f} s", flush=True)
    return 1 if missed else 0


def _load(name: str):
    spec = importlib.util.spec_from_file_location(f"bench_{name}", HERE / f"bench_{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
