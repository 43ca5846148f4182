"""From logits to tokens, on every engine: truncation, drawing, verification of drafts, stopping."""
