"""Which shards there are: one listing or one index, and what it says of them."""
