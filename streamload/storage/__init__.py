"""Where bytes lie: list, stat, read ranges, write; one retry policy."""
