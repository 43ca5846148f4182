"""Merges published adapters into a copy of the model's own weights.

An engine that serves merged weights needs one more copy of the matrices that have an adapter:
merging one version into the previous one would add up roundings. The base is the weights that the
engine started with. If they are not those of the trainer's `model.path`, the fingerprint of the
first version differs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor

from asyncrl.wire.errors import WeightsReadError
from asyncrl.wire.weights.adapter import merge, pairs_of
from asyncrl.wire.weights.layout import WeightManifest
from asyncrl.wire.weights.pretrained import load_causal_lm
from asyncrl.wire.weights.reader import WeightBuffer

Base = Callable[[Collection[str]], Mapping[str, Tensor]]
"""Returns the weights without adapter, at least those with these names of the HF state dict, in the
engine's data types. Called once; the tensors must not change. Raises WeightsReadError."""


def weights_of_model(model_path: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Load all weights of a model directory on the CPU, or raise WeightsReadError."""
    try:
        model = load_causal_lm(model_path, dtype)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise WeightsReadError(f"the model {model_path}: {error}") from error
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor.detach()
    return found


class Buffer(Protocol):
    """A private copy of one published version, as `WeightBuffer`."""

    def read(self, manifest: WeightManifest) -> None:
        """Replace the previous version. Raises WeightsReadError, WeightsSupersededError."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors by name, valid until the next `read`. Raises WeightsReadError."""


class MergingBuffer:
    """Whole weights as published, or the matrices that an adapter changes, merged.

    If `every`, the weights without adapter are given too, for engines that load all or nothing.
    """

    def __init__(self, whole: WeightBuffer, base: Base, *, every: bool = False) -> None:
        self._whole = whole
        self._adapter = WeightBuffer()
        self._make_base = base
        self._every = every
        self._base: Mapping[str, Tensor] | None = None
        self._merged: dict[str, Tensor] = {}
        self._is_merged = False

    @property
    def nbytes(self) -> int:
        """Size of the copies of published versions; the model's own weights are not counted."""
        merged = sum(one.nbytes for one in self._merged.values())
        return self._whole.nbytes + self._adapter.nbytes + merged

    def read(self, manifest: WeightManifest) -> None:
        """See `WeightBuffer.read`."""
        self._is_merged = False
        if manifest.lora is None:
            self._whole.read(manifest)
            return
        if manifest.lora.serve != "merged":
            raise WeightsReadError("the adapter was published to be served apart from the model")
        self._adapter.read(manifest)
        pairs = pairs_of(self._adapter.tensors())
        if self._base is None:
            self._base = self._make_base(pairs.keys())
        unknown = sorted(pairs.keys() - self._base.keys())
        if unknown:
            raise WeightsReadError(f"the model has no weights {unknown[:3]} to add an adapter to")
        for name, pair in pairs.items():
            base = self._base[name]
            if name not in self._merged:
                self._merged[name] = torch.empty_like(base, pin_memory=base.is_pinned())
            merge(base, pair, manifest.lora.scaling, self._merged[name])
        self._is_merged = True

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See `WeightBuffer.tensors`."""
        if not self._is_merged or self._base is None:
            yield from self._whole.tensors()
        elif self._every:
            for name, base in self._base.items():
                yield name, self._merged.get(name, base)
        else:
            yield from self._merged.items()
