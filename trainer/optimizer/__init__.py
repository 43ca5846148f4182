"""The path from gradients to weights: AdamW, its state, and the update of one rank."""
