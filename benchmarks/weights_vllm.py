"""New weights in a real vLLM on this machine: the pause, and staging while it generates.

A part of `python -m benchmarks.weights`. The way before (commit 8ea730f) takes turns with today's,
in one engine: vLLM reloaded the model while it was paused, and the fingerprint was taken in the
pause. The pause is the time between two steps in which nothing is generated.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from cache.config import CacheConfig
from engine.config import EngineConfig
from engine.protocol import GenerateRequest, SamplingParams
from engine.torch.model import load_model
from engine.vllm.client.engine import VllmEngine
from engine.vllm.config import VllmConfig
from wire.weights.layout import SHARED_MEMORY
from wire.weights.writer import WeightPublisher

_ROWS, _LENGTH = 4, 512
_EXTENSION = "engine.vllm.client.launch.EXTENSION_PATH"
_RELOADING = "benchmarks.weights_worker.ReloadingExtension"
_Found = dict[str, dict[str, list[float]]]


def measure_vllm(path: str, dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    """Milliseconds by way and part, in turns; medians. And the bytes of the weights."""
    trainer = load_model(
        path, slots=1, max_len=64, device=torch.device("cpu"), dtype=torch.float32
    ).module
    found: _Found = defaultdict(lambda: defaultdict(list))
    size = asyncio.run(_versions(path, dict(trainer.named_parameters()), dtype, repeats, found))
    medians = {
        name: {part: 1e3 * statistics.median(times) for part, times in parts.items()}
        for name, parts in found.items()
    }
    return {"engine_bytes": size, "milliseconds": medians}


async def _versions(
    path: str, tensors: dict[str, torch.Tensor], dtype: torch.dtype, repeats: int, found: _Found
) -> int:
    """Publish, stage and install versions while the engine generates."""
    size = sum(one.numel() for one in tensors.values()) * dtype.itemsize
    source, target = (np.ones(size, np.uint8) for _ in range(2))
    publisher = WeightPublisher(SHARED_MEMORY, "bench-vllm", dtype=dtype)
    try:
        async with _generating(path, dtype) as engine:
            for version in range(1, 2 * repeats + 3):
                # The first one is loaded in the pause to prove that copying may replace it.
                into = found if version > 2 else defaultdict(lambda: defaultdict(list))
                way = "now" if version % 2 else "before"
                manifest = publisher.publish(tensors.items(), version)
                began = time.perf_counter()
                await engine.stage_weights(manifest)
                into[way]["stage"].append(time.perf_counter() - began)
                began = time.perf_counter()
                if way == "now":
                    into[way]["pause"].append(await _install(engine, version))
                    into[way]["install"].append(time.perf_counter() - began)
                    began = time.perf_counter()
                    await engine.fingerprint()
                    into[way]["fingerprint"].append(time.perf_counter() - began)
                else:
                    into[way]["pause"].append(await _install_as_before(engine, version))
                    into[way]["install"].append(time.perf_counter() - began)
                    await engine.pause()
                    began = time.perf_counter()
                    np.copyto(target, source)
                    into["floor"]["memcpy"].append(time.perf_counter() - began)
                    await engine.resume()
    finally:
        publisher.close()
    return size


@asynccontextmanager
async def _generating(path: str, dtype: torch.dtype) -> AsyncIterator[VllmEngine]:
    """An engine that generates inside the block."""
    config = EngineConfig(
        kind="vllm",
        slots=_ROWS,
        max_model_len=_LENGTH + 16,
        threads=1,
        dtype="float32" if dtype == torch.float32 else "bfloat16",
        top_k_logprobs=8,
        vllm=VllmConfig(kv_cache_gib=0.5),
    )
    with patch(_EXTENSION, _RELOADING):
        engine = VllmEngine(config, path, cache_config=CacheConfig(enabled=False), seed=1)
        await engine.start()
        rows = [asyncio.create_task(_row(engine, row)) for row in range(_ROWS)]
        try:
            yield engine
        finally:
            for row in rows:
                row.cancel()
            await asyncio.gather(*rows, return_exceptions=True)
            await engine.close()


async def _row(engine: VllmEngine, row: int) -> None:
    """One response after the other."""
    count = 0
    while True:
        count += 1
        name, prompt = f"{row}.{count}", np.arange(16, dtype=np.int32)
        sampling = SamplingParams(_LENGTH, top_k_logprobs=8)
        async for _ in engine.generate(GenerateRequest(name, "", prompt, sampling)):
            pass


async def _install(engine: VllmEngine, version: int) -> float:
    """Seconds in which nothing was generated."""
    pausing = engine._running().pausing  # noqa: SLF001
    times: list[float] = []
    stop, resume = pausing._stop, pausing._resume  # noqa: SLF001

    async def timed_stop() -> None:
        await stop()
        times.append(time.perf_counter())

    async def timed_resume() -> None:
        times.append(time.perf_counter())
        await resume()

    with patch.object(pausing, "_stop", timed_stop), patch.object(pausing, "_resume", timed_resume):
        await engine.install_weights(version)
    return times[1] - times[0]


async def _install_as_before(engine: VllmEngine, version: int) -> float:
    """As `_install`; the version must be staged."""
    parts, llm = engine._running(), engine._process.vllm.llm  # noqa: SLF001
    shapes = parts.weights._shapes.shapes  # noqa: SLF001
    await engine.pause()
    began = time.perf_counter()
    await llm.collective_rpc("install_as_before", args=(version, shapes))
    seconds = time.perf_counter() - began
    await engine.resume()
    return seconds
