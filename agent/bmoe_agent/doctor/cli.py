"""`bmoe-agent doctor [--json] [--record FILE]`: what a good night needs of this phone.

In: arguments. Out: checks on stdout with what was seen and the command that mends it, or one JSON document:

    {"android": API level or null, "ok": bool, "checks": [{"name", "state": "ok|warn|fail|unknown", "seen", "fix": [commands]}]}

With `--record FILE` also a tree of this phone's readable nodes (`record.py`). Exit codes: 0 nothing fails, 1 something does,
2 wrong usage, 3 the record could not be written.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from bmoe_agent import config
from bmoe_agent.doctor.check import FAIL, STATES, Check, run
from bmoe_agent.roots import Roots, TreeError

_MARKS = {"ok": " ok ", "warn": "warn", "fail": "FAIL", "unknown": " ?  "}


def main(argv: Sequence[str]) -> int:
    """Run the doctor; the exit code."""
    parser = argparse.ArgumentParser(
        prog="bmoe-agent doctor", description="What a good night needs, and how to get it."
    )
    parser.add_argument("--home", help="the agent's home (default: BMOE_AGENT_HOME, else ~/.bmoe-agent)")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write this phone's readable nodes, made anonymous")
    try:
        arguments = parser.parse_args(list(argv))
    except SystemExit as ended:  # argparse has said why
        return int(ended.code or 0)
    home = config.home_directory(arguments.home)
    tree = os.environ.get("BMOE_AGENT_TREE")
    try:
        roots = Roots.from_tree(Path(tree)) if tree else Roots()
    except TreeError as problem:
        print(f"bmoe-agent doctor: {problem}", file=sys.stderr)
        return 2
    sdk, checks = examine(home, roots)
    if arguments.record is not None:
        from bmoe_agent.doctor.record import record

        try:
            counts = record(arguments.record, roots, home)
        except OSError as problem:
            print(f"bmoe-agent doctor: {arguments.record}: {problem.strerror or problem}", file=sys.stderr)
            return 3
        print(
            f"{arguments.record}: {counts['text']} nodes, {counts['refused']} refusals; look through it before giving it away",
            file=sys.stderr,
        )
    ok = all(check.state != FAIL for check in checks)
    if arguments.json:
        print(json.dumps({"android": sdk, "ok": ok, "checks": [check.to_json() for check in checks]}, allow_nan=False))
    else:
        print(told(checks))
    return 0 if ok else 1


def examine(home: Path, roots: Roots) -> tuple[int | None, list[Check]]:
    """Every check of this phone: (API level or None, checks)."""
    from bmoe_agent.doctor.files import Files
    from bmoe_agent.doctor.phone import Phone
    from bmoe_agent.doctor.runtime import Runtime

    phone = Phone(roots, properties(roots), home)
    android = phone.sdk is not None
    lookers = phone.lookers() + Files(roots, home, android).lookers() + Runtime(roots, home, android).lookers()
    return phone.sdk, run(lookers)


def properties(roots: Roots) -> dict[str, str]:
    """All of Android's properties (or those a tree has); also where gRPC and protobuf are missing."""
    if roots.substituted:
        return dict(roots.properties)
    try:
        from bmoe_agent.device import getprop
    except ImportError:
        return {}
    return getprop()


def told(checks: Sequence[Check]) -> str:
    """The checks for a person: a line each, what mends it below, how many of what at the end."""
    columns = max(60, shutil.get_terminal_size((100, 24)).columns)
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        head = f"{_MARKS[check.state]}  {check.name:{width}}  "
        lines += textwrap.wrap(
            check.seen, columns, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False
        ) or [head]
        lines += [f"{'':{len(head)}}> {command}" for command in check.fix]  # not wrapped: it is to be copied
    counts = {state: sum(check.state == state for check in checks) for state in STATES}
    return "\n".join([*lines, "", ", ".join(f"{number} {state}" for state, number in counts.items() if number)])
