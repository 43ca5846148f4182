"""Fingerprints of weights: do an engine and the trainer hold the same numbers?

A tensor is taken as a matrix of bit patterns x[r, c]; its last dimension has the columns. Its
digest is two sums modulo 2**64 with fixed pseudo-random weights a and b:

    sum over r of a[r] * (sum over c of x[r, c])
    sum over c of b[c] * (sum over r of x[r, c])

Every element counts in both, so one changed element is found, not only one that a sample of
elements happens to hit: after a step of a sparse tensor, such as an embedding, few rows differ.
Sums need no order, so a GPU and a CPU give the same digest. They add over any partition into
blocks, so shards can be summed. Two tensors with different sums have equal digests with a
probability of about 2**-128. A change that keeps all sums of rows and of columns (+d, -d, -d, +d on
the corners of a rectangle) is not found; this tells a mistake from health, and is no protection
against forgery.

Cost: the memory is read or written about four times where it lies, and one small array is copied
from the device. It is a small part of the time of a copy over a bus.

-0.0 counts as 0.0: some engines hold weights in a packed form that only a product reveals.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from typing import Final

import torch
from torch import Tensor

from wire.weights.layout import Fingerprint, TensorDigest

_CPU_BLOCK: Final = 1 << 16
"""Elements: as int64 they stay in a core's cache, which makes both sums several times faster."""
_GPU_BLOCK: Final = 1 << 26
"""Elements: bounds the temporary memory."""
_BITS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by size in bytes."""
_ROWS, _COLUMNS = 0, 1 << 40
"""Where the pseudo-random weights of rows and of columns begin."""


class TensorHash:
    """Computes the digest of one matrix of `rows` x `columns` from its blocks, in any order.

    Args:
        rows: of the whole matrix.
        columns: of the whole matrix.
        device: where the blocks are.
        dtype: that floating-point blocks are converted to first; None: as they are.
    """

    def __init__(
        self, rows: int, columns: int, device: torch.device, dtype: torch.dtype | None = None
    ) -> None:
        self._of_rows = _pseudo_random(_ROWS, rows, device)
        self._of_columns = _pseudo_random(_COLUMNS, columns, device)
        self._dtype = dtype
        self._value = torch.zeros(2, dtype=torch.int64, device=device)

    @property
    def value(self) -> Tensor:
        """`[2]` int64: the sums of the blocks that were added."""
        return self._value

    def add(self, block: Tensor, row: int = 0, column: int = 0) -> None:
        """Add a `[r, c]` block whose first element is the matrix's element [row, column]."""
        height, width = block.shape
        of_columns = self._of_columns[column : column + width]
        on_cpu = block.device.type == "cpu"
        step = max(1, (_CPU_BLOCK if on_cpu else _GPU_BLOCK) // max(1, width))
        for start in range(0, height, step):
            bits = _bit_patterns(block[start : start + step], self._dtype)
            if on_cpu:
                bits = bits.to(torch.int64)
            first = row + start
            of_rows = self._of_rows[first : first + len(bits)]
            by_row = (bits.sum(1, dtype=torch.int64) * of_rows).sum()
            by_column = (bits.sum(0, dtype=torch.int64) * of_columns).sum()
            self._value += torch.stack([by_row, by_column])


@torch.no_grad()
def fingerprint(
    tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None
) -> Fingerprint:
    """The digest of every tensor, computed on the device where it lies.

    Args:
        tensors: by name.
        dtype: that floating-point tensors are converted to first, for comparison with an engine
            that holds them so; None: as they are.
    """
    hashes = [(name, hash_of(tensor, dtype), _name(tensor, dtype)) for name, tensor in tensors]
    return collect(hashes)


def hash_of(tensor: Tensor, dtype: torch.dtype | None = None) -> TensorHash:
    """The hash of a whole tensor of any number of dimensions."""
    columns = tensor.shape[-1] if tensor.ndim else 1
    matrix = tensor.detach().reshape(math.prod(tensor.shape[:-1]), columns)
    hashed = TensorHash(matrix.shape[0], matrix.shape[1], tensor.device, dtype)
    hashed.add(matrix)
    return hashed


def collect(hashes: Iterable[tuple[str, TensorHash, str]]) -> Fingerprint:
    """The fingerprint of names, hashes and data types; one copy from each device."""
    found = list(hashes)
    by_device: dict[torch.device, list[int]] = {}
    for index, (_, hashed, _) in enumerate(found):
        by_device.setdefault(hashed.value.device, []).append(index)
    digests: dict[str, TensorDigest] = {}
    for indices in by_device.values():
        values = torch.stack([found[i][1].value for i in indices]).cpu().numpy()
        for i, value in zip(indices, values.astype("<i8"), strict=True):
            name, _, dtype = found[i]
            digests[name] = TensorDigest(dtype, value.tobytes().hex())
    return Fingerprint({name: digests[name] for name, _, _ in found}, _whole(digests))


def _whole(digests: dict[str, TensorDigest]) -> str:
    text = "\n".join(f"{name} {one.dtype} {one.value}" for name, one in sorted(digests.items()))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _bit_patterns(block: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The elements' bits as signed integers; that of -0.0 is that of 0.0."""
    if block.is_floating_point():
        converted = block if dtype is None else block.to(dtype)
        block = converted + 0.0 if converted.dtype.itemsize > 1 else converted
    elif block.dtype == torch.bool:
        block = block.to(torch.int8)
    return block.contiguous().view(_BITS[block.dtype.itemsize])


def _name(tensor: Tensor, dtype: torch.dtype | None) -> str:
    held = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return str(held).removeprefix("torch.")


def _pseudo_random(first: int, count: int, device: torch.device) -> Tensor:
    """`[count]` int64: outputs `first`, `first` + 1, ... of SplitMix64."""
    x = torch.arange(first + 1, first + 1 + count, dtype=torch.int64, device=device)
    x = x * _signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ _shifted(x, shift)) * _signed(factor)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """A shift to the right that fills with zeros."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
