"""What only makes the torch engine fast on a CPU: fused layers and compiled attention.

`model` asks `fused_models.why_not_fused` and takes transformers' layers otherwise.
"""
