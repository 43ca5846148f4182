"""Kept tokens and scores on real vLLM: one engine, whose KV space is too small for all its slots.

Sampling is compared by chi-square with the policy, enumerated over all responses. Each comparison
fails a right engine with probability ALARM = 1e-5; there are two, and one of tail draws.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from new_weights import give_weights
from scipy.stats import chi2
from served_vllm import (
    PROMPT,
    SLOTS,
    VOCAB,
    WAYS,
    Served,
    ask,
    chi_square,
    collect,
    collect_all,
    drawn,
    enumerated,
    logprobs_of,
    reference,
    serving,
    tokens_of,
)

from engine.protocol import GenerateRequest, SamplingParams, Score, ScoreRequest, TokenChunk
from rollout.trajectory import KeptTokens, Provenance

pytestmark = [
    pytest.mark.vllm,
    # vLLM 0.32.0 itself, on import and when it looks through all modules for kernels to replace.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.distributed.reduce_op.*:FutureWarning"),
]

ALARM = 1e-5
SMALL_KV_GIB = 0.002
"""32 blocks of 128 tokens; 16 responses of 390 tokens would need 64."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = tmp_path_factory.mktemp("vllm-model")
    # Longer prompts than 128 tokens are taken in by parts.
    with serving(path, kv_cache_gib=SMALL_KV_GIB, max_prefill_tokens=128) as running:
        yield running


def kept_of(chunks: list[TokenChunk], part: slice = slice(None)) -> KeptTokens:
    return KeptTokens(
        tokens_of(chunks)[part],
        logprobs_of(chunks)[part],
        np.concatenate([chunk.topk_ids for chunk in chunks])[part],
        np.concatenate([chunk.topk_logprobs for chunk in chunks])[part],
    )


def provenance_of(chunks: Sequence[TokenChunk]) -> np.ndarray:
    return np.concatenate([chunk.provenance for chunk in chunks])


def drift(served: Served, n: int, **how: float) -> list[GenerateRequest]:
    """Requests whose kept tokens, 1 to 4 of 4, the old policy drew; the new one is installed."""
    served.install(served.old)
    drawing = [ask(f"old{i}", cache_key="drift", seed=i, **how) for i in range(n)]
    old = served.call(collect_all(served.engine, drawing))
    served.install(served.new)
    return [
        ask(
            f"new{i}",
            cache_key="drift",
            seed=(1 << 40) + i,
            kept=kept_of(c, slice(1 + i % 4)),
            **how,
        )
        for i, c in enumerate(old)
    ]


@pytest.mark.parametrize("how", WAYS)
def test_verified_responses_follow_the_new_policy(served: Served, how: dict[str, float]) -> None:
    """Top 4 of a vocabulary of 8 are known of the old policy; drafts are on."""
    n = 2000
    responses = served.call(collect_all(served.engine, drift(served, n, **how)))
    p = chi_square(
        np.array([tokens_of(chunks) for chunks in responses]), enumerated(served.new, 4, **how)
    )
    provenance = np.stack([provenance_of(chunks) for chunks in responses])
    verified = (provenance == Provenance.VERIFIED).sum()
    print(f"{how}: p = {p:.3g}, verified {verified} of {2.5 * n:.0f}")
    assert p > ALARM
    assert 0.1 * 2.5 * n < verified < 0.9 * 2.5 * n
    # Verified tokens lead; their log-probabilities are the new policy's.
    assert (np.diff((provenance == Provenance.VERIFIED).astype(int), axis=1) <= 0).all()
    for chunks in responses[:100]:
        want = drawn(served.new, PROMPT, tokens_of(chunks), **how)
        np.testing.assert_allclose(logprobs_of(chunks), want, atol=1e-3)
        assert {chunk.policy_version for chunk in chunks} == {chunks[0].policy_version}


def test_the_statistic_sees_the_published_lenient_rule(served: Served) -> None:
    """At lenience 1 nothing but the residual is missing; that is far outside of what passes."""
    requests = [
        replace(request, kept=replace(request.kept, lenience=1.0))
        for request in drift(served, 1000, **WAYS[0])
        if request.kept is not None
    ]
    responses = served.call(collect_all(served.engine, requests))
    got = np.array([tokens_of(chunks) for chunks in responses])
    assert chi_square(got, enumerated(served.new, 4, **WAYS[0])) < ALARM / 1000


