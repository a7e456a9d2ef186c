"""Asking about stored runs: the filter language, lists, read-only SQL over documented views."""
