"""A worker extension that can install weights as commit 8ea730f did. It runs in vLLM's core."""

from __future__ import annotations

import time

import torch

from asyncrl.engine.remote.worker.staging import WorkerWeights
from asyncrl.engine.vllm.worker.extension import WorkerExtension
from asyncrl.engine.vllm.worker.held_weights import VllmHeldWeights
from asyncrl.engine.vllm.worker.weights import VllmLoader, load


class ReloadingExtension(WorkerExtension):
    def timed_proof(self) -> tuple[float, int]:
        """Seconds of proving how weights are installed, and their bytes; before any is."""
        loader = VllmLoader(self)
        weights = WorkerWeights(loader)
        began = time.perf_counter()
        weights.prove()
        seconds = time.perf_counter() - began
        assert weights.copies
        return seconds, sum(one.nbytes for _, one in weights._own().items())  # noqa: SLF001

    def install_as_before(self, policy_version: int, shapes: dict[str, tuple[int, ...]]) -> None:
        """Reload the model from what was staged, and take its fingerprint."""
        model = self.model_runner.get_model()
        with self._weights._staged.install(policy_version) as tensors, torch.inference_mode():  # noqa: SLF001
            load(self, model, tensors)
        held = VllmHeldWeights(model, {name: tuple(shape) for name, shape in shapes.items()})
        for _ in held.fingerprint(elements=1 << 62):
            pass
