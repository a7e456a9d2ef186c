"""Facts of the configured engines for a host that asks what this phone has: it never waits long for one that does not answer.

In: the engines of the configuration. Out: their facts as far as they are known. One thread asks, one engine after the
other; what could not be asked says why in its version text, and is asked again when its file changes or after a while.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bmoe_proto.v1 import telemetry_pb2 as pb

from bmoe_agent import engine
from bmoe_agent.config import EngineConfig

WAIT_S = 3.0
AGAIN_S = 600.0
_Mark = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class _Known:
    mark: _Mark
    facts: pb.EngineFacts
    failed_at: float | None = None  # monotonic


class EngineFacts:
    """What is known of each engine, by its configured name; may be asked from any thread."""

    def __init__(self, cache: Path, stopping: Callable[[], bool]) -> None:
        self._cache = cache
        self._stopping = stopping
        self._changed = threading.Condition()
        self._known: dict[str, _Known] = {}
        self._thread: threading.Thread | None = None

    def known(self, engines: Iterable[EngineConfig]) -> list[pb.EngineFacts]:
        """Facts of these, without asking anything now."""
        with self._changed:
            return [self._said(one) for one in engines]

    def of(self, engines: Sequence[EngineConfig], wait_s: float = WAIT_S) -> list[pb.EngineFacts]:
        """Facts of these; an engine that has not answered after `wait_s` seconds says so, and goes on being asked."""
        with self._changed:
            if self._thread is None and (missing := [one for one in engines if self._to_be_asked(one)]):
                self._thread = threading.Thread(target=self._ask, args=(missing,), name="engines", daemon=True)
                self._thread.start()
            self._changed.wait_for(lambda: self._thread is None, wait_s)
        return self.known(engines)

    def join(self) -> None:
        """Wait for the asking to end; soon, once `stopping` says so."""
        thread = self._thread
        if thread is not None:
            thread.join()

    def _to_be_asked(self, one: EngineConfig) -> bool:
        known = self._known.get(one.name)
        if known is None or known.mark != _mark(one):
            return True
        return known.failed_at is not None and time.monotonic() - known.failed_at > AGAIN_S

    def _ask(self, engines: Sequence[EngineConfig]) -> None:
        try:
            for one in engines:
                if self._stopping():
                    return
                mark = _mark(one)
                library = {"LD_LIBRARY_PATH": one.ld_library_path} if one.ld_library_path else {}
                try:
                    found = _Known(mark, engine.describe(one.path, self._cache, one.name, library, self._stopping))
                except (engine.EngineError, OSError) as error:
                    found = _Known(mark, _untold(one, f"cannot be asked: {error}"), time.monotonic())
                with self._changed:
                    self._known[one.name] = found
        finally:
            with self._changed:
                self._thread = None
                self._changed.notify_all()

    def _said(self, one: EngineConfig) -> pb.EngineFacts:
        known = self._known.get(one.name)
        return known.facts if known is not None else _untold(one, "cannot be asked: it has not answered yet")


def _untold(one: EngineConfig, why: str) -> pb.EngineFacts:
    return pb.EngineFacts(name=one.name, path=str(one.path), version_text=why)


def _mark(one: EngineConfig) -> _Mark:
    """Changes when the binary does, or what it is started with."""
    try:
        facts = os.stat(one.path)
    except OSError as error:
        return (str(one.path), one.ld_library_path, error.errno)
    return (str(one.path), one.ld_library_path, facts.st_size, facts.st_mtime_ns, facts.st_ino, facts.st_mode)
