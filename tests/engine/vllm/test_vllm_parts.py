"""The vLLM engine's parts, without vLLM's engine: steps, requests, the CPU repair."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cache.config import CacheConfig
from engine.config import EngineConfig
from engine.errors import EngineError
from engine.protocol import GenerateRequest, SamplingParams
from engine.vllm.client.engine import VllmEngine
from engine.vllm.client.requests import Table, generation
from engine.vllm.client.steps import AbortedError, ChunkBuilder, Step, StepQueue, most_probable
from engine.vllm.client.verification import judge, warm_up
from engine.vllm.worker.batch import Entry
from rollout.acceptance.kept import _verify as compiled_rule
from rollout.trajectory import IntArray, KeptTokens, Provenance


def ids(*values: int) -> IntArray:
    return np.array(values, np.int32)


# Steps and chunks


def step(n: int, version: int = 0, **more: Any) -> Step:
    logprob_ids = np.arange(3 * n, dtype=np.int32).reshape(n, 3)
    return Step(logprob_ids[:, 0], logprob_ids, np.full((n, 3), -1.0, np.float32), version, **more)


def test_a_chunk_never_spans_two_versions() -> None:
    steps = [step(1, 3), step(2, 3), step(1, 4, finish_reason="length")]
    chunks = ChunkBuilder("r", 2).chunks(steps)
    assert [(len(c.tokens), c.policy_version, c.finish_reason) for c in chunks] == [
        (3, 3, None),
        (1, 4, "length"),
    ]
    assert chunks[0].tokens.tolist() == [0, 0, 3]
    assert chunks[0].topk_ids.tolist() == [[1, 2], [1, 2], [4, 5]]


@pytest.mark.parametrize(("accepted", "last"), [(3, [1, 0]), (4, [1, 1]), (9, [1, 1])])
def test_the_last_step_may_end_within_its_drafts(accepted: int, last: list[int]) -> None:
    steps = [step(1), step(3), step(2, finish_reason="stop", accepted=accepted)]
    (chunk,) = ChunkBuilder("r", 2).chunks(steps)
    assert chunk.provenance.tolist() == [0, 1, 1, 0, *last]
    assert Provenance.DRAFTED == 1


def test_top_k_is_padded_where_less_has_mass() -> None:
    given = np.array([[5, 5, 2, 1]], np.int32)
    logprobs = np.array([[-0.1, -0.1, -2.0, -np.inf]], np.float32)
    topk, values = most_probable(given, logprobs, 4)
    assert topk.tolist() == [[5, 2, -1, -1]]
    assert np.isneginf(values[0, 2:]).all()
    topk, _ = most_probable(given, logprobs, 1)
    assert topk.tolist() == [[5]]


def test_the_consumer_is_woken_for_enough_tokens_a_flush_or_an_end() -> None:
    async def scene() -> None:
        queue = StepQueue(wake_at=3)
        queue.push(step(9))
        assert len(await queue.take()) == 1, "the first is told at once"
        taker = asyncio.ensure_future(queue.take())
        queue.push(step(1))
        done, _ = await asyncio.wait([taker], timeout=0.01)
        assert not done
        queue.flush()
        assert len(await taker) == 1
        queue.push(step(2))
        queue.push(step(2))
        assert len(await queue.take()) == 2
        queue.push(step(1))
        queue.put(EngineError("gone"))
        assert len(await queue.take()) == 1
        for _ in range(2):
            with pytest.raises(EngineError, match="gone"):
                await queue.take()
        aborted = StepQueue(wake_at=1)
        aborted.put(object())
        assert aborted.started, "new weights would begin it again"
        with pytest.raises(AbortedError):
            await aborted.take()

    asyncio.run(scene())


def test_a_request_carries_its_stream_and_its_place() -> None:
    """A resumed response continues in its own stream of numbers, after what was generated."""
    sampling = SamplingParams(max_tokens=9, seed=5)
    request = GenerateRequest("r", "tree", ids(1, 2), sampling, ids(3, 4, 5), ids(6))
    submitted = generation(request, 5, 10)
    tokens, params = submitted.tokens, submitted.params
    assert tokens == [1, 2, 3, 4, 5]
    assert params["max_tokens"] == 6
    assert "seed" not in params  # vLLM would make a generator for it
    params_of_vllm = SimpleNamespace(**params)
    entry = Entry.read(SimpleNamespace(prompt_token_ids=tokens, sampling_params=params_of_vllm))
    extra = entry.extra
    assert (extra.seed, entry.start, entry.limit, extra.cache_key) == (5, 2, 11, "tree")
    assert extra.draft.tolist() == [6]


@pytest.mark.parametrize("finished", [False, True])
def test_no_verification_waits_for_a_compiler(finished: bool) -> None:
    """Not of a finished trajectory either, whose arrays are read-only: numba's types know that."""
    n = 5
    table = np.tile(np.arange(4, dtype=np.int32), (n, 1))
    probabilities = np.full((n, 4), np.log(0.25), np.float32)
    arrays = table[:, 0].copy(), probabilities[:, 0].copy(), table, probabilities
    for array in arrays:
        array.setflags(write=not finished)
    kept = KeptTokens(*arrays)
    now = Table(
        own=probabilities[:, 0].copy(),
        topk_ids=table.copy(),
        topk_logprobs=probabilities.copy(),
        tail_ids=np.full(n, -1, np.int32),
        tail_logprobs=np.full(n, -np.inf, np.float32),
        known_logprobs=probabilities.copy(),
    )
    sampling = SamplingParams(max_tokens=9, top_k_logprobs=4)
    request = GenerateRequest("r", "", ids(1, 2), sampling, kept=kept)
    warm_up()
    compiled = list(compiled_rule.signatures)
    chunk, rest = judge(request, kept, now, 3, 1)
    assert compiled_rule.signatures == compiled
    assert chunk is not None
    assert chunk.tokens.tolist() == [0] * n
    assert rest.prefix_tokens.tolist() == [0] * n


