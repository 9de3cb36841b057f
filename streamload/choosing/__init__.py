"""Which samples an epoch holds: weights, samplers, mixtures, and epochs of a size of their own."""
