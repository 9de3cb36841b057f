"""The disk cache: shared by processes, safe against being killed, evicted by next use."""
