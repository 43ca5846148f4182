"""What only makes training on a CPU fast: numba kernels, oneDNN linear layers, fused blocks.

Nothing here is needed for a right result; `trainer.fused: false` uses none of the kernels.
"""
