"""Loads new weights in vLLM's process (`asyncrl.engine.remote.worker.staging`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from asyncrl.engine.errors import WeightsError
from asyncrl.engine.remote.worker.shadow_model import ShadowModel, like
from asyncrl.engine.remote.worker.staging import Loader


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
