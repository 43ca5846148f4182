"""Loads new weights in vLLM's process (`asyncrl.engine.remote.worker.staging`) and sums them.

On a CPU vLLM multiplies by packed copies, whose numbers only a product with unit vectors shows. The
packed copy of a head that is tied to the embedding can be left behind, so its product is looked at
too. The experts of a mixture are compared if vLLM's kernel takes them as they are loaded.

An adapter may be kept apart from the model (`trainer.lora.serve: adapter`). vLLM puts a module
around each layer that may have one, with room for A and B. All requests name it, and each version
overwrites the previous one while generation is paused. KV of another version is not reused, because
the prefix cache's salt has the version (`Core`).
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from asyncrl.engine.errors import WeightsError
from asyncrl.engine.remote.worker.held_weights import HeldWeights, Shape, Shard, probes_within
from asyncrl.engine.remote.worker.ranks import Ranks
from asyncrl.engine.remote.worker.shadow_model import ShadowModel, like
from asyncrl.engine.remote.worker.staging import Loader, WorkerWeights, check_finite
from asyncrl.engine.vllm.remote import ADAPTER_ID
from asyncrl.engine.weights import NamedTensors, StagedWeights
from asyncrl.wire.errors import WeightsReadError
from asyncrl.wire.weights.adapter import Pair, names_of, pairs_of, served_apart
from asyncrl.wire.weights.fingerprint import MatrixSums, TensorSums, name_of, probe_columns, sums_of
from asyncrl.wire.weights.layout import WeightManifest
from asyncrl.wire.weights.reader import WeightBuffer

_SLOT = 0
"""Index in vLLM's room for adapters."""


class ServedAdapter:
    """Writes A and B into vLLM's layers, and reads what they hold. At first B is 0."""

    def __init__(self, runner: Any) -> None:
        from asyncrl.engine.vllm.worker.api import LogitsProcessorWithLoRA, LoRARequest

        # As vLLM's warm-up adds one, which needs no files; its numbers are dropped below.
        runner.lora_manager.add_dummy_lora(LoRARequest("policy", ADAPTER_ID, "never read"), rank=1)
        manager = runner.lora_manager._adapter_manager  # noqa: SLF001 - vLLM has no other way
        manager.activate_adapter(ADAPTER_ID)
        manager.pin_adapter(ADAPTER_ID)
        self._modules: dict[str, Any] = {
            name: one
            for name, one in manager.modules.items()
            if not isinstance(one, LogitsProcessorWithLoRA)
        }
        self._stacked: dict[str, list[str]] = manager.packed_modules_mapping
        self._layers: dict[str, tuple[str, int]] = {}
        """Module of each layer's pair in vLLM, and its index among those that the module stacks."""
        self._rank = 0
        self.write([])
        _leave_the_head(runner.get_model())

    def write(self, tensors: NamedTensors) -> None:
        """Overwrite the adapter with A and scaling * B; WeightsError: nothing was changed."""
        pairs = {name.removesuffix(".weight"): one for name, one in pairs_of(tensors).items()}
        places = {layer: self._place(layer) for layer in pairs}
        by_module: dict[str, dict[int, Pair]] = {}
        for layer, (path, part) in places.items():
            by_module.setdefault(path, {})[part] = pairs[layer]
        for name, module in self._modules.items():
            given = by_module.get(name, {})
            if not given:
                module.reset_lora(_SLOT)
            elif name.rpartition(".")[2] in self._stacked:
                parts = [given.get(part) for part in range(module.n_slices)]
                a, b = ([None if one is None else one[side] for one in parts] for side in (0, 1))
                module.set_lora(_SLOT, a, b)
            else:
                module.set_lora(_SLOT, *given[0])
        self._layers, self._rank = places, max((len(one.a) for one in pairs.values()), default=0)

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """Yield A and scaling * B as the layers hold them, by their published names."""
        for layer, (name, part) in self._layers.items():
            module, rank = self._modules[name], self._rank
            a = module.lora_a_stacked[part][_SLOT, 0, :rank]
            b = module.lora_b_stacked[part][_SLOT, 0, :, :rank]
            yield from zip(names_of(layer), (a.contiguous(), b.contiguous()), strict=True)

    def _place(self, layer: str) -> tuple[str, int]:
        if layer in self._modules:
            return layer, 0
        parent, _, leaf = layer.rpartition(".")
        for name, parts in self._stacked.items():
            if leaf in parts and f"{parent}.{name}" in self._modules:
                return f"{parent}.{name}", parts.index(leaf)
        raise WeightsError(
            f"vLLM does not support an adapter of layer {layer!r}; use trainer.lora.serve: merged, "
            "or other trainer.lora.targets"
        )


def _leave_the_head(model: torch.nn.Module) -> None:
    """Remove the head's wrapper: it expects a row for each drawn token, unlike our scoring."""
    from asyncrl.engine.vllm.worker.api import LogitsProcessorWithLoRA

    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, LogitsProcessorWithLoRA):
                setattr(parent, name, child.base_layer)


class AdapterWeights(WorkerWeights):
    """`WorkerWeights` for versions of an adapter that is kept apart."""

    def __init__(self, loader: Loader, adapter: ServedAdapter) -> None:
        super().__init__(loader)
        self._adapter = adapter
        self._staged = StagedWeights(check_finite, _AdapterBuffer(loader.dtype))

    def prove(self) -> None:
        """Do nothing: an adapter is always copied."""

    def install(self, policy_version: int) -> str:
        """Copy the staged version, always."""
        with self._staged.install(policy_version) as tensors, torch.inference_mode():
            self._adapter.write(tensors)
        return ""


class _AdapterBuffer:
    """One version of an adapter, in the engine's data type and scaled."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._published = WeightBuffer()
        self._scaling = 1.0

    def read(self, manifest: WeightManifest) -> None:
        """Read a published version, as `WeightBuffer.read`."""
        if manifest.lora is None or manifest.lora.serve != "adapter":
            raise WeightsReadError(
                "this engine expects the weights of an adapter (trainer.lora.serve: adapter), but "
                "other weights were published"
            )
        self._published.read(manifest)
        self._scaling = manifest.lora.scaling

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors, as `WeightBuffer.tensors`."""
        yield from served_apart(self._published.tensors(), self._scaling, self._dtype)


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
        # The probe of the block, exactly, by a product.
        (rows, columns), (height, width) = shape, shard.shape
        chosen, first = probes_within(columns, shard.column, width)
        dtype = module.weight.dtype
        units = torch.zeros(len(chosen), width, dtype=dtype)
        units[torch.arange(len(chosen)), torch.tensor(chosen, dtype=torch.int64)] = 1
        probe = MatrixSums(rows, len(probe_columns(columns)), units.device)
        if chosen:
            products = module.cpu_linear(units, module.weight, None)  # [P, N]
            probe.add(products[:, shard.first : shard.first + height].t(), shard.row, first)
        return TensorSums(name_of(dtype), None, probe.value * shard.factor)


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


class VllmLoader(Loader):
    """Loads by vLLM's `reload_weights`, which raises for tensors that it does not know."""

    name = "vLLM"

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self.model = worker.model_runner.get_model()
        self.model_path = str(worker.model_config.model)
        self.device, self.dtype = worker.device, worker.model_config.dtype

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
    """Raise WeightsError if vLLM (0.32.0) cannot load new weights into this model."""
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
