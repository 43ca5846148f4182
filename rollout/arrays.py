"""Checks of integer arrays for compiled code, which checks nothing itself."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from asyncrl.rollout.trajectory import IntArray

INT32_MAX = 2**31 - 1


def int32_values(name: str, values: ArrayLike, minimum: int = -(2**31)) -> IntArray:
    """Return `values` as a contiguous int32 vector; `name` is for error messages.

    Raises TypeError if they are not integers; ValueError if they are not one-dimensional, or one is
    outside [minimum, 2 ** 31 - 1].
    """
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, not of shape {array.shape}")
    if not len(array):
        return np.empty(0, np.int32)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, not {array.dtype}")
    low, high = int(array.min()), int(array.max())
    if low < minimum or high > INT32_MAX:
        raise ValueError(
            f"{name} must lie between {minimum} and {INT32_MAX}, "
            f"not {low if low < minimum else high}"
        )
    return np.ascontiguousarray(array, np.int32)


def check_offsets(what: str, offsets: IntArray, total: int) -> None:
    """Raise ValueError unless `offsets` `[B+1]` rise from 0 to `total`.

    `what` is the called function, for the error message; row i is offsets[i] .. offsets[i+1] - 1 of
    a flat array of length `total`.
    """
    if len(offsets) and offsets[0] == 0 and offsets[-1] == total and (np.diff(offsets) >= 0).all():
        return
    brief = np.array2string(offsets, threshold=8)
    raise ValueError(f"{what}: offsets must rise from 0 to {total}, not {brief}")
