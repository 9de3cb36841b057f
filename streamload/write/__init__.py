"""Samples to shards."""
