"""The phone's record: append-only segments of frames on disk, served as they lie, deleted when the store has them."""

from bmoe_agent.spool.layout import SpoolError, SpoolFullError
from bmoe_agent.spool.reading import Chunk
from bmoe_agent.spool.spool import Spool, Who
from bmoe_agent.spool.summary import RunSummary
from bmoe_agent.spool.writer import FIELDS, RunWriter

__all__ = ["FIELDS", "Chunk", "RunSummary", "RunWriter", "Spool", "SpoolError", "SpoolFullError", "Who"]
