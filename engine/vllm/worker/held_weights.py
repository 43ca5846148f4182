"""Fingerprints of the weights that vLLM decodes with, from its live layers.

vLLM holds other tensors than a checkpoint has: it stacks the query, key and value projections, and
the gate and up projections; it pads the vocabulary; on a CPU it multiplies by packed copies, whose
numbers only a product with unit vectors shows. A head that is tied to the embedding is one
parameter with two uses, and on a CPU its packed copy can be left behind, so both uses are looked
at.

Names that have no counterpart are left out of the fingerprint, and the run names them
(`wire.wrong_policy.not_compared`): the experts of a mixture where vLLM's kernel needs them in
another layout, tensors that vLLM renames or computes, and those of quantized layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from wire.weights.fingerprint import (
    TensorSums,
    collect,
    name_of,
    probe_columns,
    probe_of,
    sums_of,
)
from wire.weights.layout import Fingerprint

Shape = tuple[int, ...]
_EXPERTS = {"gate_up_proj": "w13_weight", "down_proj": "w2_weight"}
"""Names of the experts' tensors in the HF state dict, `[E, 2I, H]` and `[E, H, I]`, and in vLLM."""
_AS_LOADED = ("TRITON", "BATCHED_TRITON")
"""vLLM's kernels for experts that take them in the layout in which they are loaded."""
_Place = tuple[str, int]
"""The module that holds a tensor, and the tensor's first row there."""


class HeldWeights:
    """Finds the tensors of an HF state dict in a loaded vLLM model on one device.

    Args:
        model: vLLM's.
        shapes: of the HF state dict, tied names included.
    """

    def __init__(self, model: Any, shapes: Mapping[str, Shape]) -> None:
        self._model = model
        self._shapes = shapes
        packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", None) or {}
        self._fused = {
            part: (fused, parts[: parts.index(part)])
            for fused, parts in packed.items()
            for part in parts
        }
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        # Renames only: how parts are stacked is in `packed_modules_mapping`.
        self._renamed: Callable[[str], str | None] = (
            (lambda name: name) if mapper is None else mapper.get_rename_mapper().map_name
        )

    @torch.inference_mode()
    def fingerprint(self) -> Fingerprint:
        """Of the weights as they are now."""
        modules = dict(self._model.named_modules(remove_duplicate=False))
        found: list[tuple[str, TensorSums]] = []
        for name, shape in self._shapes.items():
            sums = self._sums(name, shape, modules)
            if sums is not None:
                found.append((name, sums))
        return collect(found)

    def _sums(self, name: str, shape: Shape, modules: Mapping[str, Any]) -> TensorSums | None:
        """Of one tensor; None if this model has nothing of the kind."""
        place = self._place(name, modules)
        if place is None:
            return None
        (path, first), leaf = place, name.rpartition(".")[2]
        module = modules[path]
        if leaf == "weight" and hasattr(module, "cpu_linear") and not _looks_up(module, name):
            return _sums_by_product(module, first, shape)
        tensor = _experts(module, leaf) if leaf in _EXPERTS else getattr(module, leaf, None)
        rows = shape[0] if shape else 1
        if not isinstance(tensor, Tensor) or tensor.ndim != len(shape):
            return None
        part = tensor[first : first + rows] if shape else tensor
        return sums_of(part) if tuple(part.shape) == shape else None

    def _place(self, name: str, modules: Mapping[str, Any]) -> _Place | None:
        renamed = self._renamed(name)
        if renamed is None:
            return None
        path, _, leaf = renamed.rpartition(".")
        if path in modules:
            return path, 0
        parent, _, part = path.rpartition(".")
        if part not in self._fused:
            return None
        fused, before = self._fused[part]
        whole = f"{parent}.{fused}" if parent else fused
        above = [name.replace(f".{part}.{leaf}", f".{other}.{leaf}") for other in before]
        if whole not in modules or any(one not in self._shapes for one in above):
            return None
        return whole, sum(self._shapes[one][0] for one in above)


def _experts(runner: Any, leaf: str) -> Tensor | None:
    """All experts' weights of one kind; None if vLLM keeps them in another layout."""
    routed = getattr(runner, "routed_experts", None)
    backend = getattr(getattr(routed, "quant_method", None), "unquantized_backend", None)
    if getattr(backend, "name", "") not in _AS_LOADED:
        return None
    return getattr(routed, _EXPERTS[leaf], None)


def _looks_up(module: Any, name: str) -> bool:
    """Whether this name of a tensor is that of an embedding, which is not multiplied by."""
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        VocabParallelEmbedding,
    )

    embeds = isinstance(module, VocabParallelEmbedding)
    return embeds and not isinstance(module, ParallelLMHead) and "lm_head" not in name


def _sums_by_product(module: Any, first: int, shape: Shape) -> TensorSums:
    """The probe of a packed weight's rows from `first` on: its columns, exactly, by a product."""
    rows, columns = shape
    chosen = probe_columns(columns)
    dtype = module.weight.dtype
    units = torch.zeros(len(chosen), columns, dtype=dtype)
    units[torch.arange(len(chosen)), torch.tensor(chosen)] = 1
    products = module.cpu_linear(units, module.weight, None)  # [P, N]
    of_these = products[:, first : first + rows].t()
    return TensorSums(name_of(dtype), None, probe_of(of_these))
