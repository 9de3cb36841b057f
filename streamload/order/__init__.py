"""Compute the order of samples: shuffle, lanes, an epoch's plan, and the position to resume from. Pure NumPy."""
