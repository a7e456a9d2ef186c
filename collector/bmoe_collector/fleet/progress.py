"""A plan's progress at the terminal: live on a terminal, one line a change elsewhere. Everything goes to stderr."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping

from bmoe_collector.common import say
from bmoe_collector.fleet.follow import CellNow
from bmoe_collector.fleet.phone import PhoneNow
from bmoe_collector.show.safe import escape


def lines(phones: list[PhoneNow], found: list[CellNow], names: Mapping[str, str], total: int) -> list[str]:
    """One line a phone: what it does, and the newest cell with its tokens."""
    shown = []
    for phone in phones:
        mine = [cell for cell in found if cell.uuid == phone.uuid]
        done = len({cell.cell_index for cell in mine if cell.ended})
        name = escape(names.get(phone.uuid) or phone.name or phone.uuid[:12])
        words = [f"{name}: {done}/{total} cells", escape(phone.doing or phone.state)]
        if phone.detail:
            words.append(escape(phone.detail))
        if mine:
            cell = mine[-1]
            rate = f", {cell.tok_s:.2f} tok/s" if cell.tok_s is not None else ""
            attempt = f" (attempt {cell.attempt})" if cell.attempt > 1 else ""
            words.append(f"{escape(cell.cell)}{attempt}: {cell.outcome}, {cell.tokens} tokens{rate}")
        shown.append("; ".join(words))
    return shown


class Progress:
    """Shows lines, each time anew on a terminal, only what changed elsewhere."""

    def __init__(self, quiet: bool = False) -> None:
        """`quiet` shows nothing."""
        self._quiet = quiet
        self._last: list[str] = []
        self._live: object | None = None

    @contextlib.contextmanager
    def on(self) -> Iterator[Progress]:
        """Take and give back the terminal."""
        if self._quiet or not sys.stderr.isatty():
            yield self
            return
        from rich.console import Console
        from rich.live import Live

        with Live(console=Console(stderr=True), refresh_per_second=4, transient=True) as live:
            self._live = live
            yield self

    def show(self, now: list[str]) -> None:
        """Show these lines."""
        if self._quiet or now == self._last:
            return
        if self._live is not None:
            from rich.live import Live
            from rich.text import Text

            assert isinstance(self._live, Live)
            self._live.update(Text("\n".join(now)))
        else:
            # a token count that moves is no news in a log
            for before, line in zip([*self._last, *[""] * len(now)], now, strict=False):
                if _without_counts(before) != _without_counts(line):
                    say(line)
        self._last = now


def _without_counts(line: str) -> str:
    head, _, tail = line.rpartition("; ")
    return head + tail.split(",")[0]
