"""Sharded weights and gradients, by FSDP2 (decision 0067)."""
