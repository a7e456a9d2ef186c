"""The host's side: reach phones, ingest, store, judge, query and show."""
