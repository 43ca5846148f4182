"""LoRA: the published form of an adapter, and the one arithmetic that merges it into a matrix.

An adapter of a matrix W `[O, I]` is A `[R, I]` and B `[O, R]`. The merged matrix is

    D = 0;  D = D + b[:, k] a[k, :]  for k = 0 .. R - 1
    merged = W in the engine's data type + scaling * D, rounded to that data type

where each product and each sum is rounded to float32. IEEE arithmetic thus fixes every bit: a CPU
and a GPU, any number of threads and any partition of W give the same matrix, unlike matrix
products. So the trainer and every engine merge for themselves, and fingerprints compare the
results. It costs 2 R operations an element, on blocks that stay in a core's or a GPU's cache.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from asyncrl.wire.errors import WeightsReadError
from asyncrl.wire.weights.layout import ADAPTER_ENDINGS

_A, _B = ADAPTER_ENDINGS
_ELEMENTS = {"cpu": 1 << 16, "cuda": 1 << 22}
"""Elements of a block, by kind of device."""


class Pair(NamedTuple):
    """The adapter of one matrix."""

    a: Tensor
    """`[R, I]`"""
    b: Tensor
    """`[O, R]`"""


def names_of(layer: str) -> tuple[str, str]:
    """Return the names under which a layer's adapter is published."""
    return layer + _A, layer + _B


def layer_of(name: str) -> str | None:
    """Return the layer of a published tensor; None: it is not of an adapter."""
    endings = (ending for ending in ADAPTER_ENDINGS if name.endswith(ending))
    return next((name.removesuffix(ending) for ending in endings), None)


def pairs_of(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Pair]:
    """Return the adapters by the layer's weight in the HF state dict. Raises WeightsReadError."""
    given = dict(tensors)
    pairs: dict[str, Pair] = {}
    for layer in dict.fromkeys(layer_of(name) for name in given):
        a, b = (None, None) if layer is None else map(given.get, names_of(layer))
        if a is None or b is None:
            raise WeightsReadError(f"the adapter of {layer or sorted(given)[:3]} lacks A or B")
        pairs[f"{layer}.weight"] = Pair(a, b)
    return pairs


@torch.no_grad()
def merge(base: Tensor, pair: Pair, scaling: float, out: Tensor) -> None:
    """Write the merged matrix to `out`, whose data type is the engine's; all on one device.

    `base` and `out` are `[O, I]`; `pair` is converted to float32 first.
    """
    a, b = (one.detach().to(out.device, torch.float32) for one in pair)
    factor = torch.tensor(scaling, dtype=torch.float32, device=out.device)
    rows = max(1, _ELEMENTS.get(out.device.type, 1 << 22) // max(1, out.shape[1]))
    total = torch.empty(min(rows, len(out)), out.shape[1], device=out.device)
    product = torch.empty_like(total)
    for start in range(0, len(out), rows):
        part = slice(start, min(start + rows, len(out)))
        own, one = total[: part.stop - start], product[: part.stop - start]
        own.zero_()
        for k in range(len(a)):
            torch.mul(b[part, k, None], a[k], out=one)
            own.add_(one)
        own.mul_(factor)
        own.add_(base[part].to(out.device, out.dtype).to(torch.float32))
        out[part].copy_(own)


def merged(base: Tensor, pair: Pair, scaling: float, dtype: torch.dtype) -> Tensor:
    """Return `[O, I]`: the merged matrix in the engine's data type, on the device of `base`."""
    out = torch.empty(base.shape, dtype=dtype, device=base.device)
    merge(base.detach(), pair, scaling, out)
    return out


def served_apart(
    tensors: Iterable[tuple[str, Tensor]], scaling: float, dtype: torch.dtype
) -> list[tuple[str, Tensor]]:
    """Return published A and scaling * B for an engine that keeps the adapter apart.

    Each number of B is multiplied in float32 and rounded to `dtype` once, so the trainer and every
    engine compute the same bits.
    """
    found = []
    for name, tensor in tensors:
        one = tensor.detach().to(torch.float32)
        if name.endswith(_B):
            one = one * torch.tensor(scaling, dtype=torch.float32, device=one.device)
        found.append((name, one.to(dtype)))
    return found


def adapter_mistakes(
    given: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]], rank: int
) -> list[str]:
    """List what does not fit the model, a line each; `given` and `shapes` are shapes by name."""
    wrong = [f"{name} is not of an adapter" for name in given if layer_of(name) is None]
    for layer in dict.fromkeys(one for name in given if (one := layer_of(name)) is not None):
        shape = shapes.get(f"{layer}.weight")
        if shape is None or len(shape) != 2:
            wrong.append(f"{layer} is not a layer with a matrix")
            continue
        a, b = names_of(layer)
        for name, expected in ((a, (rank, shape[1])), (b, (shape[0], rank))):
            if given.get(name) != expected:
                wrong.append(f"{name}: {given.get(name)} given, {expected} needed")
    return wrong