def test_a_directory_without_a_model_ends_the_start(tmp_path: Path) -> None:
    config = EngineConfig(kind="vllm", slots=2, max_model_len=16)

    async def scene() -> None:
        engine = VllmEngine(config, str(tmp_path), cache_config=CacheConfig(), seed=0)
        with pytest.raises(EngineError, match="not started"):
            await engine.score([])
        for what in (engine.start, engine.pause):
            with pytest.raises(EngineError, match=str(tmp_path)):
                await what()
        await engine.close()
        await engine.close()

    asyncio.run(scene())


# The repair of sampling on a CPU


@pytest.mark.vllm
def test_the_repair_is_needed_here_and_works() -> None:
    """In a process of its own: importing vLLM's CPU code changes much of this one."""
    script = """
import torch
from vllm.platforms import current_platform
if current_platform.is_cpu():
    from vllm.utils import cpu_triton_utils as kernels
    from engine.vllm.cpu_sampling import apply_if_affected, expand, writes_its_output
    current_platform.import_kernels()
    original = kernels._expand_kernel_impl
    print("original writes:", writes_its_output(original))
    apply_if_affected()
    print("repaired:", kernels._expand_kernel_impl is expand)
    print("repaired writes:", writes_its_output(kernels._expand_kernel_impl))
    apply_if_affected()
    print("still:", kernels._expand_kernel_impl is expand)
    # What the original does right, integers of 8 bytes, the repair does alike.
    values, ends = torch.tensor([5, 2, 9]), torch.tensor([1, 1, 4])
    outputs = [torch.full((4,), -7), torch.full((4,), -7)]
    for kernel, output in zip((original, expand), outputs):
        kernel(output, values, ends, 9, 1)
    print("same:", outputs[0].tolist() == outputs[1].tolist() == [5, 1, 1, 1])
    # Its start fails without the repair where numba is loaded.
    import llvmlite.binding
    current_platform.register_triton_kernel_overrides()
    from vllm.v1.sample import rejection_sampler
    print("replaced:", rejection_sampler.expand_kernel.func is expand)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    facts = [line for line in done.stdout.splitlines() if ":" in line]
    if not facts:
        pytest.skip("this vLLM runs on a GPU: the repair is not for it")
    assert facts == [
        "original writes: False",
        "repaired: True",
        "repaired writes: True",
        "still: True",
        "same: True",
        "replaced: True",
    ]
