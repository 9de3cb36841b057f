"""Rows to batches: the layout of a slot, collating into it, the in-order batcher, and pinning."""
