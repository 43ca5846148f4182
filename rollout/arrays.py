"""Numbers from a caller, made safe for compiled code that checks nothing."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from rollout.trajectory import IntArray

LARGEST = 2**31 - 1


def int32_values(name: str, values: ArrayLike, least: int = -(2**31)) -> IntArray:
    """`values` as a contiguous int32 vector.

    Raises:
        TypeError: they are not integers.
        ValueError: not one-dimensional, or a value is outside [least, 2 ** 31 - 1].
    """
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, not of shape {array.shape}")
    if not len(array):
        return np.empty(0, np.int32)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, not {array.dtype}")
    low, high = int(array.min()), int(array.max())
    if low < least or high > LARGEST:
        raise ValueError(
            f"{name} must lie between {least} and {LARGEST}, not {low if low < least else high}"
        )
    return np.ascontiguousarray(array, np.int32)


def are_rollouts(heads: IntArray, tokens: IntArray, vocabulary: int) -> bool:
    """Rollouts read from elsewhere hold nothing but token ids, and -1 at the front of heads.

    Args:
        heads: `[S, H]` the first H of the tokens of each rollout.
        tokens: `[N]` all tokens, heads included; not empty.
        vocabulary: ids are below it.
    """
    empty = heads < 0
    ordered = bool((empty[:, :-1] | ~empty[:, 1:]).all())
    return (
        ordered
        and int(heads.min()) >= -1
        and int((tokens < 0).sum()) == int(empty.sum())
        and int(tokens.max()) < vocabulary
    )
