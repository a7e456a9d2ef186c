"""Documents made from code, all of them: `python -m support.documents` (with tests on the path) writes them anew.

The host's come from `bmoe_collector.query.docs`. The agent's commands are read off its argparse parsers here, because
neither package imports the other.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class _Caught(BaseException):
    """Carries the parser that was about to be used."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__()
        self.parser = parser


def _parser_of(*argv: str) -> argparse.ArgumentParser:
    """The parser that `bmoe-agent ARGV` reads its arguments with."""
    from bmoe_agent.cli import main

    def caught(self: argparse.ArgumentParser, *_arguments: Any, **_more: Any) -> None:
        raise _Caught(self)

    real = argparse.ArgumentParser.parse_args
    argparse.ArgumentParser.parse_args = caught  # type: ignore[method-assign]
    try:
        main(argv)
    except _Caught as found:
        return found.parser
    finally:
        argparse.ArgumentParser.parse_args = real  # type: ignore[method-assign]
    raise AssertionError(f"bmoe-agent {argv} reads no arguments")


def agent_commands() -> Iterator[tuple[str, str, argparse.ArgumentParser]]:
    """Name, help and parser of every command of bmoe-agent."""
    whole = _parser_of("status")
    choices = next(action for action in whole._actions if isinstance(action, argparse._SubParsersAction))
    told = {action.dest: action.help or "" for action in choices._choices_actions}
    for name, parser in choices.choices.items():
        yield name, told[name], _parser_of("doctor") if name == "doctor" else parser


def agent_options(parser: argparse.ArgumentParser) -> list[tuple[str, str]]:
    """Options of a command: how they are written, their help."""
    found = []
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction | argparse._SubParsersAction):
            continue
        spelled = ", ".join(action.option_strings) or action.dest
        if action.nargs != 0 and action.option_strings:
            spelled += f" {action.metavar or action.dest.upper()}"
        found.append((spelled, action.help or ""))
    return found


def agent_document() -> str:
    """agent/COMMANDS.md."""
    from bmoe_collector.query.tables import markdown_cell

    lines = [
        "# Commands of bmoe-agent",
        "",
        "Made from the commands themselves; edit their help, not this file. Exit codes: 0 done, 1 the answer is no, 2 wrong usage,",
        "3 something outside failed.",
        "",
    ]
    for name, told, parser in agent_commands():
        lines += [
            f"## bmoe-agent {name}",
            "",
            told[:1].upper() + told[1:] + ".",
            "",
            "| option | meaning |",
            "|---|---|",
        ]
        lines += [f"| `{spelled}` | {markdown_cell(meaning)} |" for spelled, meaning in agent_options(parser)]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def documents() -> dict[Path, str]:
    """Every document that is made, by its place."""
    from bmoe_collector.query.docs import DOCUMENTS

    return {
        **{ROOT / "collector" / name: make() for name, make in DOCUMENTS.items()},
        ROOT / "agent" / "COMMANDS.md": agent_document(),
    }


if __name__ == "__main__":
    for path, text in documents().items():
        path.write_text(text, "utf-8")
        print(path.relative_to(ROOT))
