"""`bmoe events FILE|-`: an engine's standard output as one JSON object per event.

In: a file, or bytes on stdin as they come. Out: strict ASCII JSON, one object a line, in order, each printed as soon as its
lines are there. Whatever the bytes are, the answer is theirs and the exit code 0.
"""

from __future__ import annotations

import json as json_module
import sys
from collections import Counter
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from bmoe_collector.common import DbOption, JsonOption, OutsideError, UserError, plain, say

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from bmoe_proto.contract.events import Event

_PIECE = 1 << 16
_encode = json_module.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("events", help="Parse an engine's stdout; print one JSON object per event, in order.")(events)


def events(
    file: Annotated[str, typer.Argument(metavar="FILE|-", help="What the engine printed; - reads stdin.")],
    json: JsonOption = False,  # noqa: ARG001 - JSON is what this command prints either way
    db: DbOption = None,  # noqa: ARG001 - accepted after every command; nothing is stored here
) -> None:
    """Parse a file or stdin; print its events."""
    from bmoe_proto.contract.stdout import StdoutParser

    parser = StdoutParser()
    kinds: Counter[str] = Counter()
    with _opened(file) as stream:
        while piece := _read(stream, file):
            kinds.update(_print(parser.feed(piece)))
    kinds.update(_print(parser.close()))
    if set(kinds) == {"other"}:
        say(f"{file}: nothing here is of the engine's: every line is an `other`; is it the engine's stdout?")


def _opened(file: str) -> AbstractContextManager[BinaryIO]:
    if file == "-":
        return nullcontext(sys.stdin.buffer)
    try:
        return Path(file).open("rb", buffering=0)
    except IsADirectoryError:
        raise UserError(f"{file}: is a directory; name the file that holds the engine's stdout") from None
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}; name a file, or - for stdin") from None


def _read(stream: BinaryIO, file: str) -> bytes:
    # What is there now, without waiting for a full piece: a live engine's lines are shown as they come.
    read: Any = getattr(stream, "read1", stream.read)
    try:
        return bytes(read(_PIECE) or b"")
    except OSError as error:
        raise OutsideError(f"{file}: cannot be read: {error.strerror}") from None


def _print(found: Iterable[Event]) -> list[str]:
    """Print events; their kinds."""
    told = [event.to_json() for event in found]
    if told:
        sys.stdout.write("\n".join(map(_line, told)) + "\n")
        sys.stdout.flush()
    return [str(one["event"]) for one in told]


def _line(value: dict[str, Any]) -> str:
    try:
        return _encode(value)
    except ValueError:
        return _encode(plain(value))