def test_what_the_same_policy_drew_is_kept_to_its_end(served: Served) -> None:
    """Ends by the limit or a stop token within what is kept; otherwise the response goes on.

    With this top-p the 4 reported tokens are all that can be drawn.
    """
    served.install(served.old)
    how = {"top_p": 0.4}
    drawing = [ask(f"w{i}", max_tokens=30, **how) for i in range(6)]
    for i, chunks in enumerate(served.call(collect_all(served.engine, drawing))):
        kept = kept_of(chunks)
        (done,) = served.call(collect(served.engine, ask(f"l{i}", max_tokens=30, kept=kept, **how)))
        assert done.finish_reason == "length"
        np.testing.assert_array_equal(done.tokens, kept.tokens)
        assert done.topk_ids.shape == (30, 4)
        assert (done.provenance == Provenance.VERIFIED).all()
        stop = int(kept.tokens[-1])
        first = int(np.flatnonzero(kept.tokens == stop)[0]) + 1
        stopping = ask(f"s{i}", max_tokens=31, stop_tokens=(stop,), kept=kept, **how)
        (ended,) = served.call(collect(served.engine, stopping))
        assert (ended.finish_reason, len(ended.tokens)) == ("stop", first)
        prefix, rest = kept.tokens[:5], kept_of(chunks, slice(5, 20))
        goes_on = ask(f"h{i}", max_tokens=40, prefix_tokens=prefix, kept=rest, **how)
        more = served.call(collect(served.engine, goes_on))
        np.testing.assert_array_equal(tokens_of(more)[:15], rest.tokens)
        assert len(tokens_of(more)) == 35
        assert more[-1].finish_reason == "length"
        want = drawn(served.old, np.concatenate([PROMPT, prefix]), tokens_of(more), **how)
        np.testing.assert_allclose(logprobs_of(more), want, atol=1e-3)


def test_nothing_kept_is_an_ordinary_request_and_lenience_keeps_all(served: Served) -> None:
    served.install(served.old)
    plain = served.call(collect(served.engine, ask("p", max_tokens=30, seed=9)))
    empty = ask("e", max_tokens=30, seed=9, kept=kept_of(plain, slice(0)))
    np.testing.assert_array_equal(
        tokens_of(served.call(collect(served.engine, empty))), tokens_of(plain)
    )
    served.install(served.new)
    kept = replace(kept_of(plain, slice(20)), lenience=1e30)
    chunks = served.call(collect(served.engine, ask("a", max_tokens=30, kept=kept)))
    np.testing.assert_array_equal(tokens_of(chunks)[:20], kept.tokens)
    assert provenance_of(chunks)[:20].tolist() == [Provenance.VERIFIED] * 20


def test_the_rejected_rest_is_drafted_and_the_kv_of_scoring_is_found(served: Served) -> None:
    served.install(served.old)
    how = {"temperature": 0.7}
    chunks = served.call(collect(served.engine, ask("k", max_tokens=380, seed=5, **how)))
    served.install(served.new)
    core = served.engine._core
    assert core is not None
    meter, before = core.vllm.meter, served.engine.stats()
    found = meter.prefix_found
    # Only the last tokens are of another policy's liking: the first 300 are made to be accepted.
    lenient = replace(kept_of(chunks, slice(300)), lenience=1e30)
    request = ask("r", max_tokens=380, seed=6, kept=lenient, cache_key="rest", **how)
    served.call(collect(served.engine, request))
    assert meter.prefix_found - found == 2 * 128  # whole blocks of 303 tokens
    strict = ask("t", max_tokens=380, seed=7, kept=kept_of(chunks), cache_key="other", **how)
    rest = served.call(collect(served.engine, strict))
    assert len(tokens_of(rest)) == 380
    assert provenance_of(rest)[0] in (Provenance.VERIFIED, Provenance.SAMPLED)
    assert served.engine.stats().tokens.drafted > before.tokens.drafted


def test_verified_tokens_bear_the_version_that_judged_them(served: Served) -> None:
    """Weights change while some are resumed, some are scored and some wait to be scored."""
    engine = served.engine
    requests = [
        replace(request, sampling=replace(request.sampling, max_tokens=40))
        for request in drift(served, 120, **WAYS[0])
    ]
    version = engine.stats().policy_version

    async def first_of(request: GenerateRequest, seen: asyncio.Event) -> list[TokenChunk]:
        chunks = []
        async for chunk in engine.generate(request):
            chunks.append(chunk)
            seen.set()
        return chunks

    async def swap() -> list[list[TokenChunk]]:
        seen = asyncio.Event()
        early = [asyncio.create_task(first_of(request, seen)) for request in requests[:60]]
        await seen.wait()
        await engine.pause()
        late = [asyncio.create_task(first_of(request, seen)) for request in requests[60:]]
        await give_weights(engine, served.old.state_dict().items(), version + 1)
        await engine.resume()
        return list(await asyncio.gather(*early, *late))

    models = {version: served.new, version + 1: served.old}
    judged = set()
    for chunks in served.call(swap()):
        assert len(tokens_of(chunks)) == 40
        versions = [chunk.policy_version for chunk in chunks]
        assert versions == sorted(versions)
        first = chunks[0]
        if (first.provenance == Provenance.VERIFIED).any():
            judged.add(first.policy_version)
            want = drawn(models[first.policy_version], PROMPT, first.tokens, **WAYS[0])
            np.testing.assert_allclose(first.logprobs, want, atol=1e-3)
    assert judged == {version, version + 1}


