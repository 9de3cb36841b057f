"""Connect a training process to its feeder, and iterate over the batches."""
