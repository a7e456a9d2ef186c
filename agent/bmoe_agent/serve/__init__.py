"""The agent's gRPC service: every call proven, the record served as it lies on disk."""