# Scores


def score(served: Served, tokens: np.ndarray, seeds: Sequence[int], k: int = 4) -> list[Score]:
    return served.call(
        served.engine.score(
            [
                ScoreRequest(
                    f"s{seed}", PROMPT, tokens,
                    SamplingParams(1, seed=seed, top_k_logprobs=k, **WAYS[1]),
                )
                for seed in seeds
            ]
        )
    )  # fmt: skip


def test_tail_draws_follow_what_is_not_listed(served: Served) -> None:
    """Pooled over positions, against the reference outside the 2 listed tokens."""
    served.install(served.old)
    tokens = np.random.default_rng(1).integers(0, VOCAB, 40).astype(np.int32)
    scores = score(served, tokens, range(400), k=2)
    law = reference(served.old, np.concatenate([PROMPT, tokens])[None], **WAYS[1])[0, 2:-1].exp()
    law = law.numpy().copy()
    np.testing.assert_array_equal(scores[0].topk_ids, scores[1].topk_ids)
    np.put_along_axis(law, scores[0].topk_ids, 0.0, axis=1)
    tails = np.stack([one.tail_ids for one in scores])
    values = np.stack([one.tail_logprobs for one in scores])
    none = law.sum(1) < 1e-6
    assert (tails[:, none] == -1).all()
    assert np.isneginf(values[:, none]).all()
    place = np.broadcast_to(np.arange(40), tails.shape)
    there = tails >= 0
    np.testing.assert_allclose(
        np.exp(values[there]), law[place[there], tails[there]], rtol=1e-2, atol=1e-5
    )
    statistic, freedom = 0.0, 0
    for at in np.flatnonzero(~none):
        want = 400 * law[at] / law[at].sum()
        have = np.bincount(tails[:, at], minlength=VOCAB)
        assert have[want == 0].sum() == 0
        common = want >= 8
        cells = np.append(want[common], want[~common].sum())
        counts = np.append(have[common], have[~common].sum())
        full = cells > 0
        statistic += (((counts - cells) ** 2)[full] / cells[full]).sum()
        freedom += int(full.sum()) - 1
    p = float(chi2.sf(statistic, freedom))
    print(f"tails: p = {p:.3g} with {freedom} degrees of freedom")
    assert freedom > 30
    assert p > ALARM
    again = score(served, tokens, range(3), k=2)
    np.testing.assert_array_equal(np.stack([one.tail_ids for one in again]), tails[:3])


def test_long_texts_are_scored_by_parts(served: Served) -> None:
    """Together with responses that are being written; the parts fall differently each time."""
    served.install(served.old)
    rng = np.random.default_rng(3)
    texts = [rng.integers(0, VOCAB, n).astype(np.int32) for n in (390, 129, 127, 250, 60, 1)]
    sampling = SamplingParams(1, top_k_logprobs=4)
    requests = [ScoreRequest(f"s{i}", PROMPT, text, sampling) for i, text in enumerate(texts)]

    async def both() -> list[Score]:
        writing = [ask(f"w{i}", max_tokens=60, cache_key="parts") for i in range(8)]
        responses = asyncio.create_task(collect_all(served.engine, writing))
        scores = await served.engine.score(requests)
        await responses
        return scores

    for one, text in zip(served.call(both()), texts, strict=True):
        np.testing.assert_allclose(one.logprobs, drawn(served.old, PROMPT, text), atol=1e-3)
        law = reference(served.old, np.concatenate([PROMPT, text])[None])[0, 2:-1].numpy()
        best = -np.sort(-law, axis=1)[:, :4]
        np.testing.assert_allclose(one.topk_logprobs, best, atol=1e-3)
        assert (one.tail_ids[:, None] != one.topk_ids).all()


def test_where_all_is_listed_there_is_no_tail(served: Served) -> None:
    served.install(served.old)
    short = SamplingParams(1, top_k_logprobs=4, top_p=0.3)
    one = served.call(served.engine.score([ScoreRequest("s", PROMPT, PROMPT, short)]))[0]
    law = reference(served.old, np.concatenate([PROMPT, PROMPT])[None], top_p=0.3)[0, 2:-1]
    few = ((law > -np.inf).sum(-1) <= 4).numpy()
    assert few.any()
    assert (one.tail_ids[few] == -1).all()
    assert one.tail_ids.shape == one.tail_logprobs.shape == (3,)


