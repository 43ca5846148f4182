"""What runs inside vLLM's engine-core process on our behalf, called by `collective_rpc`.

vLLM mixes `WorkerExtension` into its worker class (`worker_extension_cls`).
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import torch

from engine.vllm.weights import read_tensors
from engine.vllm.worker.batch import Batch
from engine.vllm.worker.drafter import CacheDrafter
from engine.vllm.worker.sampling import CoreSampler
from engine.vllm.worker.scoring import CoreScorer
from wire.weights.layout import WeightManifest

CLASS_PATH = f"{__name__}.WorkerExtension"

_ORPHANED = 3
"""Exit status of an engine core whose generator has gone."""


class WorkerExtension:
    """Remote calls; results are plain data. `self` is also vLLM's worker."""

    model_runner: Any
    reload_weights: Callable[..., None]
    _scorer: CoreScorer

    def asyncrl_attach(self, parent: int) -> None:
        """Put our drawing, scoring and drafting in place, and watch the generator's process."""
        runner = self.model_runner
        batch = Batch(runner)
        sampler = CoreSampler(runner, batch)
        sampler.install()
        self._scorer = CoreScorer(runner, batch)
        self._scorer.install()
        drafter = getattr(runner, "drafter", None)
        if isinstance(drafter, CacheDrafter):
            drafter.attach(runner, batch, sampler)
        _end_with(parent)

    def asyncrl_install(self, manifest: dict[str, Any]) -> None:
        """Load all weights of a manifest (as builtins) in place, while generation is paused."""
        given = msgspec.convert(manifest, WeightManifest)
        with torch.inference_mode():
            self.reload_weights(weights_iterator=read_tensors(given))
            _repack_tied(self.model_runner.get_model())
        self._scorer.policy_version = given.policy_version
        drafter = getattr(self.model_runner, "drafter", None)
        if isinstance(drafter, CacheDrafter):
            drafter.advance(given.policy_version)

    def asyncrl_save_cache(self) -> int:
        """Write the snapshot of the cache of rollouts; returns its bytes."""
        drafter = getattr(self.model_runner, "drafter", None)
        return drafter.save() if isinstance(drafter, CacheDrafter) else 0


def _repack_tied(model: torch.nn.Module) -> None:
    """Have output layers that share the embedding's weight follow it.

    On a CPU vLLM multiplies by a packed copy, made anew for layers whose own weights are loaded. A
    tied weight comes once, under the embedding's name: the output layer would keep its old copy
    (0.32.0). On a GPU there is no copy, and this does nothing.
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


def _end_with(parent: int) -> None:
    """Leave when the generator dies, however it dies: vLLM's core would live on for ever."""
    fd = os.pidfd_open(parent)
    name = "asyncrl-parent-watch"
    threading.Thread(target=partial(_wait_and_leave, fd), name=name, daemon=True).start()


def _wait_and_leave(fd: int) -> None:
    select.select([fd], [], [])
    os._exit(_ORPHANED)
