"""From gradients to weights: AdamW, its state, the ranks that share the work, sharded weights."""
