"""Fingerprints of the weights that vLLM decodes with, from its live layers.

vLLM holds other tensors than a checkpoint has: it stacks the query, key and value projections, and
the gate and up projections; it pads the vocabulary; on a CPU it multiplies by packed copies, whose
numbers only a product with unit vectors shows. A head that is tied to the embedding is one
parameter with two uses, and on a CPU its packed copy can be left behind, so both uses are looked
at.

Names that have no counterpart are left out of the fingerprint, and the run names them
(`wire.wrong_policy.not_compared`): the experts of a mixture where vLLM's kernel needs them in
another layout or there are several ranks, tensors that vLLM renames or computes, and those of
quantized layers.

With tensor parallelism each rank sums its part (`engine.vllm.worker.shards`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.vllm.worker.ranks import Ranks
from engine.vllm.worker.shards import Shape, Shard, block_sums, probes_within, shard_of
from wire.weights.fingerprint import (
    MatrixSums,
    TensorSums,
    collect,
    name_of,
    probe_columns,
    sums_of,
)
from wire.weights.layout import Fingerprint

_EXPERTS = {"gate_up_proj": "w13_weight", "down_proj": "w2_weight"}
"""Names of the experts' tensors in the HF state dict, `[E, 2I, H]` and `[E, H, I]`, and in vLLM."""
_AS_LOADED = ("TRITON", "BATCHED_TRITON")
"""vLLM's kernels for experts that take them in the layout in which they are loaded."""


class _Place(NamedTuple):
    """Where vLLM holds a tensor."""

    path: str
    """Of the module."""
    part: int = 0
    """Index among the tensors that the module stacks."""
    before: int = 0
    """Rows of those before it, in the checkpoint."""


class HeldWeights:
    """Finds the tensors of an HF state dict in a loaded vLLM model, on one device or several.

    Args:
        model: vLLM's.
        shapes: of the HF state dict, tied names included.
        ranks: that the model is split among; all of them must take the fingerprint.
    """

    def __init__(self, model: Any, shapes: Mapping[str, Shape], ranks: Ranks | None = None) -> None:
        self._model = model
        self._ranks = ranks or Ranks()
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

    def fingerprint(self, elements: int) -> Iterator[Fingerprint | None]:
        """Of the weights as they are now, in pieces that fit between two steps.

        It must not run in another thread: vLLM's products on a CPU share memory (0.32.0,
        `csrc/cpu/dnnl_helper.cpp`). All ranks cut at the same places.

        Args:
            elements: of the checkpoint's tensors in a piece, about.

        Yields:
            None after each piece, and the fingerprint at the end.
        """
        modules = dict(self._model.named_modules(remove_duplicate=False))
        found: list[tuple[str, TensorSums]] = []
        seen = 0
        for name, shape in self._shapes.items():
            with torch.inference_mode():
                sums = self._sums(name, shape, modules)
            if sums is not None:
                found.append((name, sums))
            seen += math.prod(shape)
            if seen >= elements:
                seen = 0
                yield None
        with torch.inference_mode():
            whole = collect(self._totals(found))
        yield whole

    def _totals(self, found: list[tuple[str, TensorSums]]) -> list[tuple[str, TensorSums]]:
        """The sums over all ranks, which have the same names in the same order."""
        if self._ranks.size == 1 or not found:
            return found
        none = torch.zeros_like(found[0][1].probe)
        parts = [part for _, one in found for part in (one.whole, one.probe)]
        totals = self._ranks.total(torch.stack([none if one is None else one for one in parts]))
        return [
            (name, TensorSums(one.dtype, None if one.whole is None else whole, probe))
            for (name, one), whole, probe in zip(found, totals[::2], totals[1::2], strict=True)
        ]

    def _sums(self, name: str, shape: Shape, modules: Mapping[str, Any]) -> TensorSums | None:
        """Of one tensor; None if this model has nothing of the kind."""
        place = self._place(name, modules)
        if place is None:
            return None
        leaf, module, ranks = name.rpartition(".")[2], modules[place.path], self._ranks
        shard = shard_of(module, place.part, place.before, shape, ranks.rank, ranks.size)
        if leaf == "weight" and hasattr(module, "cpu_linear") and not _looks_up(module, name):
            return _sums_by_product(module, shard, shape)
        tensor = _experts(module, leaf) if leaf in _EXPERTS else getattr(module, leaf, None)
        if not isinstance(tensor, Tensor) or tensor.ndim != len(shape):
            return None
        block = tensor[shard.first : shard.first + shard.shape[0]] if shape else tensor
        if tuple(block.shape) != shard.shape:
            return None
        if ranks.size == 1:
            return sums_of(block)
        return block_sums(block, shard, shape) if 0 < len(shape) <= 2 else None

    def _place(self, name: str, modules: Mapping[str, Any]) -> _Place | None:
        renamed = self._renamed(name)
        if renamed is None:
            return None
        path, _, leaf = renamed.rpartition(".")
        if path in modules:
            return _Place(path)
        parent, _, part = path.rpartition(".")
        if part not in self._fused:
            return None
        fused, before = self._fused[part]
        whole = f"{parent}.{fused}" if parent else fused
        above = [name.replace(f".{part}.{leaf}", f".{other}.{leaf}") for other in before]
        if whole not in modules or any(one not in self._shapes for one in above):
            return None
        return _Place(whole, len(before), sum(self._shapes[one][0] for one in above))


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


def _sums_by_product(module: Any, shard: Shard, shape: Shape) -> TensorSums:
    """The probe of a packed weight's block: its columns, exactly, by a product."""
    rows, columns = shape
    height, width = shard.shape
    chosen, first = probes_within(columns, shard.column, width)
    dtype = module.weight.dtype
    units = torch.zeros(len(chosen), width, dtype=dtype)
    units[torch.arange(len(chosen)), torch.tensor(chosen, dtype=torch.int64)] = 1
    probe = MatrixSums(rows, len(probe_columns(columns)), units.device)
    if chosen:
        products = module.cpu_linear(units, module.weight, None)  # [P, N]
        probe.add(products[:, shard.first : shard.first + height].t(), shard.row, first)
    return TensorSums(name_of(dtype), None, probe.value * shard.factor)
