"""How comparisons look in a terminal. In: answers. Out: tables on stdout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bmoe_collector.compare.answer import SPEED, Answer, Metric
from bmoe_collector.show.safe import escape


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:+.1%}"


def _change(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio - 1:+.1%}"


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def show_answer(answer: Answer) -> None:
    """Counters, then the terms of the time, then speed, then the sentence."""
    console = Console()
    console.print(Text(f"A  {escape(answer.a.text)}\nB  {escape(answer.b.text)}", style="bold"))
    console.print(Text(f"{answer.label}; {answer.design}, n = {answer.n[0]} and {answer.n[1]}"))
    for reason in answer.reasons:
        console.print(Text(f"not comparable: {escape(reason)}", style="red"))
    if answer.counters:
        table = Table("counter", box=None, pad_edge=False)
        table.add_column("A", justify="right")
        table.add_column("B", justify="right")
        table.add_column("")
        for counter in answer.counters:
            same = "equal" if counter["equal"] else "differs"
            table.add_row(counter["counter"], _number(counter["a"]), _number(counter["b"]), same)
        console.print(table)
    if answer.texts_equal is not None:
        console.print(Text("texts: equal" if answer.texts_equal else "texts: differ"))
    if answer.metrics:
        speed = {"tok_s", *SPEED}
        ordered = [m for m in answer.metrics if m.metric not in speed] + [
            m for m in answer.metrics if m.metric in speed
        ]
        console.print(_metrics(ordered), crop=False)
    for note in answer.notes:
        console.print(Text(f"note: {escape(note)}", style="dim"))
    console.print(Text(escape(answer.verdict), style="bold"))


def _metrics(metrics: Sequence[Metric]) -> Table:
    # Numbers are never cut: narrow enough for 80 columns, and not cropped below.
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("metric", no_wrap=True)
    for name in ("B to A", "interval", "p", "resolved", "seen from", "runs"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in metrics:
        interval = f"{_change(row.low)} … {_change(row.high)}" if row.low is not None else "–"
        table.add_row(
            row.metric,
            _change(row.ratio),
            interval,
            "–" if row.p is None else f"{row.p:.3g}",
            "yes" if row.resolved else "no",
            _percent(row.smallest_resolvable),
            str(row.runs_needed or "–"),
        )
    return table


def show_matrix(answers: Sequence[Answer]) -> None:
    """One row a comparison, p-values corrected for how many there are."""
    table = Table("A", "B", "metric", box=None, pad_edge=False)
    for name in ("n", "B to A", "interval", "p", "p corrected", "resolved"):
        table.add_column(name, justify="right")
    for answer in answers:
        row = answer.answered_by
        corrected = answer.extra.get("p_corrected")
        table.add_row(
            Text(escape(answer.a.text)),
            Text(escape(answer.b.text)),
            answer.primary,
            f"{answer.n[0]}/{answer.n[1]}",
            _change(row.ratio) if row else "refused",
            f"{_change(row.low)} … {_change(row.high)}" if row and row.low is not None else "–",
            "–" if row is None or row.p is None else f"{row.p:.3g}",
            "–" if corrected is None else f"{corrected:.3g}",
            "yes" if answer.extra.get("resolved_corrected") else "no",
        )
    Console().print(table)


def show_sandwich(result: Mapping[str, Any]) -> None:
    """Settings inside one run, with other windows below."""
    console = Console()
    console.print(Text(f"run {result['run'][:12]} by {escape(str(result['by']))}: {result['label']}", style="bold"))
    table = Table("A", "B", box=None, pad_edge=False)
    for name in ("cold", "carry", "sandwiches", "B to A", "interval", "p", "resolved"):
        table.add_column(name, justify="right")
    for pair in result["pairs"]:
        rows = [{**pair, "cold": result["cold"], "carry": result["carry"]}, *pair["at_other_windows"]]
        for at, row in enumerate(rows):
            table.add_row(
                Text(escape(str(pair["a"])) if at == 0 else ""),
                Text(escape(str(pair["b"])) if at == 0 else ""),
                str(row["cold"]),
                str(row["carry"]),
                str(row["sandwiches"]),
                _change(row.get("ratio")),
                f"{_change(row.get('low'))} … {_change(row.get('high'))}" if row.get("low") is not None else "–",
                "–" if row.get("p") is None else f"{row['p']:.3g}",
                "yes" if row.get("resolved") else "no",
            )
    console.print(table)
