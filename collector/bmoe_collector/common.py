"""What every command of `bmoe` shares: its options, how it prints, and how failures become exit codes.

Out: `UserError` (exit 2), `OutsideError` (exit 3), `JsonOption` and `DbOption` for signatures, `emit` for JSON on
stdout, `say` for people on stderr, `open_db` for the database that --db, BMOE_DB or the default names.
"""

from __future__ import annotations

import json
import math
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bmoe_collector.cli import drop_stdout

if TYPE_CHECKING:
    from bmoe_collector.ingest.ingestor import Ingestor
    from bmoe_collector.store.artifacts import Artifacts
    from bmoe_collector.store.engine import Store

EXIT_NO, EXIT_USAGE, EXIT_OUTSIDE, EXIT_INTERRUPTED = 1, 2, 3, 130
MOST_TEXT_BYTES = 16 << 20
"""Of a plan or a prompt; the phone takes less."""

JsonOption = Annotated[bool, typer.Option("--json", help="Print strict ASCII JSON on stdout, messages on stderr.")]
DbOption = Annotated[
    str | None,
    typer.Option("--db", metavar="URL", help="Database: a URL or a SQLite file; else BMOE_DB, else the user's own."),
]


_OPENED: list[Store] = []  # by the command that runs, which may fail before it closes them


class BmoeError(Exception):
    """Anything a command gives up on with one message: what, where, what to do."""

    exit_code = EXIT_OUTSIDE


class UserError(BmoeError):
    """The command was used wrongly, or names what is not there."""

    exit_code = EXIT_USAGE


class OutsideError(BmoeError):
    """A phone, a database, a file or another program failed."""

    exit_code = EXIT_OUTSIDE


def plain(value: Any) -> Any:
    """Return `value` as strict JSON can hold it: NaN and infinities None, bytes decoded, paths as text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).decode("utf-8", "replace")
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if hasattr(value, "_asdict"):
        return plain(value._asdict())
    return str(value)


def emit(value: Any) -> None:
    """Print one JSON document on a line of stdout: strict, ASCII only."""
    print(json.dumps(plain(value), ensure_ascii=True, allow_nan=False), flush=True)


def say(text: str) -> None:
    """Tell the person at the terminal something, on stderr. Words of phones and engines in it cannot act there."""
    from bmoe_collector.show.safe import escape

    print(escape(text, lines=True), file=sys.stderr, flush=True)


def read_small(path: Path, most: int = MOST_TEXT_BYTES) -> bytes:
    """A file that a person wrote: a plan, a prompt. Raises OSError; UserError when it has no end in sight, as a device has none."""
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise UserError(f"{path}: more than {most >> 20} MiB, which no plan and no prompt is")
    return data


def counted(number: int, noun: str) -> str:
    """How many there are, as a person says it: 1 run, 2 runs."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def data_dir() -> Path:
    """Where the default database and its artifacts live."""
    from platformdirs import user_data_path

    return user_data_path("bmoe-fleet", appauthor=False)


def database_url(db: str | None) -> str:
    """Return the URL of --db, else of BMOE_DB, else of the user's own SQLite file. A plain path is a SQLite file."""
    named = db or os.environ.get("BMOE_DB") or ""
    if not named:
        folder = data_dir()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # prompts and answers are people's own
        except OSError as error:
            raise OutsideError(f"{folder}: {error.strerror}; name a database with --db or BMOE_DB") from None
        return f"sqlite:///{folder / 'runs.db'}"
    if "://" not in named:
        path = Path(named).expanduser().absolute()
        if not path.parent.is_dir():
            raise UserError(f"--db {named}: there is no folder {path.parent}")
        if path.is_dir():
            raise UserError(f"--db {named}: is a folder; name the SQLite file in it")
        return f"sqlite:///{path}"
    return named


def open_db(db: str | None, *, reads: bool = False) -> Store:
    """Open the database a command was given (see `database_url`), made where there is none.

    With `reads`, for commands that answer from what is stored: an SQLite file that was named and is not there is a
    mistake in the name, and raises `UserError` in place of an empty answer and a new file.
    """
    from bmoe_collector.store.engine import StoreError, open_store, sqlite_file

    url = database_url(db)
    if reads and (db or os.environ.get("BMOE_DB")) and (file := sqlite_file(url)) and not file.exists():
        raise UserError(
            f"{'--db' if db else 'BMOE_DB'} {db or os.environ['BMOE_DB']}: there is no such database;"
            " `bmoe run`, `collect`, `import` and `db upgrade` make one"
        )
    try:
        store = open_store(url)
    except StoreError as error:
        raise OutsideError(str(error)) from None
    _OPENED.append(store)
    return store


