"""The feeder, wherever it runs: an epoch of one rank from end to end, and what trainer and feeder say to each other."""
