"""A one-line kernel, in a separate module because importing it decides Triton's mode."""

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def add_one(values, N: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Add 1 to the first N values."""
    tl.store(values + tl.arange(0, N), tl.load(values + tl.arange(0, N)) + 1)
