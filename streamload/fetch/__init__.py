"""Bringing bytes near: storage, listing, and the shards that workers can map."""
