"""From gradients to weights: AdamW, its state, and the update of one rank."""
