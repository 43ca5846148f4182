"""Drafting, preemption, priorities and new weights together, on real engines short of KV space."""

from __future__ import annotations

import asyncio

import numpy as np
from new_weights import give_weights
from served_engine import (
    PROMPT,
    SLOTS,
    Served,
    ask,
    collect,
    collect_all,
    drawn,
    logprobs_of,
    tokens_of,
)

from asyncrl.engine.protocol import TokenChunk

LENGTH = 330
"""Of responses: 32 of them would need three blocks of vLLM's each, or 10,656 places of SGLang's."""


def test_a_response_is_the_same_however_it_is_served(served: Served) -> None:
    """Alone or with a few, without drafts; or drafted, preempted for want of KV, out of its turn.

    A draw is a function of seed and place. Logits differ in their last bits with the batch, which
    moves a draw about once in 10^6: one response may differ.
    """
    served.install(served.old)
    how = {"max_tokens": LENGTH, "temperature": 0.7}
    alone = served.call(collect(served.engine, ask("a", seed=100, **(how | {"max_tokens": 80}))))
    few = [ask(f"f{i}", seed=100 + i, **how) for i in range(4)]
    want = [tokens_of(chunks) for chunks in served.call(collect_all(served.engine, few))]
    np.testing.assert_array_equal(tokens_of(alone), want[0][:80])
    before = served.engine.stats()
    crowd = [
        ask(f"c{i}", seed=100 + i % 4, cache_key="crowd", priority=i % 2, **how)
        for i in range(SLOTS + 8)
    ]
    got = [tokens_of(chunks) for chunks in served.call(collect_all(served.engine, crowd))]
    after = served.engine.stats()
    assert sum(one.tolist() != want[i % 4].tolist() for i, one in enumerate(got)) <= 1
    accepted = after.tokens.accepted - before.tokens.accepted
    assert accepted > 1000


def test_weights_change_under_preempted_and_drafted_responses(served: Served) -> None:
    engine = served.engine
    served.install(served.old)
    version = engine.stats().policy_version
    requests = [
        ask(f"p{i}", cache_key=f"swap{i % 3}", max_tokens=LENGTH, priority=i % 3)
        for i in range(SLOTS + 8)
    ]

    async def swaps() -> list[list[TokenChunk]]:
        responses = [asyncio.create_task(collect(engine, request)) for request in requests]
        for step, model in enumerate((served.new, served.old, served.new)):
            reached = engine.stats().tokens.generated + 2000
            while engine.stats().tokens.generated < reached and not all(
                r.done() for r in responses
            ):
                await asyncio.wait(responses, timeout=0.01)
            await give_weights(engine, model.state_dict().items(), version + 1 + step)
        return list(await asyncio.gather(*responses))

    for chunks in served.call(swaps()):
        assert len(tokens_of(chunks)) == LENGTH
        versions = [chunk.policy_version for chunk in chunks]
        assert versions == sorted(versions)
        assert chunks[-1].finish_reason == "length"
        assert np.isfinite(logprobs_of(chunks)).all()
    fresh = served.call(collect(engine, ask("after", max_tokens=100)))
    want = drawn(served.new, PROMPT, tokens_of(fresh))
    np.testing.assert_allclose(logprobs_of(fresh), want, atol=1e-3)
