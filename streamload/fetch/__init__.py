"""Fetch the parts of remote and compressed shards into memory that workers map, within a byte budget."""
