"""A worker extension that can install weights as commit 8ea730f did. It runs in vLLM's core."""

from __future__ import annotations

import torch

from asyncrl.engine.vllm.worker.extension import WorkerExtension
from asyncrl.engine.vllm.worker.held_weights import VllmHeldWeights
from asyncrl.engine.vllm.worker.weights import load


class ReloadingExtension(WorkerExtension):
    """Ours, with the way before."""

    def install_as_before(self, policy_version: int, shapes: dict[str, tuple[int, ...]]) -> None:
        """Reload the model from what was staged, and take its fingerprint."""
        model = self.model_runner.get_model()
        with self._weights._staged.install(policy_version) as tensors, torch.inference_mode():  # noqa: SLF001
            load(self, model, tensors)
        held = VllmHeldWeights(model, {name: tuple(shape) for name, shape in shapes.items()})
        for _ in held.fingerprint(elements=1 << 62):
            pass
