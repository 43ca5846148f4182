"""New weights in vLLM's process: loaded into a second tree of modules, then copied.

vLLM's `reload_weights` brings a checkpoint's tensors into the form in which its layers hold them.
It takes several times as long as a copy, so it runs in a thread on a second tree of the model's
modules (`engine.vllm.worker.twin`) while tokens are generated. Installing copies from there.

That the two come to the same is proved, not assumed, in the pause of the first installation:

1. The model is loaded with numbers that all differ from those before. Nothing may change but what
   copying replaces: anything else was made of weights, and copying would leave it as it is.
2. The model is loaded with the new weights; then a twin is made, filled with NaN, and loaded with
   them too. The model must not notice, and the two must agree bit by bit.

Otherwise every installation loads the model in the pause, as does this one, and the report says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from engine.errors import WeightsError, WeightsSupersededError
from engine.vllm.remote import StagingReport
from engine.vllm.worker.twin import Attributes, Twin, like, loaded_parts, unchanged
from engine.weights import NamedTensors, StagedWeights
from wire.weights.fingerprint import fingerprint
from wire.weights.layout import Fingerprint, WeightManifest
from wire.weights.reader import WeightBuffer

_SHOWN = 5


class WorkerWeights:
    """The staged weights of one vLLM worker. `begin`, `report` and `install` never block long.

    Args:
        worker: vLLM's.
        on_device: stage on the model's device; otherwise in host memory.
    """

    def __init__(self, worker: Any, *, on_device: bool = False) -> None:
        self._worker = worker
        own: torch.dtype = worker.model_config.dtype
        buffer = WeightBuffer(
            lambda _, published: own if published.is_floating_point else published
        )
        self._staged = StagedWeights(self._receive, buffer)
        self._thread = ThreadPoolExecutor(
            1, "asyncrl-staging", initializer=partial(_use_device, worker.device)
        )
        self._staging: Future[None] | None = None
        self._twin_device = worker.device if on_device else torch.device("cpu")
        self._twin: Twin | None = None
        self._why_reloads = ""

    def begin(self, manifest: WeightManifest) -> None:
        """Begin to stage a published version."""
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

    def install(self, policy_version: int) -> str:
        """Put the staged version into vLLM's layers; only while generation is paused.

        Returns:
            Why it was not copied, but loaded by vLLM in the pause, as will be all others; ""
            otherwise.

        Raises:
            WeightsError: this version is not staged; nothing was changed.
        """
        with self._staged.install(policy_version) as tensors, torch.inference_mode():
            if self._twin is not None:
                self._twin.install()
            elif self._why_reloads:
                load(self._worker, self._model, tensors)
            else:
                self._install_first(tensors)
        runner = self._worker.model_runner
        runner.reset_lora_state()
        runner.reset_encoder_cache()
        runner.reset_mm_cache()
        return self._why_reloads

    @property
    def _model(self) -> torch.nn.Module:
        model: torch.nn.Module = self._worker.model_runner.get_model()
        return model

    @property
    def copies(self) -> bool:
        """Whether installing copies: it was proved to do what loading does."""
        return self._twin is not None

    def _install_first(self, tensors: NamedTensors) -> None:
        """Load the model, and find out whether all later versions can be copied from a twin."""
        model, twin = self._model, None
        try:
            twin, found = self._prove(model, tensors)
        except Exception as error:  # noqa: BLE001 - whatever vLLM's loaders raise; it is reported
            why = f"vLLM cannot load into a copy of its modules: {type(error).__name__}: {error}"
        else:
            if twin is not None and not found:
                self._twin = twin
                return
            more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
            why = (
                "copying would not do what vLLM's reload_weights does to "
                f"{', '.join(found[:_SHOWN])}{more}"
            )
        self._reload_from_now(why, twin)
        load(self._worker, model, tensors)

    def _prove(
        self, model: torch.nn.Module, tensors: NamedTensors
    ) -> tuple[Twin | None, list[str]]:
        """A twin, loaded, and what speaks against copying from it. Leaves the model loaded."""
        attributes, parts = Attributes(model), loaded_parts(model)
        load(self._worker, model, _other_numbers(tensors))
        found = attributes.changed()
        if found:
            return None, found
        untouched = unchanged(parts, loaded_parts(model))
        load(self._worker, model, tensors)
        twin = Twin(model, self._twin_device, untouched)
        try:
            _let_vllm_load(twin)
            twin.poison()
            attributes, before = Attributes(model), _fingerprint_of(model)
            load(self._worker, twin.model, tensors)
            found = attributes.changed() + twin.differences()
            if _fingerprint_of(model) != before:
                found.append("the model itself, while it loads a copy of it")
        except BaseException:
            _forget(twin)
            raise
        return twin, found

    def _reload_from_now(self, why: str, twin: Twin | None) -> None:
        if twin is not None:
            _forget(twin)
        self._twin, self._why_reloads = None, why

    def _receive(self, tensors: NamedTensors) -> None:
        """Check tensors that were read, and load them into the twin. Runs in the thread."""
        check_finite(tensors)
        twin = self._twin
        if twin is None:
            return
        try:
            with torch.inference_mode():
                load(self._worker, twin.model, tensors)
                if self._worker.device.type == "cuda":  # the thread's stream is not the model's
                    torch.cuda.synchronize(self._worker.device)
        except Exception as error:  # noqa: BLE001 - whatever vLLM's loaders raise; it is reported
            self._reload_from_now(
                f"vLLM cannot load into a copy of its modules: {type(error).__name__}: {error}",
                twin,
            )


def _use_device(device: torch.device) -> None:
    """In a new thread, whose device would be the first one."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _other_numbers(tensors: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of the same shapes with other values in every place, one by one."""
    for name, tensor in tensors:
        if tensor.is_floating_point():
            shift = torch.linspace(0.5, 1.5, tensor.numel(), device=tensor.device)
            yield name, (tensor.float() + shift.view(tensor.shape)).to(tensor.dtype)
        else:
            yield name, tensor


def _fingerprint_of(model: torch.nn.Module) -> Fingerprint:
    """Of all parameters with numbers; those whose packed copies are used are empty."""
    return fingerprint((name, one) for name, one in model.named_parameters() if one.numel())


def load(worker: Any, model: torch.nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Have vLLM load a checkpoint's tensors into a model, or its twin, in place."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import inplace

    with set_current_vllm_config(worker.vllm_config):
        inplace.reload_weights(worker.vllm_config, model, iter(tensors), None, True)
    _repack_tied(model)


def _let_vllm_load(twin: Twin) -> None:
    """Give vLLM what it has noted of the model's modules at their first loading."""
    from vllm.model_executor.model_loader.reload.layerwise import (
        LAYERWISE_INFO,
        get_layerwise_info,
    )
    from vllm.model_executor.model_loader.reload.types import LayerReloadingInfo

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


def _forget(twin: Twin) -> None:
    """Take a twin out of vLLM's notes, which would keep its memory, and unlock that memory."""
    from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

    for _, other in twin.pairs:
        LAYERWISE_INFO.pop(other, None)
    twin.close()


def _no_numbers(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(
        tensor.size(), tensor.stride(), dtype=tensor.dtype, device=torch.device("meta")
    )


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
