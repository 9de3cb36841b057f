"""Which shards there are, and what each of them holds."""
