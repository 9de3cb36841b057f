"""Which samples an epoch holds, as the user says it: weights, samplers, mixtures."""
