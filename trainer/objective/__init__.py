"""Log-probabilities become a loss: algorithms, corrections, per-token targets and their sums."""
