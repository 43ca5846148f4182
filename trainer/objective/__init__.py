"""From log-probabilities to a loss: algorithms, corrections, per-token targets and their sums."""
