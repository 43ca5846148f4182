"""Turns logits into tokens on every engine: truncation, drawing, verification, stop strings."""
