"""The command line: `shardify` and `streamload`."""
