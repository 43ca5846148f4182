"""How long an engine takes, before it is ready, to prove how it installs new weights.

A part of `python -m benchmarks.weights`: `--part proof`. With `--engine vllm` in a real vLLM, else
with a loader that only copies, so that what we add to two of the engine's loadings is seen alone.
"""

import asyncio
import time
from collections.abc import Collection, Iterable
from typing import Any
from unittest.mock import patch

import torch

from asyncrl.cache.config import CacheConfig
from asyncrl.engine.remote.worker.shadow_model import ShadowModel
from asyncrl.engine.remote.worker.staging import WorkerWeights
from asyncrl.engine.vllm.client.engine import VllmEngine
from asyncrl.wire.weights.pretrained import load_causal_lm
from benchmarks.weights_remote import config_of

EXTENSION = "asyncrl.engine.vllm.client.launch.EXTENSION_PATH"
PROVING = "benchmarks.weights_worker.ProvingExtension"
_DTYPE = torch.bfloat16


class CopyLoader:
    """A `Loader` of a model of transformers."""

    name = "the copying loader"
    device, dtype = torch.device("cpu"), _DTYPE

    def __init__(self, path: str) -> None:
        self.model_path = path
        self.model: torch.nn.Module = load_causal_lm(path, _DTYPE)

    def load(self, model: torch.nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        held = dict(model.named_parameters())
        for name, tensor in tensors:
            held[name].data.copy_(tensor)

    def adopt(self, twin: ShadowModel) -> None:
        """Do nothing."""

    def forget(self, twin: ShadowModel) -> None:
        """Do nothing."""

    def check_unchanged(self, names: Collection[str]) -> None:
        """Do nothing."""

    def installed(self, policy_version: int) -> None:
        """Do nothing."""


def measure(path: str, kind: str) -> dict[str, Any]:
    """Seconds of the proof, and the bytes of the weights."""
    if kind == "vllm":
        return asyncio.run(_on_vllm(path))
    loader = CopyLoader(path)
    weights = WorkerWeights(loader)
    began = time.perf_counter()
    weights.prove()
    seconds = time.perf_counter() - began
    assert weights._twin is not None  # noqa: SLF001
    nbytes = sum(one.nbytes for one in loader.model.parameters())
    return {"engine": kind, "seconds": seconds, "bytes": nbytes}


async def _on_vllm(path: str) -> dict[str, Any]:
    with patch(EXTENSION, PROVING):
        engine = VllmEngine(
            config_of("vllm", _DTYPE), path, cache_config=CacheConfig(enabled=False), seed=1
        )
        try:
            await engine.start()
            llm = engine._process.vllm.llm  # noqa: SLF001
            ((seconds, nbytes),) = await llm.collective_rpc("timed_proof")
        finally:
            await engine.close()
    return {"engine": "vllm", "seconds": seconds, "bytes": nbytes}
