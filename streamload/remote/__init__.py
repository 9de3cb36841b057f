"""Feeders on other nodes: actors of a Ray cluster, and the relay that puts their batches together for a trainer."""
