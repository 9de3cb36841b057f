"""List the shards of a dataset, and read, write and join the tables that locate their samples."""
