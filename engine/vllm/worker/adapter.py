"""An adapter that vLLM keeps apart from the model: `trainer.lora.serve: adapter`.

vLLM puts a module around each layer that may have an adapter, with room for A and B of one. All
requests name it, and each version overwrites the previous one while generation is paused. KV of
another version is not reused, because the prefix cache's salt has the version (`Core`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asyncrl.engine.errors import WeightsError
from asyncrl.engine.remote.worker.staging import Loader, WorkerWeights, check_finite
from asyncrl.engine.vllm.remote import ADAPTER_ID
from asyncrl.engine.weights import NamedTensors, StagedWeights
from asyncrl.wire.errors import WeightsReadError
from asyncrl.wire.weights.adapter import Pair, names_of, pairs_of, served_apart
from asyncrl.wire.weights.layout import WeightManifest
from asyncrl.wire.weights.reader import WeightBuffer

_SLOT = 0
"""Index in vLLM's room for adapters."""


class _Place(NamedTuple):
    """Location of a layer's pair in vLLM."""

    module: str
    part: int
    """Index among the layers that the module stacks."""


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
        self._layers: dict[str, _Place] = {}
        self._rank = 0
        self.write([])
        _leave_the_head(runner.get_model())

    def write(self, tensors: NamedTensors) -> None:
        """Overwrite the adapter with A and scaling * B; WeightsError: nothing was changed."""
        pairs = {name.removesuffix(".weight"): one for name, one in pairs_of(tensors).items()}
        places = {layer: self._place(layer) for layer in pairs}
        by_module: dict[str, dict[int, Pair]] = {}
        for layer, place in places.items():
            by_module.setdefault(place.module, {})[place.part] = pairs[layer]
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

    def _place(self, layer: str) -> _Place:
        if layer in self._modules:
            return _Place(layer, 0)
        parent, _, leaf = layer.rpartition(".")
        for name, parts in self._stacked.items():
            if leaf in parts and f"{parent}.{name}" in self._modules:
                return _Place(f"{parent}.{name}", parts.index(leaf))
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
