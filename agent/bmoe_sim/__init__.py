"""A stand-in engine that keeps the contract; whatever it produces is marked simulated."""
