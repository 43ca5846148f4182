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

from engine.vllm.cpu_sampling import registered_expand, writes_its_output
from engine.vllm.drafter import CacheDrafter
from engine.vllm.scoring import ScoresAsSampled
from engine.vllm.weights import read_tensors
from scheduler.messages.weights import WeightManifest

CLASS_PATH = f"{__name__}.WorkerExtension"

_ORPHANED = 3
"""Exit status of an engine core whose generator has gone."""


class WorkerExtension:
    """Remote calls; results are plain data. `self` is also vLLM's worker."""

    model_runner: Any
    reload_weights: Callable[..., None]

    def asyncrl_attach(self, parent: int) -> bool:
        """Connect drafter and scoring to the model runner, and watch the generator's process.

        Returns:
            Whether sampling with drafts is exact here (see `engine.vllm.cpu_sampling`).
        """
        drafter = getattr(self.model_runner, "drafter", None)
        if isinstance(drafter, CacheDrafter):
            drafter.attach(self.model_runner)
        ScoresAsSampled(self.model_runner).install()
        _end_with(parent)
        return writes_its_output(registered_expand())

    def asyncrl_install(self, manifest: dict[str, Any]) -> None:
        """Load all weights of a manifest (as builtins) in place, while generation is paused."""
        tensors = read_tensors(msgspec.convert(manifest, WeightManifest))
        with torch.inference_mode():
            self.reload_weights(weights_iterator=tensors)


def _end_with(parent: int) -> None:
    """Leave when the generator dies, however it dies: vLLM's core would live on for ever."""
    fd = os.pidfd_open(parent)
    name = "asyncrl-parent-watch"
    threading.Thread(target=partial(_wait_and_leave, fd), name=name, daemon=True).start()


def _wait_and_leave(fd: int) -> None:
    select.select([fd], [], [])
    os._exit(_ORPHANED)
