"""Where this process runs: its rank, its processors, its memory, and how processes are started."""
