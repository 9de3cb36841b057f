"""Bytes to values to a batch's memory: all that runs in a worker, wherever the worker is."""
