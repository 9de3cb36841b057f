"""Which sample when: shuffle, lanes, the plan of an epoch, and the position to resume from. Pure NumPy."""
