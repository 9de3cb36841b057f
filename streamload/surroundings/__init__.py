"""Where this process runs: its rank, its share of the processors, and what containers and jobs allow it."""
