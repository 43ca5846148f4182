"""A checksum of a chunk, computed on the device where it lies, at some gigabytes a second on a CPU.

Engines compare the fingerprint of all weights after each installation. But one that holds packed
copies can compare some columns only (`asyncrl.wire.weights.fingerprint`), and NCCL checks nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.wire.weights.fingerprint import pseudo_random

_BLOCK = 1 << 15
"""64-bit words; as many numbers stay in a core's cache."""


@torch.no_grad()
def checksum(part: Tensor) -> Tensor:
    """`[1]` int64 of `[n]` bytes, n a multiple of 8.

    The sum of all words times odd pseudo-random numbers, modulo 2**64, block by block. One changed
    word is always found; of other damage, all but about 2**-64.
    """
    words = part.view(torch.int64)
    numbers = pseudo_random(0, _BLOCK, part.device) | 1
    sums = (_by_dot if part.device.type == "cpu" else _by_product)(words, numbers)
    odd = 2 * torch.arange(len(sums), device=part.device) + 1
    return (sums * odd).sum(0, keepdim=True)


def _by_dot(words: Tensor, numbers: Tensor) -> Tensor:
    """`[blocks]` sums, without memory for products."""
    return torch.stack([torch.dot(one, numbers[: len(one)]) for one in words.split(_BLOCK)])


def _by_product(words: Tensor, numbers: Tensor) -> Tensor:
    """The same where there is no dot product of integers."""
    whole = len(words) // _BLOCK * _BLOCK
    sums = (words[:whole].view(-1, _BLOCK) * numbers).sum(1)
    rest = words[whole:]
    if not len(rest):
        return sums
    return torch.cat([sums, (rest * numbers[: len(rest)]).sum(0, keepdim=True)])
