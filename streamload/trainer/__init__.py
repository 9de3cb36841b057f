"""The trainer's side: the line to its feeder, the batches that come from it, and the passes of the loop over them."""