def artifacts_url(store: Store) -> str:
    """Where files of runs are kept: BMOE_ARTIFACTS, else beside an SQLite database, else the user's data directory."""
    named = os.environ.get("BMOE_ARTIFACTS")
    if named:
        return named
    database = store.engine.url.database
    if store.dialect == "sqlite" and database and database != ":memory:":
        return str(Path(database).absolute().parent / "artifacts")
    return str(data_dir() / "artifacts")


def open_artifacts(store: Store) -> Artifacts:
    """Where files of runs are kept (see `artifacts_url`)."""
    from bmoe_collector.store.artifacts import Artifacts

    return Artifacts(artifacts_url(store))


def open_ingestor(store: Store) -> Ingestor:
    """What turns blocks and files of phones into rows and artifacts of this database."""
    from bmoe_collector.ingest.ingestor import Ingestor

    return Ingestor(store, open_artifacts(store))


def run_command(module: str, arguments: list[str]) -> int:
    """Import the module of a command, let it register itself and run it; return the exit code."""
    try:
        found = import_module(module)
    except ModuleNotFoundError as error:
        if error.name == module:
            say(f"bmoe {arguments[0]}: this installation has no such command")
        else:
            say(f"bmoe {arguments[0]}: {error}: install it with `pip install 'bmoe-fleet[collector]'`")
        return EXIT_OUTSIDE
    app = typer.Typer(
        name="bmoe",
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_group)
    found.register(app)
    return guarded(app, arguments)


def _group() -> None:
    """Measure bmoe-cli on phones."""


def guarded(app: typer.Typer, arguments: list[str]) -> int:
    """Run the app; turn every way it can end into an exit code and at most one message."""
    before = len(_OPENED)
    try:
        code = typer.main.get_command(app).main(arguments, prog_name="bmoe", standalone_mode=False)
    except BmoeError as error:
        say(f"bmoe {arguments[0]}: {error}")
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        say("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        drop_stdout()  # whoever read us has what it wanted
        return 0
    except Exception as error:
        return _unexpected(arguments[0], error)
    finally:
        for store in _OPENED[before:]:
            store.close()
        del _OPENED[before:]
    return code if isinstance(code, int) else 0


def _unexpected(command: str, error: Exception) -> int:
    show = getattr(error, "show", None)
    if callable(show) and hasattr(error, "exit_code"):  # click's own usage errors, whichever click typer carries
        show()
        return EXIT_USAGE
    if isinstance(error, typer.Exit):
        return int(error.exit_code)
    if isinstance(error, OSError):
        say(f"bmoe {command}: {error.filename or 'system'}: {error.strerror or error}")
        return EXIT_OUTSIDE
    if isinstance(error, UnicodeEncodeError) and "surrogates" in error.reason:
        say(f"bmoe {command}: what was typed is no UTF-8 text: {error.object[:80]!r}")
        return EXIT_USAGE
    if _of_database(error):
        told = str(getattr(error, "orig", None) or error)
        mend = (
            "ask its owner, or name one of your own with --db"
            if "readonly" in told
            else "`bmoe db check` may tell more"
        )
        say(f"bmoe {command}: database: {told}; {mend}")
        return EXIT_OUTSIDE
    from bmoe_collector.store.artifacts import ArtifactError

    if isinstance(error, ArtifactError):
        say(f"bmoe {command}: {error}")
        return EXIT_OUTSIDE
    import traceback

    say("".join(traceback.format_exception(error)).rstrip("\n"))
    say(f"bmoe {command}: this is a fault of bmoe itself; the lines above say where")
    return EXIT_OUTSIDE


def _of_database(error: Exception) -> bool:
    """A database's own refusal, or something in it that cannot be read: text or JSON that is none, where bits were lost."""
    import json
    import traceback

    drivers = ("sqlalchemy", "sqlite3", "psycopg")
    if type(error).__module__.partition(".")[0] in drivers:
        return True
    passed = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__))
    unreadable = isinstance(error, json.JSONDecodeError | UnicodeDecodeError)
    return unreadable and any(name.partition(".")[0] in drivers for name in passed)
