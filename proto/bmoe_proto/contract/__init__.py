"""The engine's text contract, sans-IO: bytes in, events and rows out."""
