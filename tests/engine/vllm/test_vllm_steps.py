"""Steps of vLLM's core on their way to chunks."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from engine.drawing import noise_seeds
from engine.errors import EngineError
from engine.protocol import GenerateRequest, SamplingParams
from engine.stopping import StopRule
from engine.vllm.client.steps import (
    AbortedError,
    ChunkBuilder,
    Step,
    StepQueue,
    StopWatch,
    most_probable,
)
from rollout.trajectory import Provenance


def step(n: int, version: int = 0, **more: Any) -> Step:
    logprob_ids = np.arange(3 * n, dtype=np.int32).reshape(n, 3)
    return Step(logprob_ids[:, 0], logprob_ids, np.full((n, 3), -1.0, np.float32), version, **more)


def test_a_chunk_never_spans_two_versions() -> None:
    steps = [step(1, 3), step(2, 3), step(1, 4, finish_reason="length")]
    chunks = ChunkBuilder("r", 2, 7).chunks(steps)
    assert [(len(c.tokens), c.policy_version, c.finish_reason) for c in chunks] == [
        (3, 3, None),
        (1, 4, "length"),
    ]
    assert chunks[0].tokens.tolist() == [0, 0, 3]
    assert chunks[0].topk_ids.tolist() == [[1, 2], [1, 2], [4, 5]]
    seed = np.array([7], np.uint64)
    assert chunks[0].noise_seeds.tolist() == noise_seeds(seed, 3).tolist() * 3
    assert chunks[1].noise_seeds.tolist() == noise_seeds(seed, 4).tolist()


@pytest.mark.parametrize(("accepted", "last"), [(3, [1, 0]), (4, [1, 1]), (9, [1, 1])])
def test_the_last_step_may_end_within_its_drafts(accepted: int, last: list[int]) -> None:
    steps = [step(1), step(3), step(2, finish_reason="stop", accepted=accepted)]
    (chunk,) = ChunkBuilder("r", 2, 7).chunks(steps)
    assert chunk.provenance.tolist() == [0, 1, 1, 0, *last]
    assert Provenance.DRAFTED == 1


def test_a_step_is_cut_where_a_stop_string_is_complete() -> None:
    """The tokens are 0, 3, 6; the response resumes after a token that begins the string."""
    rule = StopRule.of(["bcd"], [b"c", b"", b"", b"de", b"b", b"", b"x"])
    params = SamplingParams(9, stop_rule=rule)
    request = GenerateRequest("r", "", np.array([1]), params, np.array([4], np.int32))
    queue = StepQueue(wake_at=100, watch=StopWatch.of(request))
    for _ in range(2):  # the second step came before vLLM was told
        queue.push(step(3))
    (cut,) = asyncio.run(queue.take())
    assert (cut.tokens.tolist(), cut.finish_reason) == ([0, 3], "stop")
    (chunk,) = ChunkBuilder("r", 2, 7).chunks([cut])
    assert chunk.provenance.tolist() == [1, 1], "the free draw of the step was cut off"
    assert len(chunk.logprobs) == len(chunk.topk_ids) == 2


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
