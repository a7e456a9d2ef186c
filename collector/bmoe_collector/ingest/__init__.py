"""From frames to committed rows: `Ingestor`, and rows made again from the raw record."""

from bmoe_collector.ingest.ingestor import IngestError, Ingestor, Wanted

__all__ = ["IngestError", "Ingestor", "Wanted"]
