"""An epoch to tasks to batches, in order."""
