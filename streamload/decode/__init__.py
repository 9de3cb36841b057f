"""Bytes to rows: decoders by extension, the worker, and the pool of workers."""
