"""Writing shards and indexes to where they shall lie: buckets, servers, local folders."""
