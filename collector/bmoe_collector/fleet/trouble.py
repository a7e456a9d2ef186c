"""Whose trouble it is that a phone cannot be drained: the phone's, the link's, or this host's own.

In: what went wrong. Out: the state the phone is shown in (`reach.states.ADVICE` says what to do), one sentence, and whether it
is a fault of this program, whose whole story belongs into the log.
"""

from __future__ import annotations

from bmoe_proto import calls
from sqlalchemy.exc import SQLAlchemyError

from bmoe_collector.common import BmoeError
from bmoe_collector.ingest.ingestor import IngestError
from bmoe_collector.reach.states import state_of
from bmoe_collector.store.artifacts import ArtifactError
from bmoe_collector.store.engine import StoreError, first_line

OUR_OWN = frozenset({"database", "host_storage"})
"""States that another phone would be in as well."""


class LeaseLostError(Exception):
    """This host may not drain the phone any more."""


def told(error: Exception) -> tuple[str, str, bool]:
    """State, sentence, and whether it is a fault of this program."""
    if isinstance(error, SQLAlchemyError | StoreError):
        return "database", first_line(error), False
    if isinstance(error, ArtifactError | OSError):
        return "host_storage", str(error), False
    if isinstance(error, LeaseLostError):
        return "held", str(error), False
    if isinstance(error, IngestError):
        return "refused", str(error), False
    state, sentence = state_of(error)
    return state, sentence, not isinstance(error, BmoeError | calls.CallError)
