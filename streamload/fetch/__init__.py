"""Fetching bytes: storage, listing, and the shards that workers can map."""
