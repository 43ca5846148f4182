"""Requests as vLLM carries them between its processes, and the verdict on kept tokens."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from cache.config import CacheConfig
from engine.config import EngineConfig
from engine.errors import EngineError
from engine.protocol import GenerateRequest, SamplingParams
from engine.vllm.client.engine import VllmEngine
from engine.vllm.client.requests import Table, generation
from engine.vllm.client.steps import Step
from engine.vllm.client.verification import judge, warm_up
from engine.vllm.extras import RequestExtra, ScoreColumns
from engine.vllm.worker.batch import Entry
from rollout.acceptance.kept import _verify as compiled_rule
from rollout.trajectory import IntArray, KeptTokens


def ids(*values: int) -> IntArray:
    return np.array(values, np.int32)


@pytest.mark.parametrize("width", [None, 0, 3])
def test_extras_arrive_as_they_were_sent(width: int | None) -> None:
    known = None if width is None else np.arange(4 * width, dtype=np.int32).reshape(4, width)
    sent = RequestExtra(
        seed=(1 << 64) - 1, generated=6, cache_key="k", draft=ids(1, 2), scored=4, known=known
    )
    carried = msgspec.msgpack.decode(msgspec.msgpack.encode(sent.to_extra_args()))
    got = RequestExtra.from_extra_args(carried)
    assert (got.seed, got.generated, got.cache_key, got.scored) == ((1 << 64) - 1, 6, "k", 4)
    np.testing.assert_array_equal(got.draft, sent.draft)
    if known is None:
        assert got.known is None
    else:
        np.testing.assert_array_equal(got.known, known)
    with pytest.raises(KeyError):
        RequestExtra.from_extra_args(None)


@pytest.mark.parametrize("known", [0, 3])
def test_a_scored_table_is_read_by_its_columns(known: int) -> None:
    columns = ScoreColumns(2, known)
    assert columns.width == 4 + known
    row = np.arange(columns.width, dtype=np.int32)
    scored = Step(
        tokens=ids(),
        logprob_ids=np.empty((0, 1), np.int32),
        logprobs=np.empty((0, 1), np.float32),
        policy_version=3,
        scored_ids=row[None],
        scored_logprobs=-row[None].astype(np.float32),
    )
    table = Table.of("r", scored, 2, 8)
    assert table.own.tolist() == [0]
    assert table.topk_ids.tolist() == [[1, 2]]
    assert table.topk_logprobs.tolist() == [[-1, -2]]
    assert (table.tail_ids.tolist(), table.tail_logprobs.tolist()) == ([3], [-3])
    assert table.known_logprobs.tolist() == [[-4.0 - j for j in range(known)]]


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
