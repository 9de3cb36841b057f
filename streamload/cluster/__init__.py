"""Feeders on other nodes: actors of a Ray cluster."""
