"""Decode traces: what the router asked for, where compute went, how flash was read.

Files are read lazily with Polars (`read`), every view is a function from a trace and a selection to a `View` of plain rows
(`route`, `reuse`, `curve`, `compute`, `io`), and `join` puts the time of each token beside what was routed. The formats
are the contract's "Route trace" and "Decode traces".
"""
