"""Verification of kept tokens on real engines.

Sampling is compared by chi-square with the policy, enumerated over all responses
(`false_alarms`).
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from false_alarms import Claims, is_caught
from new_weights import give_weights
from served_engine import (
    PROMPT,
    SAMPLES,
    SLOTS,
    TOP_K,
    WAYS,
    Served,
    ask,
    chi_square,
    collect,
    collect_all,
    drawn,
    drift,
    enumerated,
    kept_of,
    logprobs_of,
    provenance_of,
    tokens_of,
    verified,
)

from asyncrl.engine.protocol import GenerateRequest, TokenChunk
from asyncrl.rollout.trajectory import Provenance

CLAIMS = Claims(__file__)


@pytest.mark.parametrize("how", WAYS)
def test_verified_responses_follow_the_new_policy(served: Served, how: dict[str, float]) -> None:
    """Lists of 2 of a vocabulary of 8: 30% of what is drawn lies outside; drafts are on."""
    _, responses = verified(served, **how)
    p = chi_square(
        np.array([tokens_of(chunks) for chunks in responses]), enumerated(served.new, 4, **how)
    )
    provenance = np.stack([provenance_of(chunks) for chunks in responses])
    stay, kept = (provenance == Provenance.VERIFIED).sum(), 2.5 * SAMPLES
    print(f"{how}: p = {p:.3g}, verified {stay} of {kept:.0f}")
    assert CLAIMS.fit(p)
    assert 0.1 * kept < stay < 0.9 * kept
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
        for request in verified(served, **WAYS[0])[0]
        if request.kept is not None
    ]
    served.install(served.new)
    responses = served.call(collect_all(served.engine, requests))
    got = np.array([tokens_of(chunks) for chunks in responses])
    p = chi_square(got, enumerated(served.new, 4, **WAYS[0]))
    print(f"p = {p:.3g}")
    assert is_caught(p)


def test_what_the_same_policy_drew_is_accepted_to_its_end(served: Served) -> None:
    """Also what lies outside the lists. Rounding rejects one of these texts in a thousand runs.

    Ends by the limit or a stop token within what is kept; otherwise the response continues.
    """
    served.install(served.old)
    how = {"temperature": 1.2}
    drawing = [ask(f"w{i}", max_tokens=30, **how) for i in range(6)]
    for i, chunks in enumerate(served.call(collect_all(served.engine, drawing))):
        kept = kept_of(chunks)
        (done,) = served.call(collect(served.engine, ask(f"l{i}", max_tokens=30, kept=kept, **how)))
        assert done.finish_reason == "length"
        np.testing.assert_array_equal(done.tokens, kept.tokens)
        assert done.topk_ids.shape == (30, TOP_K)
        assert done.outside_top_k() > 3
        assert (done.provenance == Provenance.VERIFIED).all()
        stop = int(kept.tokens[-1])
        first = int(np.flatnonzero(kept.tokens == stop)[0]) + 1
        stopping = ask(f"s{i}", max_tokens=31, stop_tokens=(stop,), kept=kept, **how)
        (ended,) = served.call(collect(served.engine, stopping))
        assert (ended.finish_reason, len(ended.tokens)) == ("stop", first)
        prefix, rest = kept.tokens[:5], kept_of(chunks, slice(5, 20))
        resumed = ask(f"h{i}", max_tokens=40, prefix_tokens=prefix, kept=rest, **how)
        more = served.call(collect(served.engine, resumed))
        np.testing.assert_array_equal(tokens_of(more)[:15], rest.tokens)
        assert len(tokens_of(more)) == 35
        assert more[-1].finish_reason == "length"
        want = drawn(served.old, np.concatenate([PROMPT, prefix]), tokens_of(more), **how)
        np.testing.assert_allclose(logprobs_of(more), want, atol=1e-3)


def test_nothing_kept_is_an_ordinary_request_and_lenience_accepts_all(served: Served) -> None:
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


def test_rejected_tokens_are_drafted_and_the_kv_of_scoring_is_found(served: Served) -> None:
    served.install(served.old)
    how = {"temperature": 0.7}
    chunks = served.call(collect(served.engine, ask("k", max_tokens=200, seed=5, **how)))
    served.install(served.new)
    meter, before = served.meter, served.engine.stats()
    found = meter.prefix_found
    # Only the last tokens may be rejected: the lenience makes the first 160 accepted.
    lenient = replace(kept_of(chunks, slice(160)), lenience=1e30)
    request = ask("r", max_tokens=200, seed=6, kept=lenient, cache_key="rest", **how)
    served.call(collect(served.engine, request))
    # Whole blocks of 163 tokens; the state after the last one is computed again.
    assert meter.prefix_found - found in (served.whole_blocks(163), served.whole_blocks(162))
    strict = ask("t", max_tokens=200, seed=7, kept=kept_of(chunks), cache_key="other", **how)
    rest = served.call(collect(served.engine, strict))
    assert len(tokens_of(rest)) == 200
    assert provenance_of(rest)[0] in (Provenance.VERIFIED, Provenance.SAMPLED)
    assert served.engine.stats().tokens.drafted > before.tokens.drafted


def test_verified_tokens_carry_the_version_that_judged_them(served: Served) -> None:
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
            if (chunk.provenance == Provenance.VERIFIED).any():
                seen.set()  # the first that comes may have been rejected at once
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


def test_an_interrupted_request_reports_all_that_came_and_can_be_resumed(served: Served) -> None:
    """Interrupted while it draws, while it is verified, and before it has begun; then resumed."""
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
            engine.interrupt(request.request_id)
            chunks.append(await reading)
            chunks += [chunk async for chunk in stream]
        return chunks

    for attempt in range(5):  # on a busy machine a response may end before it is interrupted
        first = served.call(cut(ask(f"first{attempt}", max_tokens=300, seed=5), after=20))
        if first[-1].finish_reason == "abort":
            break
    assert first[-1].finish_reason == "abort"
    begun = tokens_of(first)
    assert 20 <= len(begun) < 300
    most = min(300, len(begun) + 40)
    whole = served.call(collect(engine, ask("whole", max_tokens=most, seed=5)))
    np.testing.assert_array_equal(begun, tokens_of(whole)[: len(begun)])
    resumed = ask("rest", max_tokens=most, seed=5, prefix_tokens=begun)
    rest = served.call(collect(engine, resumed))
    np.testing.assert_array_equal(tokens_of(rest), tokens_of(whole)[len(begun) :])
    verifying = ask("verifying", max_tokens=300, seed=6, kept=kept_of(first))
    never = served.call(cut(verifying, after=0))
    assert never[-1].finish_reason == "abort"
    assert sum(len(chunk.tokens) for chunk in never) in (0, len(begun), len(begun) + 1)
    engine.interrupt("unknown")
    assert engine.stats().running + engine.stats().waiting == 0


def test_a_scored_request_holds_a_slot(served: Served) -> None:
    """It ends with the step that it began with: after a step the core counts none of it."""
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
