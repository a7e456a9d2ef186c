"""A run's rows and end records with law 5 applied: a RunRecord in, values in which unmeasured is None, zero is zero out.

The contract's -1 became None at the parser. What is left is the 0 of a platform that cannot report, which only the
run as a whole can tell from a true zero (law 5; contract, "Per-token rows"): fault and CPU columns are unmeasured when
`cpu_ms` is never positive, process memory when `rss_mib` never is, device memory when `mem_available_mib` never is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bmoe_collector.meaning.numbers import known
from bmoe_collector.record import Rows, RunRecord, TurnRecord

GROUPS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("cpu", "cpu_ms", ("cpu_ms", "majflt", "majflt_mib")),
    ("process memory", "rss_mib", ("rss_mib", "rss_anon_mib", "rss_file_mib", "swap_mib")),
    ("device memory", "mem_available_mib", ("mem_available_mib", "mem_free_mib", "swap_free_mib")),
)
"""Group, the column that is positive wherever the platform can report, and the columns it speaks for."""

SUMMARY_GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("cpu_s_tok", ("cpu_s_tok", "majflt_tok")),
    ("prefill_cpu_s", ("prefill_cpu_s",)),
)
"""The same for the summary's keys."""


def _ever_positive(values: Iterable[Any]) -> bool:
    return any(value > 0 for value in known(values))


def unmeasured_groups(record: RunRecord) -> tuple[str, ...]:
    """Names of the groups this platform did not report although the columns are there."""
    rows = record.tokens()
    out = []
    for group, witness, columns in GROUPS:
        there = any(known(rows.get(column)) for column in columns if column in rows.columns)
        told = _ever_positive(rows.get(witness)) if witness in rows.columns else False
        if group == "cpu" and not told:
            # Rows printed in tenths of a millisecond may round a real cost to 0.0; the summary has the mean.
            told = _ever_positive(turn.summary.get("cpu_s_tok") for turn in record.turns)
        if there and not told:
            out.append(group)
    return tuple(out)


def rows_of(record: RunRecord) -> Rows:
    """One row a token (the CSV's value over stdout's), None wherever the platform could not report."""
    rows = record.tokens()
    gone = set(unmeasured_groups(record))
    hidden = {column for group, _, columns in GROUPS if group in gone for column in columns}
    if not hidden & set(rows.columns):
        return rows
    return Rows(
        {name: [None] * len(rows) if name in hidden else list(values) for name, values in rows.columns.items()},
    )


def generations(record: RunRecord) -> list[tuple[TurnRecord, Mapping[str, Any]]]:
    """Each generation with its end record; decisions and rejected requests are not among them.

    A one-shot's report gives what its trailer does not (or all of it, without a CSV): its numbers carry the same names.
    A record that has rows and no turns at all gets one generation for each turn number in the rows.
    """
    found: list[tuple[TurnRecord, Mapping[str, Any]]] = [
        (turn, turn.summary)
        for turn in record.turns
        if turn.turn is not None and turn.decide is None and turn.error is None
    ]
    if not found and not record.turns:
        rows = record.tokens()
        numbers = list(dict.fromkeys(rows.get("turn"))) or ([0] if record.report else [])
        found = [(TurnRecord(turn, None, None, cancelled=False, text=b"", reasoning=b""), {}) for turn in numbers]
    if len(found) == 1 and not record.ready and record.report:
        turn, summary = found[0]
        told = {key: value for key, value in summary.items() if value is not None}
        found = [(turn, {**report_summary(record), **told})]
    hidden = _hidden(record, [summary for _, summary in found])
    return [
        (turn, {key: None if key in hidden else value for key, value in summary.items()}) for turn, summary in found
    ]


def report_summary(record: RunRecord) -> dict[str, Any]:
    """Every number of the perf block by name, the first line to give one standing."""
    merged: dict[str, Any] = {}
    for line in record.report:
        if line.name not in {"mode", "moe-predict", "plan"}:
            for key, value in line.facts.items():
                if value is not None:
                    merged.setdefault(key, value)
    return merged


def _hidden(record: RunRecord, summaries: Sequence[Mapping[str, Any]]) -> set[str]:
    """Summary keys that this platform could not report."""
    rows = record.tokens()
    hidden: set[str] = set()
    for witness, keys in SUMMARY_GROUPS:
        told = _ever_positive(summary.get(witness) for summary in summaries)
        if witness == "cpu_s_tok" and not told:
            told = _ever_positive(rows.get("cpu_ms"))
        if not told:
            hidden.update(keys)
    return hidden
