"""Fused layers and compiled attention, which make the torch engine fast on a CPU.

`model` asks `fused_models.why_not_fused` and takes transformers' layers otherwise.
"""
