"""Loads new weights in vLLM's process (`asyncrl.engine.remote.worker.staging`) and sums them.

On a CPU vLLM multiplies by packed copies, whose numbers only a product with unit vectors shows. The
packed copy of a head that is tied to the embedding can be left behind, so its product is looked at
too. The experts of a mixture are compared if vLLM's kernel takes them as they are loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from asyncrl.engine.errors import WeightsError
from asyncrl.engine.remote.worker.held_weights import HeldWeights, Shape, Shard, probes_within
from asyncrl.engine.remote.worker.ranks import Ranks
from asyncrl.engine.remote.worker.shadow_model import ShadowModel, like
from asyncrl.engine.remote.worker.staging import Loader
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


class VllmLoader(Loader):
    """Loads by vLLM's `reload_weights`, which raises for tensors that it does not know."""

    name = "vLLM"

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self.device: torch.device = worker.device
        self.dtype: torch.dtype = worker.model_config.dtype

    @property
    def model(self) -> torch.nn.Module:
        """The model that decodes."""
        model: torch.nn.Module = self._worker.model_runner.get_model()
        return model

    @property
    def model_path(self) -> str:
        """Directory that the model was loaded from."""
        return str(self._worker.model_config.model)

    def load(self, model: torch.nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load tensors, named as in the HF state dict, into the model or its twin, in place."""
        load(self._worker, model, tensors)

    def adopt(self, twin: ShadowModel) -> None:
        """Copy vLLM's notes on the model's modules from their first loading."""
        from asyncrl.engine.vllm.worker.api import (
            LAYERWISE_INFO,
            LayerReloadingInfo,
            get_layerwise_info,
        )

        on_device = any(one.device.type != "cpu" for one in twin.model.parameters())
        for module, other in twin.pairs:
            info = get_layerwise_info(module)
            LAYERWISE_INFO[other] = LayerReloadingInfo(
                restore_metadata=tuple(
                    {name: like(one, _no_numbers(one), module, other) for name, one in kind.items()}
                    for kind in info.restore_metadata
                ),
                restore_device=info.restore_device if on_device else torch.device("cpu"),
            )

    def forget(self, twin: ShadowModel) -> None:
        """Remove a twin from vLLM's notes, which would keep its memory."""
        from asyncrl.engine.vllm.worker.api import LAYERWISE_INFO

        for _, other in twin.pairs:
            LAYERWISE_INFO.pop(other, None)

    def installed(self, policy_version: int) -> None:  # noqa: ARG002
        """Drop what vLLM derived from the old weights."""
        runner = self._worker.model_runner
        runner.reset_lora_state()
        runner.reset_encoder_cache()
        runner.reset_mm_cache()


def load(worker: Any, model: torch.nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Load a checkpoint's tensors into a model, or its twin, in place, by vLLM."""
    from asyncrl.engine.vllm.worker.api import inplace, set_current_vllm_config

    with set_current_vllm_config(worker.vllm_config):
        inplace.reload_weights(worker.vllm_config, model, iter(tensors), None, True)
    _repack_tied(model)


def _no_numbers(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(
        tensor.size(), tensor.stride(), dtype=tensor.dtype, device=torch.device("meta")
    )


def check_reloadable(model: torch.nn.Module) -> None:
    """Raise WeightsError if vLLM cannot load new weights into this model.

    On a CPU it packs the experts of a mixture after the first loading only (0.32.0).
    """
    for name, layer in model.named_modules():
        backend = getattr(getattr(layer, "quant_method", None), "unquantized_backend", None)
        if getattr(backend, "name", "") == "CPU":
            raise WeightsError(
                f"vLLM cannot load new weights into the experts {name!r} on a CPU: it packs them "
                "only once. Use engine.kind: torch for mixture-of-experts models, or a GPU"
            )


def _repack_tied(model: torch.nn.Module) -> None:
    """Repack output layers that share the embedding's weight, on a CPU.

    vLLM packs again only those layers whose own weights are loaded (0.32.0). A tied weight comes
    once, under the embedding's name, so the output layer would keep its old copy.
    """
    from asyncrl.engine.vllm.worker.api import ParallelLMHead, UnquantizedEmbeddingMethod

    for layer in model.modules():
        if isinstance(layer, ParallelLMHead):
            method = layer.quant_method
            if isinstance(method, UnquantizedEmbeddingMethod):
                method.process_weights_after_loading(layer)
