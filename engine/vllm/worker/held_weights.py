"""The weights in vLLM's layers, from which a fingerprint is taken.

On a CPU vLLM multiplies by packed copies, whose numbers only a product with unit vectors shows. The
packed copy of a head that is tied to the embedding can be left behind, so its product is looked at
too. The experts of a mixture are compared if vLLM's kernel takes them as they are loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from asyncrl.engine.remote.worker.held_weights import HeldWeights, Shape, Shard, probes_within
from asyncrl.engine.remote.worker.ranks import Ranks
from asyncrl.engine.vllm.worker.adapter import ServedAdapter
from asyncrl.wire.weights.fingerprint import MatrixSums, TensorSums, name_of, probe_columns, sums_of

_EXPERTS = {"gate_up_proj": "w13_weight", "down_proj": "w2_weight"}
"""Names of the experts' tensors in the HF state dict, `[E, 2I, H]` and `[E, H, I]`, and in vLLM."""
_INNER = ".base_layer"
_AS_LOADED = ("TRITON", "BATCHED_TRITON")
"""vLLM's kernels for experts that take them in the layout in which they are loaded."""


class VllmHeldWeights(HeldWeights):
    """Finds the tensors of an HF state dict in a loaded vLLM model; see `HeldWeights`."""

    def __init__(
        self,
        model: Any,
        shapes: Mapping[str, Shape],
        ranks: Ranks | None = None,
        adapter: ServedAdapter | None = None,
    ) -> None:
        self._adapter = adapter
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        super().__init__(
            model,
            shapes,
            ranks,
            packed=getattr(model, "packed_modules_mapping", None) or {},
            # Renames only: how parts are stacked is in `packed_modules_mapping`.
            renamed=None if mapper is None else mapper.get_rename_mapper().map_name,
        )

    def modules(self) -> dict[str, Any]:
        """Return all modules by path; for vLLM's adapter wrappers, the inner modules."""
        found = super().modules()
        inner = {path: one for path, one in found.items() if path.endswith(_INNER)}
        return found | {path.removesuffix(_INNER): one for path, one in inner.items()}

    def further(self) -> list[tuple[str, TensorSums]]:
        """Return the sums of A and B of an adapter that is kept apart."""
        if self._adapter is None:
            return []
        return [(name, sums_of(one)) for name, one in self._adapter.held()]

    def tensor_of(self, module: Any, leaf: str) -> Any:
        """Return the tensor of a module that a checkpoint calls `leaf`."""
        return _experts(module, leaf) if leaf in _EXPERTS else super().tensor_of(module, leaf)

    def sums_by_product(
        self, module: Any, name: str, shard: Shard, shape: Shape
    ) -> TensorSums | None:
        """Return the sums of a packed weight; None if the module has none."""
        is_packed = name.rpartition(".")[2] == "weight" and hasattr(module, "cpu_linear")
        if not is_packed or _looks_up(module, name):
            return None
        return _sums_by_product(module, shard, shape)


def _experts(runner: Any, leaf: str) -> torch.Tensor | None:
    """Return all experts' weights of one kind; None if vLLM keeps them in another layout."""
    routed = getattr(runner, "routed_experts", None)
    backend = getattr(getattr(routed, "quant_method", None), "unquantized_backend", None)
    if getattr(backend, "name", "") not in _AS_LOADED:
        return None
    return getattr(routed, _EXPERTS[leaf], None)


def _looks_up(module: Any, name: str) -> bool:
    """Return True if this name of a tensor is an embedding's, which is not multiplied by."""
    from asyncrl.engine.vllm.worker.api import ParallelLMHead, VocabParallelEmbedding

    embeds = isinstance(module, VocabParallelEmbedding)
    return embeds and not isinstance(module, ParallelLMHead) and "lm_head" not in name


def _sums_by_product(module: Any, shard: Shard, shape: Shape) -> TensorSums:
    """Compute the probe of a packed weight's block, exactly, by a product."""
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
