"""From a listed source to shards: planned, packed by several processes in a staging folder, published, resumed."""
