"""How comparisons look in a terminal. In: answers. Out: tables on stdout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bmoe_collector.compare.answer import Answer
from bmoe_collector.compare.metrics import SPEED, Metric
from bmoe_collector.show.console import console
from bmoe_collector.show.safe import escape


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:+.1%}"


def _change(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio - 1:+.1%}"


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def show_answer(answer: Answer, *, forced: bool = False) -> None:
    """Counters, then the terms of the time, then speed, then every run's own number, then the sentence."""
    out = console()
    out.print(Text(f"A  {escape(answer.a.text)}\nB  {escape(answer.b.text)}", style="bold"))
    out.print(Text(f"{answer.label}; {answer.design}, n = {answer.n[0]} and {answer.n[1]}"))
    for reason in answer.reasons:
        out.print(Text(f"not comparable: {escape(reason)}", style="red"))
    if answer.counters:
        table = Table("counter", box=None, pad_edge=False)
        table.add_column("A", justify="right")
        table.add_column("B", justify="right")
        table.add_column("")
        for counter in answer.counters:
            same = "equal" if counter["equal"] else "differs"
            table.add_row(counter["counter"], _number(counter["a"]), _number(counter["b"]), same)
        out.print(table)
    if answer.texts_equal is not None:
        out.print(Text("texts: equal" if answer.texts_equal else "texts: differ"))
    if answer.metrics:
        speed = {"tok_s", *SPEED}
        ordered = [m for m in answer.metrics if m.metric not in speed] + [
            m for m in answer.metrics if m.metric in speed
        ]
        out.print(_metrics(ordered, answer.primary, wide=out.width >= WIDE), crop=False)
        for line in _legend(answer, wide=out.width >= WIDE):
            out.print(Text(line, style="dim"))
        _every_run(out, answer)
    for note in answer.notes:
        out.print(Text(f"note: {escape(note)}", style="dim"))
    if answer.answered:
        out.print(Text(escape(answer.verdict), style="bold"))
        corrected, among = answer.extra.get("p_corrected"), answer.extra.get("comparisons", 1)
        if corrected is not None and among > 1:
            holds = "resolved" if answer.extra.get("resolved_corrected") else "not resolved"
            out.print(
                Text(f"among {among} comparisons: {holds}, p {corrected:.3g} when corrected for {among}", style="bold")
            )
    else:
        way = "" if forced else "; --force answers anyway, with the reasons on the answer"
        out.print(Text(f"refused for the reason{'s' if len(answer.reasons) > 1 else ''} above{way}", style="bold"))


WIDE = 100  # columns from which there is room for what these runs could have shown


def _metrics(metrics: Sequence[Metric], primary: str, *, wide: bool) -> Table:
    # Numbers are never cut: narrow enough for 80 columns, and not cropped above.
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("metric", no_wrap=True)
    for name in ("A", "B", "B to A", "interval", "p"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for name in ("seen from", "runs") if wide else ():
        table.add_column(name, justify="right", no_wrap=True)
    for row in metrics:
        interval = f"{_change(row.low)} … {_change(row.high)}" if row.low is not None else "–"
        more = (_percent(row.smallest_resolvable), str(row.runs_needed or "–")) if wide else ()
        table.add_row(
            row.metric,
            _median(row.a),
            _median(row.b),
            _change(row.ratio),
            interval,
            "–" if row.p is None else f"{row.p:.3g}",
            "*" if row.resolved else "",
            *more,
            style="bold" if row.metric == primary else None,
        )
    return table


def _median(values: Sequence[float]) -> str:
    return f"{median(values):.4g}" if values else "–"


def _legend(answer: Answer, *, wide: bool) -> list[str]:
    """What the columns are. The methods are in compare/statistics.py."""
    several = max(answer.n) > 1
    lines = ["A and B: medians of the runs; B to A: of geometric means" if several else "A and B: of the one run each"]
    if answer.design == "within-run":
        lines.append("interval: 95 %, over the tokens of these runs, which are no replicates: there is no p")
        return lines
    what = "pairs" if answer.design == "paired" else "runs"
    others = sum(row.p is not None and row.metric != answer.primary for row in answer.metrics)
    more = f", the other {others} corrected together, {answer.primary} not" if others > 1 else ""
    lines.append(f"interval: 95 %, over {what}; p: permutation of {what}{more}; * resolved")
    if wide:
        lines.append(
            "seen from: the least difference these runs would have shown in 4 of 5 tries; runs: how many would"
        )
    return lines


def _every_run(out: Console, answer: Answer) -> None:
    """The primary metric of every run: what the medians are made of."""
    row = answer.answered_by
    if row is None or max(len(row.a), len(row.b)) < 2:
        return
    for name, values in (("A", row.a), ("B", row.b)):
        shown = " ".join(f"{value:.4g}" for value in values[:SHOWN])
        rest = f" and {len(values) - SHOWN} more" if len(values) > SHOWN else ""
        spread = f"{min(values):.4g} to {max(values):.4g}" if values else "–"
        out.print(Text(f"{row.metric} of {name}, {spread}: {shown}{rest}"))


SHOWN = 24  # runs whose own number is printed


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
    console().print(table)


def show_sandwich(result: Mapping[str, Any]) -> None:
    """Settings inside one run, with other windows below."""
    out = console()
    out.print(Text(f"run {result['run'][:12]} by {escape(str(result['by']))}: {result['label']}", style="bold"))
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("A", "B"):
        table.add_column(name, no_wrap=True)
    for name in ("cold", "carry", "sandwiches", "tok/s A", "B", "B to A", "interval", "p", ""):
        table.add_column(name, justify="right", no_wrap=True)
    for pair in result["pairs"]:
        rows = [{**pair, "cold": result["cold"], "carry": result["carry"]}, *pair["at_other_windows"]]
        for at, row in enumerate(rows):
            table.add_row(
                Text(escape(str(pair["a"])) if at == 0 else ""),
                Text(escape(str(pair["b"])) if at == 0 else ""),
                str(row["cold"]),
                str(row["carry"]),
                str(row["sandwiches"]),
                _median([row["a_tok_s"]] if "a_tok_s" in row else []),
                _median([row["b_tok_s"]] if "b_tok_s" in row else []),
                _change(row.get("ratio")),
                f"{_change(row.get('low'))} … {_change(row.get('high'))}" if row.get("low") is not None else "–",
                "–" if row.get("p") is None else f"{row['p']:.3g}",
                "*" if row.get("resolved") else "",
            )
    out.print(table, crop=False)
    for line in (
        "tok/s: medians over the sandwiches, a block of B between two of A; B to A: of geometric means",
        "interval: 95 %, and p: permutation, both over the sandwiches of this one run; * resolved in it",
        "cold, carry: tokens left out at the start and after each switch; an effect that hangs on them is theirs",
    ):
        out.print(Text(line, style="dim"))
    for note in result.get("notes", ()):
        out.print(Text(f"note: {escape(note)}", style="dim"))
