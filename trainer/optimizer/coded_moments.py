"""Adam's moments in 8 bits each: a code per number, and a scale per block of a row.

A code is a power: 0.9 of the block's largest number, 0.8, ... down to a millionth of it (a
millionth of a millionth for the second moment, which is a square). Neighbours differ by an eighth
everywhere, so a weight with small gradients next to one with large ones keeps its own step. A
number between two codes takes one of them at random, in proportion, so the expected value is exact.
The second moment has no code for 0: with a nonzero first one that would be an unbounded step.

Blocks do not cross rows, so a checkpoint's rows can be dealt to another number of ranks. (Blocks:
arXiv 2110.02861, section 2.1, which rounds to the nearest code of a fixed table.)
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 256
"""Numbers of a row with one scale."""
SCALE = "_scale"
"""Suffix of a moment's name for its scales."""


@dataclass(frozen=True, slots=True)
class Code:
    """Codes of one moment. Magnitudes are shares of the block's largest."""

    signed: bool
    decades: float
    """Powers of ten between the smallest magnitude and 1."""

    @property
    def steps(self) -> int:
        """Number of codes from the smallest magnitude to 1."""
        return 126 if self.signed else 255

    def magnitudes(self, like: Tensor) -> Tensor:
        """Magnitude of each code, rising; signed ones begin with 0."""
        powers = torch.arange(-self.steps, 1, dtype=torch.float64, device=like.device)
        found = torch.pow(10.0, powers * (self.decades / self.steps))
        return (pad(found, (1, 0)) if self.signed else found).to(like.dtype)

    def encode(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """Encode `[R, C]` as `[R, C]` uint8 and `[R, blocks]` scales, rounded stochastically."""
        blocks = _blocks(value)
        scales = blocks.abs().amax(2)
        safe = torch.where(scales > 0, scales, 1.0)
        share = (blocks.abs() / safe[..., None]).clamp_(max=1.0)
        table = self.magnitudes(value)
        last = len(table) - 1
        # In steps below the largest; a magnitude of 0 is infinitely many.
        steps = torch.log10(share).mul_(self.steps / self.decades).add_(last)
        lower = steps.floor_().clamp_(0, last - 1).long()
        below, above = table[lower], table[lower + 1]
        chance = (share - below).div_(above - below)
        codes = lower + (torch.rand_like(chance) < chance)
        if self.signed:
            codes += (blocks < 0) * 128
        return codes.to(torch.uint8).flatten(1)[:, : value.shape[1]].contiguous(), scales

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Decode `[R, C]` uint8 and `[R, blocks]` scales to `[R, C]`."""
        table = self.magnitudes(scales)
        if self.signed:
            table = torch.cat([table, -table])
        value = _blocks(table[codes.long()]) * scales[..., None]
        whole: Tensor = value.flatten(1)
        return whole[:, : codes.shape[1]]


CODES = {"exp_avg": Code(signed=True, decades=6.0), "exp_avg_sq": Code(signed=False, decades=12.0)}


def empty(parameter: Tensor) -> dict[str, Tensor]:
    """Create moments of 0: codes like the parameter, and scales."""
    rows, blocks = len(parameter), -(-math.prod(parameter.shape[1:]) // BLOCK)
    found: dict[str, Tensor] = {}
    for name in CODES:
        found[name] = torch.zeros_like(parameter, dtype=torch.uint8)
        found[name + SCALE] = parameter.new_zeros(rows, blocks)
    return found


def parts(parameter: Tensor, size: int) -> Iterator[slice]:
    """Split rows into slices of about `size` numbers, at least one row."""
    rows = max(1, size * len(parameter) // max(1, parameter.numel()))
    for start in range(0, len(parameter), rows):
        yield slice(start, min(len(parameter), start + rows))


def _blocks(value: Tensor) -> Tensor:
    filled: Tensor = pad(value, (0, -value.shape[1] % BLOCK))
    return filled.view(len(filled), filled.shape[1] // BLOCK, BLOCK)
