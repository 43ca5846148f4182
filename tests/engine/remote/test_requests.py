"""Requests as an engine carries them between its processes, and what comes back for kept tokens."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from asyncrl.engine.errors import EngineError
from asyncrl.engine.protocol import GenerateRequest, SamplingParams
from asyncrl.engine.remote.client.generation import (
    Table,
    after_verification,
    generation,
    verification,
)
from asyncrl.engine.remote.client.responses import Scored
from asyncrl.engine.remote.extras import Outcome, RequestExtra, ScoreColumns
from asyncrl.engine.sampling.drawing import noise_seeds
from asyncrl.rollout.trajectory import IntArray, KeptTokens, Provenance


def ids(*values: int) -> IntArray:
    return np.array(values, np.int32)


def kept_tokens(n: int, k: int, lenience: float | None = None) -> KeptTokens:
    return KeptTokens(
        tokens=np.arange(n, dtype=np.int32),
        logprobs=np.full(n, -1.5, np.float32),
        topk_ids=np.arange(n * k, dtype=np.int32).reshape(n, k) - 1,
        topk_logprobs=-np.ones((n, k), np.float32),
        noise_seeds=np.arange(n, dtype=np.uint64) + np.uint64(1 << 63),
        lenience=lenience,
    )


def test_the_order_of_requests_decides_within_a_priority_and_never_across() -> None:
    def priority(priority: int, order: int, kept: KeptTokens | None = None) -> int:
        asked = GenerateRequest(
            "r", "", ids(1), SamplingParams(max_tokens=9), priority=priority, order=order
        )
        if kept is None:
            return generation(asked, 5).priority
        return verification(asked, kept, 5).priority

    kept = kept_tokens(2, 0)
    wanted = [(0, 0), (0, 3), (0, 2**32 - 1), (1, 0), (1, 7)]
    numbers = [priority(*one) for one in wanted]
    assert numbers == sorted(set(numbers))
    assert numbers == [priority(*one, kept) for one in wanted]


@pytest.mark.parametrize("kept", [None, kept_tokens(4, 0), kept_tokens(4, 3, lenience=1.5)])
def test_extras_arrive_as_they_were_sent(kept: KeptTokens | None) -> None:
    sent = RequestExtra(
        seed=(1 << 64) - 1, generated=6, cache_key="k", draft=ids(1, 2), scored=4, kept=kept
    )
    carried = msgspec.msgpack.decode(msgspec.msgpack.encode(sent.to_plain()))
    got = RequestExtra.from_plain(carried)
    assert (got.seed, got.generated, got.cache_key, got.scored) == ((1 << 64) - 1, 6, "k", 4)
    np.testing.assert_array_equal(got.draft, sent.draft)
    assert (got.kept is None) == (kept is None)
    if kept is not None and got.kept is not None:
        assert got.kept.lenience == kept.lenience
        for name in ("tokens", "logprobs", "topk_ids", "topk_logprobs", "noise_seeds", "observed"):
            there, here = getattr(got.kept, name), getattr(kept, name)
            assert there.dtype == here.dtype
            np.testing.assert_array_equal(there, here)


def scored_of(outcomes: list[Outcome], k: int = 2) -> Scored:
    """A scoring request's table: token i has log-probability -i / 10."""
    columns, n = ScoreColumns(k), len(outcomes)
    scored = np.tile(np.arange(columns.width, dtype=np.int32), (n, 1))
    scored[:, columns.own], scored[:, columns.outcome] = np.arange(n), outcomes
    values = -scored.astype(np.float32) / 10
    return Scored(scored, values, policy_version=3)


def test_a_scored_table_is_read_by_its_columns() -> None:
    scored = scored_of([Outcome.KEPT, Outcome.RENAMED])
    table = Table.of("r", scored, 2)
    assert (table.tokens.tolist(), table.outcomes.tolist()) == ([0, 1], [0, 2])
    np.testing.assert_allclose(table.logprobs, [0, -0.1])
    assert table.topk_ids.tolist() == [[2, 3], [2, 3]]
    np.testing.assert_allclose(table.topk_logprobs, [[-0.2, -0.3]] * 2)
    assert Table.of("r", scored, 0).topk_ids.shape == (2, 0)  # a request that wants no lists
    scored.logprobs[0, 0] = np.nan
    with pytest.raises(EngineError, match=r"'r'.*not finite"):
        Table.of("r", scored, 2)


