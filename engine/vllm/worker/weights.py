"""New weights in vLLM's process: read from the published file in a thread, loaded from the copy.

vLLM has no call that copies tensors into its layers alone: on a CPU it multiplies by repacked
copies of linear weights, and a GPU may hold them fused. So installing goes through vLLM's own
`reload_weights`, layer by layer.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from engine.errors import WeightsError, WeightsSupersededError
from engine.vllm.remote import StagingReport
from engine.weights import NamedTensors, StagedWeights
from wire.weights.layout import WeightManifest
from wire.weights.reader import WeightBuffer


class WorkerWeights:
    """The staged weights of one vLLM worker. `begin`, `report` and `install` never block long.

    Args:
        worker: vLLM's.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        own: torch.dtype = worker.model_config.dtype
        on_gpu = worker.device.type == "cuda"
        buffer = WeightBuffer(
            lambda _, published: own if published.is_floating_point else published, pinned=on_gpu
        )
        self._staged = StagedWeights(check_finite, buffer)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="asyncrl-staging")
        self._staging: Future[None] | None = None

    def begin(self, manifest: WeightManifest) -> None:
        """Begin to copy a published version into staging memory."""
        self._staging = self._thread.submit(self._staged.stage, manifest)

    def report(self) -> StagingReport:
        """How the staging begun last went. Raises what it did not expect, and if none was begun."""
        if self._staging is None:
            raise WeightsError("no staging of weights was begun")
        if not self._staging.done():
            return StagingReport("running")
        try:
            self._staging.result()
        except WeightsSupersededError as error:
            return StagingReport("superseded", str(error))
        except WeightsError as error:
            return StagingReport("refused", str(error))
        return StagingReport("staged")

    def install(self, policy_version: int) -> None:
        """Load the staged version into vLLM's layers; only while generation is paused.

        Raises:
            WeightsError: this version is not staged; nothing was changed.
        """
        with self._staged.install(policy_version) as tensors, torch.inference_mode():
            self._worker.reload_weights(weights_iterator=iter(tensors))
            _repack_tied(self._worker.model_runner.get_model())


def check_reloadable(model: torch.nn.Module) -> None:
    """Raise WeightsError if vLLM cannot load new weights into this model.

    On a CPU it packs the experts of a mixture after the first loading only (0.32.0). New ones are
    copied unpacked in the place of the packed ones, and the model then computes something else.
    """
    for name, layer in model.named_modules():
        backend = getattr(getattr(layer, "quant_method", None), "unquantized_backend", None)
        if getattr(backend, "name", "") == "CPU":
            raise WeightsError(
                f"vLLM cannot load new weights into the experts {name!r} on a CPU: it packs them "
                "once. Use engine.kind: torch for mixture-of-experts models, or a GPU"
            )


def check_finite(tensors: NamedTensors) -> None:
    """Raise WeightsError if a value is infinite or not a number: vLLM would sample nonsense."""
    for name, tensor in tensors:
        # One pass without a mask in memory; both ends are NaN if any value is.
        if tensor.numel() and not torch.stack(torch.aminmax(tensor)).isfinite().all():
            raise WeightsError(
                f"weight {name!r} has values that are not finite; the engine keeps its weights"
            )


def _repack_tied(model: torch.nn.Module) -> None:
    """Repack output layers that share the embedding's weight.

    On a CPU vLLM multiplies by a packed copy and packs again only those layers whose own weights
    are loaded. A tied weight comes once, under the embedding's name, so the output layer would keep
    its old copy (0.32.0). On a GPU there is no packed copy, and this does nothing.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        UnquantizedEmbeddingMethod,
    )

    for layer in model.modules():
        if isinstance(layer, ParallelLMHead):
            method = layer.quant_method
            if isinstance(method, UnquantizedEmbeddingMethod):
                method.process_weights_after_loading(layer)
