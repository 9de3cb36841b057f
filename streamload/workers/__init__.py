"""Worker processes, ranks and processors."""
