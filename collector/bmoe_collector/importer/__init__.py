"""Files of an engine into the store: recognise, group, identify, write."""

from bmoe_collector.importer.imports import Imported, Result, import_paths

__all__ = ["Imported", "Result", "import_paths"]
