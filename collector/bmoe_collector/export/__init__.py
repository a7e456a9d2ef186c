"""Runs going out: files, a partitioned Parquet dataset, a row for a community table."""