def test_a_request_carries_its_stream_and_its_place() -> None:
    """A resumed response continues in its own stream of numbers, after what was generated."""
    sampling = SamplingParams(max_tokens=9, seed=5)
    request = GenerateRequest("r", "tree", ids(1, 2), sampling, ids(3, 4, 5), ids(6))
    submitted, extra = generation(request, 5), generation(request, 5).extra
    assert (submitted.tokens, submitted.max_tokens) == ([1, 2, 3, 4, 5], 6)
    assert (extra.seed, extra.generated, extra.cache_key) == (5, 3, "tree")
    assert extra.draft.tolist() == [6]
    limited = replace(request, sampling=replace(sampling, max_turn_tokens=4), turn_start=2)
    assert generation(limited, 5).max_tokens == 3


def test_the_limit_of_a_turn_begins_again_after_an_accepted_turn() -> None:
    kept = replace(kept_tokens(5, 2), observed=np.array([0, 0, 1, 0, 0], np.bool_))
    sampling = SamplingParams(20, top_k_logprobs=2, max_turn_tokens=2)
    request = GenerateRequest("r", "", ids(9), sampling)
    for left, reason, more in ((1, None, 1), (3, None, 2), (4, None, 1), (5, "length", 0)):
        table = Table.of("r", scored_of([Outcome.KEPT] * left), 2)
        chunk, rest = after_verification(request, kept, table, seed=7, policy_version=3)
        assert chunk is not None
        assert (len(chunk.tokens), chunk.finish_reason) == (left, reason)
        assert generation(rest, 7).max_tokens == more


@pytest.mark.parametrize(
    ("outcomes", "lenience", "noise"),
    [
        ([Outcome.KEPT] * 5, None, ["old"] * 5),
        ([Outcome.KEPT, Outcome.KEPT, Outcome.DRAWN], None, ["old", "old", "new"]),
        ([Outcome.KEPT, Outcome.RENAMED], None, ["old", "old"]),
        ([Outcome.DRAWN], None, ["new"]),
        ([Outcome.KEPT, Outcome.KEPT], 1.0, ["new", "new"]),
        ([], 1.0, []),
    ],
)
def test_what_the_worker_left_is_reported_and_continued(
    outcomes: list[Outcome], lenience: float | None, noise: list[str]
) -> None:
    kept = kept_tokens(5, 2, lenience)
    request = GenerateRequest("r", "", ids(9), SamplingParams(20, top_k_logprobs=2), ids(8))
    table = Table.of("r", scored_of(outcomes), 2)
    chunk, rest = after_verification(request, kept, table, seed=7, policy_version=3)
    n = len(outcomes)
    assert rest.kept is None
    assert rest.prefix_tokens.tolist() == [8, *range(n)]
    assert rest.draft_tokens.tolist() == list(range(n, 5))
    if chunk is None:
        assert n == 0
        return
    assert (chunk.tokens.tolist(), chunk.policy_version) == (list(range(n)), 3)
    kinds = [Provenance.VERIFIED if one == Outcome.KEPT else Provenance.SAMPLED for one in outcomes]
    assert chunk.provenance.tolist() == kinds
    (new,) = noise_seeds(np.array([7], np.uint64), 3)
    want = [kept.noise_seeds[i] if name == "old" else new for i, name in enumerate(noise)]
    assert chunk.noise_seeds.tolist() == want
    assert chunk.finish_reason is None


def test_a_response_ends_within_what_the_worker_left() -> None:
    kept, table = kept_tokens(5, 2), Table.of("r", scored_of([Outcome.KEPT] * 3), 2)
    stopping = SamplingParams(20, top_k_logprobs=2, stop_tokens=(1,))
    request = GenerateRequest("r", "", ids(9), stopping)
    chunk, _ = after_verification(request, kept, table, seed=7, policy_version=3)
    assert chunk is not None
    assert (chunk.tokens.tolist(), chunk.finish_reason) == ([0, 1], "stop")
    assert len(chunk.noise_seeds) == len(chunk.topk_ids) == 2
    full = replace(request, sampling=SamplingParams(3, top_k_logprobs=2))
    chunk, _ = after_verification(full, kept, table, seed=7, policy_version=3)
    assert chunk is not None
    assert (len(chunk.tokens), chunk.finish_reason) == (3, "length")
