"""What is said: the engine's text contract and what crosses the wire."""
