"""What a store has committed of one run: cursors and artifact hashes, kept in the run's `acks.json`.

In: acknowledgements. Out: how far each segment and which artifacts are acknowledged, by store.

    {"<store id, hex>": {"segments": {"<segment, hex>": offset}, "artifacts": {"<name>": "<sha256, hex>"}}}

Losing the newest of this only means sending something again, so it is written to the file now and then and synced
before anything is deleted because of it. A file that cannot be read counts as nothing acknowledged.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from bmoe_agent.spool import layout


@dataclass(slots=True)
class StoreAcks:
    """One store's acknowledgements of one run."""

    segments: dict[bytes, int] = field(default_factory=dict)
    artifacts: dict[str, bytes] = field(default_factory=dict)


@dataclass(slots=True)
class Acks:
    """Every store's acknowledgements of one run."""

    path: str
    stores: dict[bytes, StoreAcks] = field(default_factory=dict)
    dirty: bool = False

    def of(self, store_id: bytes) -> StoreAcks:
        """A store's, made when missing."""
        return self.stores.setdefault(store_id, StoreAcks())

    def cursor(self, store_id: bytes, segment: bytes, offset: int) -> bool:
        """Everything before `offset` of a segment is committed; returns whether that is news. Never goes back."""
        known = self.of(store_id).segments
        if known.get(segment, -1) >= offset:
            return False
        known[segment] = offset
        self.dirty = True
        return True

    def artifact(self, store_id: bytes, name: str, sha256: bytes) -> None:
        """An artifact with this hash is stored."""
        self.of(store_id).artifacts[name] = sha256
        self.dirty = True

    def save(self, *, durable: bool) -> None:
        """Write the file when something changed, or in any case when it has to be durable."""
        if not (self.dirty or durable):
            return
        told = {
            store.hex(): {
                "segments": {segment.hex(): offset for segment, offset in acks.segments.items()},
                "artifacts": {name: sha256.hex() for name, sha256 in acks.artifacts.items()},
            }
            for store, acks in self.stores.items()
        }
        layout.replace_file(self.path, json.dumps(told).encode("ascii"), durable=durable)
        self.dirty = False


def load(directory: str) -> Acks:
    """The acknowledgements kept in a run's directory."""
    acks = Acks(os.path.join(directory, layout.ACKS))
    try:
        with open(acks.path, "rb") as file:
            told = json.load(file)
        for store, facts in told.items():
            acks.stores[bytes.fromhex(store)] = _store_acks(facts)
    except FileNotFoundError:
        pass
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        acks.stores.clear()
    return acks


def _store_acks(facts: Mapping[str, Mapping[str, object]]) -> StoreAcks:
    segments = {bytes.fromhex(name): int(str(offset)) for name, offset in facts["segments"].items()}
    artifacts = {name: bytes.fromhex(str(sha256)) for name, sha256 in facts["artifacts"].items()}
    return StoreAcks(segments, artifacts)
