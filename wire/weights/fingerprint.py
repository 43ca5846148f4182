"""Fingerprints of weights, which compare an engine's numbers with the trainer's.

A tensor is taken as a matrix of bit patterns x[r, c]; its last dimension has the columns. Its
digest is two sums modulo 2**64 with fixed pseudo-random weights a and b:

    sum over r of a[r] * (sum over c of x[r, c])
    sum over c of b[c] * (sum over r of x[r, c])

Every element counts in both, so one changed element is found. A GPU and a CPU give the same digest,
and digests add over any partition into blocks. Two tensors with different sums have equal digests
with a probability of about 2**-128. A change that keeps all sums of rows and of columns (+d, -d,
-d, +d on the corners of a rectangle) is not found; fingerprints detect mistakes, not forgery.

Some engines hold weights in a packed form that can only be multiplied by. A product with a unit
vector gives one column exactly, except for the sign of a zero. So a digest has a second part, the
same sums over a few fixed columns (`probe_columns`), and -0.0 counts as 0.0.
"""

import functools
import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from asyncrl.wire.weights.layout import Fingerprint, TensorDigest

_CPU_BLOCK: Final = 1 << 16
"""Elements: as int64 they stay in a core's cache, which makes both sums several times faster."""
_GPU_BLOCK: Final = 1 << 25
"""Elements: bounds the temporary memory to about 0.4 GB."""
_MAX: Final = (1 << 63) - 1
_BITS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROWS, _COLUMNS, _CHOICE = 0, 1 << 40, 1 << 41
"""First indices of the pseudo-random numbers of rows, of columns and of the choice of columns."""
PROBES: Final = 32
"""Columns of a probe, unless the tensor has fewer."""


class MatrixSums:
    """The two sums of a matrix, from its blocks in any order, converted to `dtype` if it is set."""

    def __init__(
        self, rows: int, columns: int, device: torch.device, dtype: torch.dtype | None = None
    ) -> None:
        self._of_rows = pseudo_random(_ROWS, rows, device)
        self._of_columns = pseudo_random(_COLUMNS, columns, device)
        self._dtype = dtype
        self.value = torch.zeros(2, dtype=torch.int64, device=device)

    def add(self, block: Tensor, row: int = 0, column: int = 0) -> None:
        """Add a `[r, c]` block whose first element is the matrix's element [row, column]."""
        height, width = block.shape
        of_columns = self._of_columns[column : column + width]
        elements = _CPU_BLOCK if block.device.type == "cpu" else _GPU_BLOCK
        step = max(1, elements // max(1, width))
        for start in range(0, height, step):
            # Once, here: each sum of smaller integers into int64 would make this copy itself.
            bits = _bit_patterns(block[start : start + step], self._dtype).to(torch.int64)
            first = row + start
            of_rows = self._of_rows[first : first + len(bits)]
            by_row = (bits.sum(1) * of_rows).sum()
            by_column = (bits.sum(0) * of_columns).sum()
            self.value += torch.stack([by_row, by_column])


@dataclass(frozen=True, slots=True)
class TensorSums:
    """The sums of one tensor, still on its device."""

    dtype: str
    whole: Tensor | None
    """`[2]` int64; None if only the probe is known."""
    probe: Tensor
    """`[2]` int64 sums of the columns that `probe_columns` names."""


@functools.cache
def probe_columns(columns: int) -> tuple[int, ...]:
    """Return the columns of a probe, ascending: PROBES pseudo-random ones, or all of fewer."""
    if columns <= PROBES:
        return tuple(range(columns))
    numbers = pseudo_random(_CHOICE, 8 * PROBES, torch.device("cpu")) & _MAX
    distinct = list(dict.fromkeys((numbers % columns).tolist()))
    return tuple(sorted(distinct[:PROBES]))


@torch.no_grad()
def sums_of(tensor: Tensor, dtype: torch.dtype | None = None) -> TensorSums:
    """Sum a whole tensor of any number of dimensions, converted to `dtype` first."""
    columns = tensor.shape[-1] if tensor.ndim else 1
    matrix = tensor.detach().reshape(math.prod(tensor.shape[:-1]), columns)
    whole = MatrixSums(len(matrix), columns, tensor.device, dtype)
    whole.add(matrix)
    chosen = torch.tensor(probe_columns(columns), device=tensor.device)
    held = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return TensorSums(name_of(held), whole.value, probe_of(matrix.index_select(1, chosen), dtype))


@torch.no_grad()
def probe_of(columns: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Sum the `[R, P]` columns that `probe_columns` names."""
    sums = MatrixSums(columns.shape[0], columns.shape[1], columns.device, dtype)
    sums.add(columns)
    return sums.value


def fingerprint(
    tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None
) -> Fingerprint:
    """Return the digests of all tensors, converted to `dtype` first, computed on their devices."""
    given = list(tensors)  # keeps all of them alive, so that an id belongs to one tensor
    known: dict[int, TensorSums] = {}
    named: list[tuple[str, TensorSums]] = []
    for name, tensor in given:
        if id(tensor) not in known:
            known[id(tensor)] = sums_of(tensor, dtype)
        named.append((name, known[id(tensor)]))
    return collect(named)


def collect(named: Sequence[tuple[str, TensorSums]]) -> Fingerprint:
    """Return the fingerprint of tensors whose sums are computed; one copy from each device."""
    pending = [part for _, sums in named for part in (sums.whole, sums.probe) if part is not None]
    by_device: dict[torch.device, list[Tensor]] = {}
    for part in pending:
        by_device.setdefault(part.device, []).append(part)
    hexadecimal: dict[int, str] = {}
    for parts in by_device.values():
        values = torch.stack(parts).cpu().numpy().astype("<i8")
        hexadecimal |= {
            id(part): value.tobytes().hex() for part, value in zip(parts, values, strict=True)
        }
    digests = {
        name: TensorDigest(
            sums.dtype,
            "" if sums.whole is None else hexadecimal[id(sums.whole)],
            hexadecimal[id(sums.probe)],
        )
        for name, sums in named
    }
    text = "\n".join(
        f"{name} {one.dtype} {one.value} {one.probe}" for name, one in sorted(digests.items())
    )
    return Fingerprint(digests, hashlib.blake2b(text.encode(), digest_size=16).hexdigest())


def _bit_patterns(block: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return the elements' bits as signed integers; -0.0 counts as 0.0."""
    if block.is_floating_point():
        converted = block if dtype is None else block.to(dtype)
        block = converted + 0.0 if converted.dtype.itemsize > 1 else converted
    elif block.dtype == torch.bool:
        block = block.to(torch.int8)
    return block.contiguous().view(_BITS[block.dtype.itemsize])


def name_of(dtype: torch.dtype) -> str:
    """Return torch's name without prefix."""
    return str(dtype).removeprefix("torch.")


@functools.lru_cache(maxsize=256)  # a model has few sizes
def pseudo_random(first: int, count: int, device: torch.device) -> Tensor:
    """Return `[count]` int64: outputs `first`, `first` + 1, ... of SplitMix64."""
    x = torch.arange(first + 1, first + 1 + count, dtype=torch.int64, device=device)
    x = x * _signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ _shifted(x, shift)) * _signed(factor)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
