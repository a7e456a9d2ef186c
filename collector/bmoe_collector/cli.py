"""The `bmoe` command: a table of commands, and the way from argv to one of them.

In: argv. Out: what the command prints, and an exit code: 0 done, 1 the answer is no, 2 wrong usage, 3 something
outside failed. Only the module of the command that was named is imported, so help and small commands answer at once.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence

HERE = "bmoe_collector.commands"

# name: (module in `commands`, what it does). In the order people meet them.
COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("demo", "one benchmark end to end on this machine, stored and shown"),
    "pair": ("pairing", "store a phone's secret, so that it answers this host"),
    "unpair": ("pairing", "forget a phone's secret, here and as the store it keeps records for"),
    "rotate": ("pairing", "give a phone a new secret"),
    "devices": ("devices", "phones: what adb sees, what their agents say; names and tags"),
    "plan": ("planning", "check a plan file, show its cells, list shipped plans"),
    "run": ("run", "submit a benchmark or a plan to phones and follow it"),
    "queue": ("queue", "plans waiting for phones that are away"),
    "cancel": ("queue", "stop what a phone runs, or take back a plan"),
    "collect": ("collect", "drain phones into the database until stopped"),
    "watch": ("watch", "all phones, live"),
    "runs": ("runs", "stored runs, filtered"),
    "show": ("show", "one run: configuration, speed, memory, cache, verdicts"),
    "compare": ("comparing", "two sides against each other, or why not"),
    "regress": ("comparing", "exit 1 when a side is worse than its baseline"),
    "judge": ("judging", "compute facts and verdicts again"),
    "trace": ("traces", "route, compute and I/O traces from a file or a run"),
    "sql": ("sql", "read-only SQL over documented views"),
    "export": ("exporting", "runs, tokens, samples and traces to files or a Parquet dataset"),
    "import": ("importing", "files of an engine's output into the database"),
    "events": ("events", "parse an engine's stdout, one object per event"),
    "doctor": ("doctor", "what a good night needs of this host and of a phone"),
    "db": ("db", "the database itself: upgrade, check, vacuum, reparse"),
}

# Commands that ask what is stored or in a file, and start no other process.
QUESTIONS = frozenset({"runs", "show", "compare", "regress", "judge", "trace", "sql", "export", "import", "events"})


def help_text() -> str:
    """What `bmoe --help` prints."""
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:<{width}}{text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        [
            "Usage: bmoe COMMAND [ARGUMENTS]",
            "",
            "Measure bmoe-cli on phones, keep the record, answer questions about it.",
            "",
            *lines,
            "",
            "Every command takes --help, --json and --db URL (else BMOE_DB, else SQLite in the user's data directory).",
            "Exit codes: 0 done, 1 the answer is no, 2 wrong usage, 3 something outside failed.",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that argv names; return the exit code, whatever interrupts it and whoever stops reading."""
    _have_streams()
    if argv is None:
        # Imports make some hundred thousand objects that stay. Looked through for garbage again and again, and once more
        # at the end, they take longer than a question does.
        gc.set_threshold(50_000, 20, 20)
    try:
        return _main(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        drop_stdout()
        return 0
    except OSError as error:
        print(f"bmoe: {error.filename or 'stdout'}: {error.strerror or error}", file=sys.stderr)
        drop_stdout()
        return 3
    finally:
        if argv is None:
            gc.freeze()


def drop_stdout() -> None:
    """Nobody reads stdout, or nobody can: what is left in its buffer is not tried again when the process ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _have_streams() -> None:
    """Started with stdout or stderr closed (`>&-`): what would be printed there goes nowhere."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - open as long as the process


def _main(arguments: list[str]) -> int:
    if not arguments:
        print(help_text(), file=sys.stderr)
        return 2
    if arguments[0] in {"-h", "--help", "help"}:
        print(help_text(), flush=True)
        return 0
    if arguments[0] == "--version":
        from importlib.metadata import version

        print(f"bmoe {version('bmoe-fleet')}")
        return 0
    if arguments[0] not in COMMANDS:
        from difflib import get_close_matches

        near = get_close_matches(arguments[0], COMMANDS, n=1)
        hint = f" (did you mean `{near[0]}`?)" if near else ""
        print(f"bmoe: no command `{arguments[0]}`{hint}; `bmoe --help` lists them", file=sys.stderr)
        return 2
    if arguments[0] in QUESTIONS:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # no sum of ours is worth starting numpy's threads for
    try:
        from bmoe_collector.common import run_command
    except ImportError as error:
        print(f"bmoe: {error}: install the host's part with `pip install 'bmoe-fleet[collector]'`", file=sys.stderr)
        return 3
    return run_command(f"{HERE}.{COMMANDS[arguments[0]][0]}", arguments)


if __name__ == "__main__":
    sys.exit(main())
