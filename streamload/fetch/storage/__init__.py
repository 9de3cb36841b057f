"""Where shards lie: local disks, buckets, and whatever else fsspec reaches, behind one protocol."""
