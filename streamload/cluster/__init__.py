"""Run feeders on other nodes, in actors of a Ray cluster."""
