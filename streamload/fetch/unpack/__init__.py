"""Compressed shards: unpacked while they arrive, as parts like any other."""
