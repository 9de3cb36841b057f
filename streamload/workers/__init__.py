"""Who does the tasks: processes, or the caller."""
