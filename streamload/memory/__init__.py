"""Shared bytes: mapped memory passed by descriptor, the messages that carry it, and the slots of batches."""
