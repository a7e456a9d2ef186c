"""The phone's side: launch the engine, watch it, sample the kernel, keep the record, serve it."""

__version__ = "0.1.0"
