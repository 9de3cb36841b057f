"""The disk cache: shared by processes, and safe against being killed."""
