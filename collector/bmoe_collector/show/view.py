"""A run in the terminal: what `document.py` says, for eyes. A RunRecord, what was derived and its verdicts in; print out.

Sections stand in the order they are read: what it is and whether to believe it, how fast, where the time went, the
prompt, memory, cache, the phone before and after, the text, the record itself. A value nobody measured is "–". Every
text that came from elsewhere goes through `safe.escape`.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.markup import escape as markup
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from bmoe_collector.meaning.derive import Derived
from bmoe_collector.record import RunRecord
from bmoe_collector.show import words
from bmoe_collector.show.safe import clip, escape
from bmoe_collector.show.sections import cache, configuration, memory, phone, record_itself, speed, time_bars, turns
from bmoe_collector.verdicts import Verdict

_COLOUR = {"fail": "bold red", "warn": "yellow", "info": "cyan"}
_OUTCOME = {"ok": "green", "partial": "yellow", "started": "cyan", "skipped": "yellow"}
TEXT_LINES = 12


def render(
    console: Console, record: RunRecord, derived: Derived, verdicts: Sequence[Verdict], *, whole_text: bool = False
) -> None:
    """Print the run."""
    width = console.width
    sections: tuple[tuple[str, RenderableType | None], ...] = (
        ("", _head(record)),
        ("", _verdicts(verdicts)),
        ("configuration", configuration(record, derived, width)),
        ("speed", speed(derived, width)),
        ("where the time goes", time_bars(derived, width)),
        ("", turns(derived) if derived.config.session or len(record.turns) > 1 else None),
        ("memory", memory(record, derived, width)),
        ("cache and flash", cache(derived, width)),
        ("phone", phone(record, derived)),
        ("", _text(record, whole=whole_text)),
        ("", record_itself(record)),
    )
    for _, part in sections:
        if part is not None:
            console.print(part)
    if missing := [title for title, part in sections if title and part is None]:
        console.print(Text(f"not measured: {', '.join(missing)}", style="dim"))


def _head(record: RunRecord) -> RenderableType:
    run = record.run
    outcome = str(run.get("outcome") or "unknown")
    line = Text()
    line.append(f"run {record.run_id}  ")
    line.append(outcome, style=_OUTCOME.get(outcome, "red"))
    cause = run.get("cause")
    if cause and cause not in {"exit", outcome}:
        line.append(f" ({escape(cause)})")
    if run.get("exit_code") is not None:
        line.append(f"  exit {run['exit_code']}")
    if run.get("signal") is not None:
        line.append(f"  signal {run['signal']}")
    if run.get("launched") is not False and not run.get("exit_observed") and run.get("outcome") != "started":
        line.append("  exit not observed")
    lines: list[RenderableType] = []
    if run.get("simulated"):
        lines.append(Text(" SIMULATED: not a measurement of any phone ", style="bold black on yellow"))
    lines.append(line)
    facts = Table.grid(padding=(0, 2))
    for name, value in (
        ("model", _model(record)),
        ("engine", _join(run.get("engine_name"), run.get("engine_version"), _short(run.get("engine_sha256")))),
        ("device", _join(run.get("device_name"), run.get("device_model"), _short(run.get("agent_uuid")))),
        ("files of" if run.get("source") == "import" else "started", words.wall(run.get("started_wall_ns"))),
        ("plan", _plan(record)),
        ("labels", ", ".join(f"{escape(k)}={escape(v)}" for k, v in (run.get("labels") or {}).items())),
    ):
        if value and value != words.NOTHING:
            facts.add_row(Text(name, style="dim"), Text(value))
    lines.append(facts)
    lines.extend(Text(f"  {escape(each)}", style="dim") for each in (run.get("evidence") or ())[:6])
    return Group(*lines)


def _model(record: RunRecord) -> str:
    run = record.run
    size = run.get("model_size")
    arch = run.get("model_arch") or record.preamble.get("arch")
    return _join(run.get("model_name") or record.preamble.get("model"), arch, words.size(size) if size else None)


def _plan(record: RunRecord) -> str:
    run = record.run
    if not run.get("plan_name") and not run.get("cell"):
        return ""
    parts = [escape(run.get("plan_name") or ""), escape(run.get("cell") or "")]
    if run.get("cell_index") is not None:
        parts.append(f"place {int(run['cell_index']) + 1} of {run.get('plan_cells') or words.NOTHING}")
    if run.get("repeat"):
        parts.append(f"repeat {int(run['repeat']) + 1}")
    if (run.get("attempt") or 1) > 1:
        parts.append(f"attempt {run['attempt']}")
    if run.get("unmeasured"):
        parts.append("not measured, by protocol")
    return "  ".join(part for part in parts if part)


def _short(hex_digits: object) -> str | None:
    return str(hex_digits)[:12] if hex_digits else None


def _join(*parts: object) -> str:
    return "  ".join(clip(part, 80) for part in parts if part)


def _verdicts(verdicts: Sequence[Verdict]) -> RenderableType | None:
    if not verdicts:
        return Text("no verdicts: nothing speaks against this number", style="green")
    table = Table.grid(padding=(0, 1))
    for verdict in verdicts:
        style = _COLOUR[verdict.severity]
        table.add_row(
            Text(verdict.severity, style=style), Text(verdict.code, style=style), Text(escape(verdict.evidence))
        )
    return table


def _text(record: RunRecord, *, whole: bool) -> RenderableType | None:
    parts: list[RenderableType] = []
    for turn in record.turns:
        for name, data in (("reasoning", turn.reasoning), ("text", turn.text)):
            if not data:
                continue
            lines = escape(data, lines=True).splitlines() or [""]
            if not whole and len(lines) > TEXT_LINES:
                lines = [*lines[:TEXT_LINES], f"… {len(lines) - TEXT_LINES} more lines (--text)"]
            if not whole:
                lines = [line if len(line) <= 2000 else line[:2000] + "…" for line in lines]
            title = name if len(record.turns) == 1 else f"turn {turn.turn}: {name}"
            parts.append(Panel(Text("\n".join(lines)), title=markup(title), title_align="left", border_style="dim"))
    return Group(*parts) if parts else None
