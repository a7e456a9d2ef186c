"""Where a token's time went, as the app's panel shows it: means per token in, four bars out.

Attribution components, not a partition of wall time (contract, "Per-token lines", `majflt` / `cpu_ms`):

- **cpu** = `cpu` / compute threads: an upper bound on compute-thread time, since process CPU holds the I/O lanes' too.
- **flash** = `io` in serial mode, `stall` under overlap, as measured.
- **mgmt** = cache management, `adopt` being a named part of it.
- **unattributed** = what is left of the wall time, never below zero, and nothing is rescaled to make 100 %.

`compute_ms` is a clamped residual and no bar; `drain` and `ra_*` are named parts of that residual. Two diagnostics keep
their own denominators: CPU occupancy = cpu / (wall x compute threads) as the report prints it, and
CPU-busy = cpu / (wall x busy threads), busy threads including the I/O lanes under overlap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bmoe_collector.meaning.config import Config
from bmoe_collector.meaning.numbers import number, ratio, total
from bmoe_collector.record import Rows

TERMS = ("io", "stall", "mgmt", "cpu", "compute", "drain", "adopt", "ra_issue", "ra_wd")
_SUMMARY = {
    "io": "io_s_tok",
    "stall": "stall_s_tok",
    "mgmt": "mgmt_s_tok",
    "cpu": "cpu_s_tok",
    "compute": "compute_s_tok",
    "drain": "drain_s_tok",
    "adopt": "adopt_s_tok",
}
_SUMMARY_MS = {"ra_issue": "ra_issue_ms_tok", "ra_wd": "ra_wd_ms_tok"}


@dataclass(frozen=True, slots=True)
class Bars:
    """Seconds of one token, or of one prefill; None where a term was not measured."""

    wall_s: float | None
    cpu_s: float | None
    flash_s: float | None
    mgmt_s: float | None
    unattributed_s: float | None

    def to_json(self) -> dict[str, float | None]:
        """A JSON object of the same names."""
        return asdict(self)


def terms_of(summary: Mapping[str, Any], rows: Rows, at: Sequence[int]) -> dict[str, float | None]:
    """Seconds per token of each measured term: from the rows where all are there, else from the end record.

    The rows are finer (a trailer prints three decimals); a cut or partial set of rows would miss part of the turn, but
    then there is no end record either.
    """
    found: dict[str, float | None] = {}
    for term in TERMS:
        column = f"{term}_ms"
        values = [rows.columns[column][index] for index in at] if column in rows.columns else []
        whole = total(values)
        told = number(summary.get(_SUMMARY[term])) if term in _SUMMARY else None
        if term in _SUMMARY_MS and (milliseconds := number(summary.get(_SUMMARY_MS[term]))) is not None:
            told = milliseconds / 1e3
        found[term] = whole / len(values) / 1e3 if whole is not None else told
    return found


def bars(wall_s: float | None, terms: Mapping[str, float | None], config: Config) -> Bars:
    """The four bars of the decode phase."""
    return _bars(
        wall_s, terms.get("cpu"), flash_wait(terms.get("io"), terms.get("stall"), config), terms["mgmt"], config
    )


def flash_wait(io_s: float | None, stall_s: float | None, config: Config) -> float | None:
    """`io` serial, `stall` under overlap; an engine that does not stream waits for no read of its own."""
    if config.streaming is False:
        return 0.0
    if config.overlap is None:
        return None
    return stall_s if config.overlap else io_s


def prefill_bars(summary: Mapping[str, Any], prefill_s: float | None, config: Config) -> Bars:
    """The same of the prompt phase (contract, "Session mode", the `prefill_*` keys); absent before 0.23."""
    wait = flash_wait(number(summary.get("prefill_io_s")), number(summary.get("prefill_stall_s")), config)
    told = any(summary.get(key) is not None for key in ("prefill_io_s", "prefill_cpu_s", "prefill_mgmt_s"))
    if not told:
        return Bars(prefill_s, None, None, None, None)
    return _bars(prefill_s, number(summary.get("prefill_cpu_s")), wait, number(summary.get("prefill_mgmt_s")), config)


def _bars(
    wall_s: float | None, cpu_s: float | None, flash_s: float | None, mgmt_s: float | None, config: Config
) -> Bars:
    compute = ratio(cpu_s, config.threads)
    rest = None
    if wall_s is not None and compute is not None and flash_s is not None:
        rest = max(0.0, wall_s - compute - flash_s - (mgmt_s or 0.0))
    return Bars(wall_s, compute, flash_s, mgmt_s, rest)


def occupancy(cpu_s: float | None, wall_s: float | None, threads: int | None) -> float | None:
    """Share of `threads` that were computing: near 1 is compute-bound, well below is throttled, preempted, blocked."""
    return None if threads is None or wall_s is None else ratio(cpu_s, wall_s * threads)
