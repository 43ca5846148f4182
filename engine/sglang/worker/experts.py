"""Experts of a mixture: how SGLang takes them, and where it holds them. Imports no SGLang.

The HF state dict has the experts of a layer in two tensors, `[E, 2I, H]` and `[E, H, I]`, as SGLang
0.5.23 holds them too. But its loaders take one expert after the other, as checkpoints on disk have
them, and pass over other names without a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from asyncrl.engine.remote.worker.held_weights import HeldWeights

MODELS_BY_EXPERT = ("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM")
"""Classes of SGLang's models whose experts are loaded one by one, under these names."""
_GATE_UP, _DOWN = ".experts.gate_up_proj", ".experts.down_proj"
_HELD = {"gate_up_proj": "w13_weight", "down_proj": "w2_weight"}
_AS_LOADED = "UnquantizedFusedMoEMethod"


def expert_by_expert(
    tensors: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """The same tensors, those of all experts as views of each one's, under the names on disk."""
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
        """The tensor of a module that a checkpoint calls `leaf`."""
        return _experts(module, leaf) if leaf in _HELD else super().tensor_of(module, leaf)


def _experts(module: Any, leaf: str) -> torch.Tensor | None:
    """All experts' weights of one kind; None if SGLang keeps them in another layout."""
    method = getattr(module, "quant_method", None)
    held: torch.Tensor | None = getattr(module, _HELD[leaf], None)
    if held is None or type(method).__name__ != _AS_LOADED or not _keeps_layout(method, module):
        return None
    if leaf == "gate_up_proj" and getattr(method, "w13_swiglu_interleaved", False):
        return torch.cat([held[:, 0::2], held[:, 1::2]], dim=1)
    return held


def _keeps_layout(method: Any, module: Any) -> bool:
    """Whether its kernel takes the experts as they were loaded, or with interleaved rows."""
    backend = getattr(method.get_moe_runner_backend(module), "name", "")
    return backend == "TRITON" and not getattr(module, "use_intel_amx_backend", False)
