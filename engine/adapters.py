"""Published adapters in an engine: read, and merged into a copy of the model's own weights.

    base (kept) + adapter (read) ─► merged, in the engine's data type ─► installed as any weights

An engine that serves merged weights decodes, caches, verifies and compares fingerprints as it does
with whole weights: only what is published is smaller. It needs one more copy of the matrices that
have an adapter, since merging one version into the one before would add up roundings. The copy is
of the weights that the engine was started with, which are those of the trainer's `model.path`. If
they are not, the fingerprint of the first version tells.
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
"""The weights without adapter in the engine's data types, at least those of these names of the HF
state dict. Called once; what it gives must stay as it is. Raises WeightsReadError."""


def weights_of_model(model_path: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """All weights of a model directory, on the CPU, a tied one once.

    Raises:
        WeightsReadError: transformers cannot load it.
    """
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
        """Replace the version before. Raises WeightsReadError, WeightsSupersededError."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """By name of the HF state dict, valid until the next `read`. Raises WeightsReadError."""


class MergingBuffer:
    """Whole weights as they are published; of an adapter, the matrices that it changes, merged.

    Args:
        whole: holds versions of all weights.
        base: of the model.
        every: also give the weights without adapter, for engines that load all or nothing.
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
        """Of the copies of published versions; the model's own weights are not counted."""
        merged = sum(one.nbytes for one in self._merged.values())
        return self._whole.nbytes + self._adapter.nbytes + merged

    def read(self, manifest: WeightManifest) -> None:
        """As `WeightBuffer.read`."""
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
        """As `WeightBuffer.tensors`."""
        if not self._is_merged or self._base is None:
            yield from self._whole.tensors()
        elif self._every:
            for name, base in self._base.items():
                yield name, self._merged.get(name, base)
        else:
            yield from self._merged.items()