# Drafting, preemption, priorities and swaps together


def test_a_response_is_the_same_however_it_is_served(served: Served) -> None:
    """Alone and without drafts, or drafted, preempted for want of KV, and out of its turn.

    A draw is a function of seed and place. Logits differ in their last bits with the batch, which
    moves a draw about once in 10^6: one response may differ.
    """
    served.install(served.old)
    how = {"max_tokens": 390, "temperature": 0.7}
    alone = [ask(f"a{i}", seed=100 + i % 4, **how) for i in range(4)]
    want = [tokens_of(served.call(collect(served.engine, request))) for request in alone]
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
        ask(f"p{i}", cache_key=f"swap{i % 3}", max_tokens=390, priority=i % 3)
        for i in range(2 * SLOTS)
    ]

    async def swaps() -> list[list[TokenChunk]]:
        responses = [asyncio.create_task(collect(engine, request)) for request in requests]
        for step, model in enumerate((served.new, served.old, served.new)):
            reached = engine.stats().tokens.generated + 2000
            while engine.stats().tokens.generated < reached:
                await asyncio.wait(responses, timeout=0.01)
            await give_weights(engine, model.state_dict().items(), version + 1 + step)
        return list(await asyncio.gather(*responses))

    for chunks in served.call(swaps()):
        assert len(tokens_of(chunks)) == 390
        versions = [chunk.policy_version for chunk in chunks]
        assert versions == sorted(versions)
        assert chunks[-1].finish_reason == "length"
        assert np.isfinite(logprobs_of(chunks)).all()
    fresh = served.call(collect(engine, ask("after", max_tokens=100)))
    want = drawn(served.new, PROMPT, tokens_of(fresh))
    np.testing.assert_allclose(logprobs_of(fresh), want, atol=1e-3)


def test_an_interrupted_request_reports_all_that_came_and_can_go_on(served: Served) -> None:
    """Cut while it draws, while it is verified, before it has begun; what goes on fits."""
    served.install(served.old)
    engine = served.engine

    async def cut(request: GenerateRequest, *, after: int) -> list[TokenChunk]:
        chunks: list[TokenChunk] = []
        reading = asyncio.ensure_future(anext(stream := engine.generate(request)))
        await asyncio.sleep(0)  # it has been given to the engine
        async with asyncio.timeout(60):
            while sum(len(chunk.tokens) for chunk in chunks) < after:
                chunks.append(await reading)
                reading = asyncio.ensure_future(anext(stream))
            await engine.interrupt(request.request_id)
            chunks.append(await reading)
            chunks += [chunk async for chunk in stream]
        return chunks

    whole = served.call(collect(engine, ask("whole", max_tokens=300, seed=5)))
    first = served.call(cut(ask("first", max_tokens=300, seed=5), after=20))
    assert first[-1].finish_reason == "abort"
    begun = tokens_of(first)
    assert 20 <= len(begun) < 300
    np.testing.assert_array_equal(begun, tokens_of(whole)[: len(begun)])
    goes_on = ask("rest", max_tokens=300, seed=5, prefix_tokens=begun)
    rest = served.call(collect(engine, goes_on))
    np.testing.assert_array_equal(tokens_of(rest), tokens_of(whole)[len(begun) :])
    verifying = ask("verifying", max_tokens=300, seed=6, kept=kept_of(first))
    never = served.call(cut(verifying, after=0))
    assert never[-1].finish_reason == "abort"
    assert sum(len(chunk.tokens) for chunk in never) in (0, len(begun), len(begun) + 1)
    served.call(engine.interrupt("unknown"))
    assert engine.stats().running + engine.stats().waiting == 0


def test_what_is_scored_holds_a_slot(served: Served) -> None:
    """It ends with the step that it began with: after a step vLLM counts none of it."""
    engine, version = served.engine, served.install(served.old)
    drawn_before = served.call(collect(engine, ask("before", max_tokens=30)))
    crowd = [
        ask(f"k{i}", max_tokens=30, seed=i, kept=kept_of(drawn_before)) for i in range(SLOTS + 4)
    ]

    async def counted() -> tuple[int, int]:
        await engine.pause()
        verifying = asyncio.ensure_future(collect_all(engine, crowd))
        while (stats := engine.stats()).running + stats.waiting < len(crowd):
            await asyncio.wait([verifying], timeout=0.01)
        await engine.resume()
        for chunks in await verifying:
            assert {chunk.policy_version for chunk in chunks} == {version}
        return stats.running, stats.waiting

    assert served.call(counted()) == (SLOTS, 4)
    assert (engine.stats().running, engine.stats().waiting) == (0, 0)
