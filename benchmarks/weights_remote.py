"""New weights in a real vLLM or SGLang on this machine: the pause, and staging while it generates.

A part of `python -m benchmarks.weights`. The pause is the time between two steps in which nothing
is generated. On vLLM the way before (commit 8ea730f) takes turns with today's, in one engine: vLLM
reloaded the model while it was paused, and the fingerprint was taken in the pause.
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
EXTENSION = "asyncrl.engine.vllm.client.launch.EXTENSION_PATH"
RELOADING = "benchmarks.weights_worker.ReloadingExtension"
_Found = dict[str, dict[str, list[float]]]


def measure_remote(kind: str, path: str, dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    """Milliseconds by way and part, in turns; medians. And the bytes of the weights."""
    trainer = load_model(
        path, slots=1, max_len=64, device=torch.device("cpu"), dtype=torch.float32
    ).module
    found: _Found = defaultdict(lambda: defaultdict(list))
    size = asyncio.run(
        _versions(kind, path, dict(trainer.named_parameters()), dtype, repeats, found)
    )
    medians = {
        name: {part: 1e3 * statistics.median(times) for part, times in parts.items()}
        for name, parts in found.items()
    }
    return {"engine_bytes": size, "milliseconds": medians}


async def _versions(
    kind: str,
    path: str,
    tensors: dict[str, torch.Tensor],
    dtype: torch.dtype,
    repeats: int,
    found: _Found,
) -> int:
    """Publish, stage and install versions while the engine generates."""
    size = sum(one.numel() for one in tensors.values()) * dtype.itemsize
    source, target = (np.ones(size, np.uint8) for _ in range(2))
    publisher = WeightPublisher(SHARED_MEMORY, f"bench-{kind}", dtype=dtype)
    ways = ("now", "before") if kind == "vllm" else ("now",)
    try:
        async with _GENERATING[kind](path, dtype) as engine:
            for turn in range(len(ways) * (repeats + 1)):
                version, way = turn + 1, ways[turn % len(ways)]
                # The first one takes the memory that the others find.
                into = found if turn >= len(ways) else defaultdict(lambda: defaultdict(list))
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
                    assert isinstance(engine, VllmEngine)
                    into[way]["pause"].append(await _install_as_before(engine, version))
                    into[way]["install"].append(time.perf_counter() - began)
                if way == ways[-1]:
                    await engine.pause()
                    began = time.perf_counter()
                    np.copyto(target, source)
                    into["floor"]["memcpy"].append(time.perf_counter() - began)
                    await engine.resume()
    finally:
        publisher.close()
    return size


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
async def _generating(engine: RemoteEngine) -> AsyncIterator[RemoteEngine]:
    """Starts an engine, which generates inside the block."""
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


@asynccontextmanager
async def _vllm(path: str, dtype: torch.dtype) -> AsyncIterator[RemoteEngine]:
    config, cache = config_of("vllm", dtype), CacheConfig(enabled=False)
    with patch(EXTENSION, RELOADING):
        async with _generating(VllmEngine(config, path, cache_config=cache, seed=1)) as engine:
            yield engine


@asynccontextmanager
async def _sglang(path: str, dtype: torch.dtype) -> AsyncIterator[RemoteEngine]:
    config, cache = config_of("sglang", dtype), CacheConfig(enabled=False)
    async with _generating(SglangEngine(config, path, cache_config=cache, seed=1)) as engine:
        yield engine


_GENERATING = {"vllm": _vllm, "sglang": _sglang}


async def _row(engine: RemoteEngine, row: int) -> None:
    count = 0
    while True:
        count += 1
        name, prompt = f"{row}.{count}", np.arange(16, dtype=np.int32)
        sampling = SamplingParams(_LENGTH, top_k_logprobs=8)
        async for _ in engine.generate(GenerateRequest(name, "", prompt, sampling)):
            pass


async def _install(engine: RemoteEngine, version: int) -> float:
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
