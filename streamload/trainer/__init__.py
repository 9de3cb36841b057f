"""The trainer's side: the connection to its feeder, the batches that come from it, and the iterators over them."""
