"""New weights in SGLang's scheduler process: how SGLang loads and counts them.

SGLang replaces weights between `begin_weight_update` and `end_weight_update`, while it is paused.
`SglangLoader` calls the same functions for a twin of the model while tokens are generated
(`asyncrl.engine.remote.worker.staging`). No KV is flushed: requests of other weights have another
`extra_key`, and SGLang's radix cache shares nothing between different ones.

The HF state dict has a mixture's experts of a layer in two tensors, `[E, 2I, H]` and `[E, H, I]`,
as SGLang 0.5.23 holds them too. But its loaders take one expert after the other, as checkpoints on
disk have them, and silently skip other names.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, TypeVar

import torch

from asyncrl.engine.errors import WeightsError
from asyncrl.engine.remote.worker.held_weights import HeldWeights
from asyncrl.engine.remote.worker.ranks import Ranks
from asyncrl.engine.remote.worker.staging import Loader, first_of

MODELS_BY_EXPERT = ("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM")
"""Classes of SGLang's models whose experts are loaded one by one, under these names."""
_GATE_UP, _DOWN = ".experts.gate_up_proj", ".experts.down_proj"
_HELD = {"gate_up_proj": "w13_weight", "down_proj": "w2_weight"}
_AS_LOADED = "UnquantizedFusedMoEMethod"


def expert_by_expert(
    tensors: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors, with stacked experts as views of each expert under its name on disk."""
    for name, tensor in tensors:
        layer = name.rpartition(".experts.")[0]
        if name.endswith(_GATE_UP):
            for index, expert in enumerate(tensor):
                gate, up = expert.chunk(2)
                yield f"{layer}.experts.{index}.gate_proj.weight", gate
                yield f"{layer}.experts.{index}.up_proj.weight", up
        elif name.endswith(_DOWN):
            for index, expert in enumerate(tensor):
                yield f"{layer}.experts.{index}.down_proj.weight", expert
        else:
            yield name, tensor


class SglangHeldWeights(HeldWeights):
    """Finds the tensors of an HF state dict in a loaded model of SGLang's."""

    def tensor_of(self, module: Any, leaf: str) -> Any:
        """Return the tensor of a module that a checkpoint calls `leaf`."""
        return _experts(module, leaf) if leaf in _HELD else super().tensor_of(module, leaf)


def _experts(module: Any, leaf: str) -> torch.Tensor | None:
    """Return all experts' weights of one kind; None if SGLang keeps them in another layout."""
    method = getattr(module, "quant_method", None)
    held: torch.Tensor | None = getattr(module, _HELD[leaf], None)
    if held is None or type(method).__name__ != _AS_LOADED or not _keeps_layout(method, module):
        return None
    if leaf == "gate_up_proj" and getattr(method, "w13_swiglu_interleaved", False):
        return torch.cat([held[:, 0::2], held[:, 1::2]], dim=1)
    return held


def _keeps_layout(method: Any, module: Any) -> bool:
    """Return True if its kernel takes experts as loaded, or with interleaved rows."""
    backend = getattr(method.get_moe_runner_backend(module), "name", "")
    return backend == "TRITON" and not getattr(module, "use_intel_amx_backend", False)


T = TypeVar("T")


class SglangLoader(Loader):
    """Loads as SGLang does. A tensor holds all that it needs for that."""

    name = "SGLang"

    def __init__(self, runner: Any) -> None:
        self.model = runner.model
        self.model_path = str(runner.model_config.model_path)
        self.device, self.dtype = next(runner.model.parameters()).device, runner.dtype

    def load(self, model: torch.nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load tensors, named as in the HF state dict, into the model or its twin, in place."""
        from asyncrl.engine.sglang.worker.api import DefaultModelLoader

        device = next(model.parameters()).device
        loading: Any = model
        if type(model).__name__ in MODELS_BY_EXPERT:
            tensors = expert_by_expert(tensors)
        DefaultModelLoader.restore_weights_before_loading(model, device)
        loading.load_weights(iter(tensors))
        DefaultModelLoader.postprocess_weights(model, device)

    def check_unchanged(self, names: Collection[str]) -> None:
        """Raise WeightsError for parameters that SGLang has not loaded; it only logs them."""
        modules = dict(self.model.named_modules())
        left = []
        for name, one in self.model.named_parameters():
            path = name.rpartition(".")[0]
            indices = getattr(modules[path], "shard_indices", None)
            is_padding = indices is not None and indices.num_org_elements == 0
            if name in names and one.numel() and not is_padding:
                left.append(name)
        if left:
            raise WeightsError(
                f"SGLang did not load new weights into {first_of(left)} of "
                f"{type(self.model).__name__}: use engine.kind: torch or vllm for this model"
            )


def in_all_ranks(ranks: Ranks, call: Callable[[], T]) -> list[T]:
    """Return a call's result in each rank. If it fails in one, it fails in all: none waits.

    Raises WeightsError if it failed in another rank; this rank's own exception passes through.
    """
    result: T | None = None
    error: Exception | None = None
    try:
        result = call()
    except Exception as problem:  # noqa: BLE001 - raised below, once the other ranks know
        error = problem
    found = ranks.gather((result, "" if error is None else f"{type(error).__name__}: {error}"))
    if error is not None:
        raise error
    failed = next((why for _, why in found if why), "")
    if failed:
        raise WeightsError(f"the call failed in another rank: {failed}")
    return [one for one, _ in found]  # type: ignore[misc]
