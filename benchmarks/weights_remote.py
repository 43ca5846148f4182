"""New weights in a real vLLM or SGLang: the pause, and staging while it generates.

A part of `python -m benchmarks.weights`. The pause is the time between two steps in which nothing
is generated; medians over versions.
"""

import asyncio
import statistics
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from asyncrl.cache.config import CacheConfig
from asyncrl.engine.config import EngineConfig
from asyncrl.engine.protocol import GenerateRequest, SamplingParams
from asyncrl.engine.remote.client.engine import RemoteEngine
from asyncrl.engine.sglang.client.engine import SglangEngine
from asyncrl.engine.sglang.config import SglangConfig
from asyncrl.engine.torch.model import load_model
from asyncrl.engine.vllm.client.engine import VllmEngine
from asyncrl.engine.vllm.config import VllmConfig
from asyncrl.wire.weights.layout import SHARED_MEMORY
from asyncrl.wire.weights.writer import WeightPublisher
from benchmarks.harness import sglang_python

_ROWS, _LENGTH = 4, 512


def measure_remote(kind: str, path: str, dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    """Milliseconds by part; medians. And the bytes of the weights."""
    cpu = torch.device("cpu")
    trainer = load_model(path, slots=1, max_len=64, device=cpu, dtype=torch.float32).module
    tensors = dict(trainer.named_parameters())
    size = sum(one.numel() for one in tensors.values()) * dtype.itemsize
    found = asyncio.run(_versions(kind, path, tensors, dtype, repeats, size))
    # The first version takes the memory that the others find.
    medians = {part: 1e3 * statistics.median(times[1:]) for part, times in found.items()}
    return {"engine_bytes": size, "milliseconds": medians}


async def _versions(
    kind: str,
    path: str,
    tensors: dict[str, torch.Tensor],
    dtype: torch.dtype,
    repeats: int,
    size: int,
) -> dict[str, list[float]]:
    """Publish, stage and install versions while the engine generates; seconds by part."""
    found: dict[str, list[float]] = defaultdict(list)
    source, target = (np.ones(size, np.uint8) for _ in range(2))

    async def timed(part: str, action: Awaitable[Any]) -> Any:
        began = time.perf_counter()
        result = await action
        found[part].append(time.perf_counter() - began)
        return result

    async def copy() -> None:
        np.copyto(target, source)

    with WeightPublisher(SHARED_MEMORY, f"bench-{kind}", dtype=dtype) as publisher:
        async with _generating(kind, path, dtype) as engine:
            for version in range(1, repeats + 2):
                manifest = publisher.publish(tensors.items(), version)
                await timed("stage", engine.stage_weights(manifest))
                found["pause"].append(await timed("install", _install(engine, version)))
                await timed("fingerprint", engine.fingerprint())
                await engine.pause()
                await timed("memcpy", copy())
                await engine.resume()
    return found


def config_of(kind: str, dtype: torch.dtype) -> EngineConfig:
    """Of an engine that serves few rows."""
    sglang = SglangConfig(kv_cache_gib=0.5)
    if kind == "sglang":
        sglang = sglang.model_copy(update={"python": sglang_python()})
    return EngineConfig.model_validate(
        {
            "kind": kind,
            "slots": _ROWS,
            "max_model_len": _LENGTH + 16,
            "threads": 1,
            "dtype": "float32" if dtype == torch.float32 else "bfloat16",
            "top_k_logprobs": 8,
            "vllm": VllmConfig(kv_cache_gib=0.5),
            "sglang": sglang,
        }
    )


@asynccontextmanager
async def _generating(kind: str, path: str, dtype: torch.dtype) -> AsyncIterator[RemoteEngine]:
    """An engine, which generates inside the block."""
    config, cache = config_of(kind, dtype), CacheConfig(enabled=False)
    make = VllmEngine if kind == "vllm" else SglangEngine
    engine: RemoteEngine = make(config, path, cache_config=cache, seed=1)
    try:
        await engine.start()
        rows = [asyncio.create_task(_row(engine, row)) for row in range(_ROWS)]
        try:
            yield engine
        finally:
            for row in rows:
                row.cancel()
            await asyncio.gather(*rows, return_exceptions=True)
    finally:
        await engine.close()


async def _row(engine: RemoteEngine, row: int) -> None:
    count = 0
    while True:
        count += 1
        name, prompt = f"{row}.{count}", np.arange(16, dtype=np.int32)
        sampling = SamplingParams(_LENGTH, top_k_logprobs=8)
        async for _ in engine.generate(GenerateRequest(name, "", prompt, sampling)):
            pass


async def _install(engine: RemoteEngine, version: int) -> float:
    """Install a staged version; the seconds of the pause."""
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
