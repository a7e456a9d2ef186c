"""What `compare` promises: how often it calls equal settings different, and how often it sees a true 5 % effect.

Simulated interleaved campaigns (`support/campaigns.py`): autocorrelated tokens, a random walk of the phone between runs, single
runs that spread by 5 %. A figure is a count or a share, not a time, so it is the same on any machine. Prints one JSON object a
figure. Run alone: `python tests/bench/bench_compare.py`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.campaigns import called_different

EQUAL, MOST = 500, 37
"""A 5 % test passes this bound 99 times in 100."""
EFFECT, CAMPAIGNS = 0.05, 400


def run() -> list[dict[str, Any]]:
    """The figures."""
    wrong = sum(called_different(6 + seed % 5, 0.0, [seed]) for seed in range(EQUAL))
    rows = [
        {
            "bench": "compare",
            "what": f"equal settings called different, of {EQUAL} campaigns",
            "ratio": wrong,
            "limit": MOST,
            "ok": wrong <= MOST,
            "detail": "6 to 10 interleaved pairs",
        }
    ]
    for pairs in (6, 10, 20):
        seen = called_different(pairs, EFFECT, range(10_000, 10_000 + CAMPAIGNS)) / CAMPAIGNS
        rows.append(
            {
                "bench": "compare",
                "what": f"power at a true {EFFECT:.0%} effect with {pairs} pairs",
                "ratio": seen,
                "limit": None,
                "ok": True,
                "detail": f"{CAMPAIGNS} campaigns, reported without a limit",
            }
        )
    return rows


if __name__ == "__main__":
    for row in run():
        print(json.dumps(row))
