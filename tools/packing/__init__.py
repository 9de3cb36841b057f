"""From a listed source to finished shards: planned, staged, packed by several processes, published, resumed."""
