"""Documents made from the one tables: `COMMANDS.md` from the commands themselves, `COLUMNS.md` from columns, facts, verdicts
and views.

In: nothing but this program. Out: Markdown text (`commands_document`, `columns_document`); `python -m
bmoe_collector.query.docs [FOLDER]` writes both files beside the package. A test says when they are out of date, and when a
command or an option has no help.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import typer

from bmoe_collector.cli import COMMANDS, HERE
from bmoe_collector.query.tables import markdown_cell

SEVERITIES = {
    "untrustworthy_output": "fail", "instrumented": "fail", "load_all": "fail", "incomplete": "fail", "contaminated": "fail",
    "not_streaming": "info or warn", "stochastic": "info or warn", "lossy": "info", "speculative": "info", "simulated": "info",
}  # fmt: skip
"""Severity of verdicts that are not warnings."""

MEANINGS = {
    "untrustworthy_output": "failed row reads, in the report or the trailer",
    "instrumented": "traced or probed: predict_log, prefetch_sync, compute_trace_layers, any trace flag or artifact",
    "load_all": "reads the whole expert set",
    "incomplete": "fewer tokens than asked without an end of generation, no end record, or undeclared gaps",
    "contaminated": "against siblings: major faults per token ten times theirs, compute per token rising while active experts"
    " fall, equal work in unequal time, or drift with order",
    "gate_gave_up": "a gate's bound passed and the cell ran",
    "throttled_entry": "clock cap, speed probe or CPU temperature worse at entry than asked, or than the phone's cold record",
    "big_cores_excluded": "allowed CPUs lack the fastest cluster",
    "foreign_load": "another process took 10 % of a core or more",
    "not_awake": "the phone was dozing, or the agent's own timers slipped by seconds",
    "dense_refaulting": "100 major faults per token or more after warm-up",
    "reclaimed": "rss_anon_mib fell by 10 % or more while cache_budget_mib stood",
    "cache_below_cycle": "a cache on, and smaller than one token's routed bytes",
    "o_direct_not_achieved": "asked for, and o_direct=0",
    "device_idle": "--prefill-device asked for and no node computed there",
    "think_ignored": "think:false where think_ctl is none",
    "short_run": "fewer than 256 generated tokens",
    "not_streaming": "a baseline: the engine on mmap; a warning when a plan asked for streaming",
    "stochastic": "temp > 0; a warning when the seed is not recorded",
    "lossy": "drop, substitution, route-ahead, or top-k below the model's own",
    "speculative": "mtp or ngram",
    "simulated": "a stand-in engine or sensor tree; never comparable with a real run",
}
"""When a verdict is given, in a sentence; the rules are in `bmoe_collector/verdicts`."""


def apps() -> Iterator[tuple[str, Any]]:
    """Every command of `bmoe` by its whole name, groups opened, as click commands; in the order of `bmoe --help`."""
    for name, (module, _) in COMMANDS.items():
        app = typer.Typer(name="bmoe", add_completion=False, rich_markup_mode=None)
        app.callback()(_nothing)
        import_module(f"{HERE}.{module}").register(app)
        yield from _opened(name, typer.main.get_command(app).commands[name])  # type: ignore[attr-defined]


def _nothing() -> None:
    """Measure bmoe-cli on phones."""


def _opened(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    yield name, command
    for inner, each in getattr(command, "commands", {}).items():
        yield from _opened(f"{name} {inner}", each)


def options(command: Any) -> list[tuple[str, str, str]]:
    """Arguments and options of a command: how they are written, their help, their default."""
    found = []
    for one in command.params:
        if one.name == "help":
            continue
        is_option = one.param_type_name == "option"
        spelled = ", ".join(one.opts) if is_option else str(one.metavar or one.name.upper())
        if is_option and not one.is_flag and one.metavar:
            spelled += f" {one.metavar}"
        default = one.default
        shown = "" if callable(default) or default in (None, False, "", (), []) or not is_option else str(default)
        found.append((spelled, str(getattr(one, "help", None) or ""), shown))
    return found


def commands_document() -> str:
    """COMMANDS.md."""
    lines = [
        "# Commands of bmoe",
        "",
        "Made from the commands themselves by `python -m bmoe_collector.query.docs`; edit their help, not this file.",
        "",
        "Every command takes `--json` and `--db URL`, after its name. The database is `--db`, else `BMOE_DB`, else SQLite in the",
        "user's data directory. JSON is strict and ASCII, alone on stdout. Exit codes: 0 done, 1 the answer is no, 2 wrong usage,",
        "3 something outside failed.",
        "",
    ]
    for name, command in apps():
        lines += [f"{'#' * (2 + name.count(' '))} bmoe {name}", "", _sentence(command.help or ""), ""]
        rows = options(command)
        if rows:
            lines += ["| argument or option | meaning | default |", "|---|---|---|"]
            lines += [
                f"| `{spelled.replace('|', chr(92) + '|')}` | {markdown_cell(meaning)} | {markdown_cell(default)} |"
                for spelled, meaning, default in rows
            ]
            lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _sentence(text: str) -> str:
    return " ".join(text.split())


def columns_document() -> str:
    """COLUMNS.md."""
    from bmoe_proto.contract import columns as contract

    from bmoe_collector.meaning.facts import FACTS
    from bmoe_collector.query.fields import aliases, fields
    from bmoe_collector.store.views import views
    from bmoe_collector.verdicts import CODES

    lines = [
        "# Columns, facts, verdicts, views",
        "",
        "Made from the tables in the code by `python -m bmoe_collector.query.docs`; edit those, not this file. Unmeasured is NULL",
        "everywhere, never zero and never -1. Units are in the names or beside them; MiB is 1,048,576 bytes.",
        "",
        "## Names for filters and lists",
        "",
        "For `bmoe runs --where`, `--columns` and `--sort`, sides of `bmoe compare`, and the Python API; `label.KEY` is the value of a",
        "label, `verdict = CODE` asks for a verdict.",
        "",
    ]
    short: dict[str, list[str]] = {}
    for alias, name in aliases().items():
        short.setdefault(name, []).append(alias)
    lines += _table(
        ("name", "also", "type", "unit", "from", "meaning"),
        [
            (one.name, " ".join(short.get(one.name, [])), one.kind, one.unit, one.source, one.doc)
            for one in fields().values()
        ],
    )
    lines += ["", "## Derived facts", "", "Formula and section of the telemetry contract.", ""]
    lines += _table(
        ("fact", "unit", "formula", "section", "better"),
        [
            (fact.name, fact.unit, fact.formula, fact.section, {1: "more", -1: "less"}.get(fact.better, ""))
            for fact in FACTS
        ],
    )
    lines += ["", "## Verdicts", ""]
    lines += _table(
        ("code", "severity", "when"), [(code, SEVERITIES.get(code, "warn"), MEANINGS[code]) for code in CODES]
    )
    lines += [
        "",
        "## Views",
        "",
        "For `bmoe sql` and any tool that reads the database. yes and no are 1 and 0, JSON is text.",
        "",
        "Tokens, turns and samples are as their source told them, with one exception: the engine's -1 for unmeasured is NULL. A 0 that",
        "means `this platform cannot report` is still 0 there, because only a run as a whole tells it from a true one. The derived",
        "facts, in `v_runs`, have that rule applied: NULL, and `unmeasured` names the groups.",
        "",
    ]
    for view in views().values():
        lines += [f"### {view.name}", "", view.doc, ""]
        if view.name == "v_runs":
            lines += ["Every name of the first table but `started` and `labels`, and:", ""]
        known = fields() if view.name == "v_runs" else {}
        lines += _table(
            ("column", "type", "unit", "meaning"),
            [
                (one.name, one.kind, one.unit, one.doc)
                for one in view.columns
                if one.name not in known or one.name == "verdicts"
            ],
        )
        lines.append("")
    lines += ["## What the engine writes", "", "By its own spelling; `since` is the first engine that wrote it.", ""]
    for title, table in (
        ("Metrics CSV", contract.METRICS),
        ("Preamble", contract.PREAMBLE),
        ("`# summary` trailer", contract.TRAILER),
        ("BMOE_PROGRESS", contract.PROGRESS),
        ("BMOE_DONE", contract.DONE),
        ("BMOE_DECIDE", contract.DECIDE),
        ("Route trace", contract.ROUTE),
        ("Compute trace", contract.COMPUTE),
        ("I/O trace", contract.IO),
        ("Pressure sidecar", contract.SIDECAR),
    ):
        lines += [f"### {title}", ""]
        lines += _table(
            ("name", "type", "unit", "since", "meaning"),
            [(one.name, one.type, one.unit, one.since, one.doc) for one in table.values()],
        )
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    made = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        name, *rest = row
        made.append("| `" + name + "` | " + " | ".join(markdown_cell(cell) for cell in rest) + " |")
    return made


DOCUMENTS = {"COMMANDS.md": commands_document, "COLUMNS.md": columns_document}


def main() -> None:
    """Write them."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[2]
    for name, make in DOCUMENTS.items():
        (folder / name).write_text(make(), "utf-8")
        print(folder / name)


if __name__ == "__main__":
    main()
