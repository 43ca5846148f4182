"""Kernels that only speed up training on a CPU: numba kernels, oneDNN linear layers, fused blocks.

Results do not depend on them; `trainer.fused: false` uses none of the kernels.
"""
