"""Bytes to rows: decoders by extension, image operations, the worker and the pool of workers."""
