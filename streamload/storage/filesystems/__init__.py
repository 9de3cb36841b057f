"""Whatever fsspec knows, and a filesystem of the user's."""
