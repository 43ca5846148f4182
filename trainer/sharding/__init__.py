"""Weights and gradients in parts on the ranks of a trainer, by FSDP2 (decision 0067)."""
