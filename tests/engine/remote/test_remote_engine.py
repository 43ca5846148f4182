"""Engines whose model runs in another process, on real vLLM and real SGLang.

Sampling is compared by chi-square with the distribution of the model, enumerated over all
responses (`false_alarms`).
"""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from false_alarms import Claims, is_caught
from new_weights import give_weights
from served_engine import (
    PROMPT,
    SLOTS,
    TOP_K,
    VOCAB,
    WAYS,
    Served,
    ask,
    chi_square,
    collect,
    collect_all,
    drawn,
    drawn_across,
    enumerated,
    logprobs_of,
    make_model,
    reference,
    tokens_of,
)

from asyncrl.engine.errors import EngineError, RequestError, WeightsError, WeightsSupersededError
from asyncrl.engine.protocol import SamplingParams, ScoreRequest, TokenChunk
from asyncrl.rollout.trajectory import Provenance
from asyncrl.wire.weights.writer import WeightPublisher

CLAIMS = Claims(__file__)
RESPONSES = 1400
"""Of each way of sampling. In 40 simulations each, the mutants below had p < 1e-11."""
TOKENS = 140
"""Of responses that are all in KV at once: two blocks of vLLM's each, with room for drafts."""


def test_drafting_leaves_the_sampled_distribution_as_it_is(served: Served) -> None:
    """Drafts come from a cache filled under other weights; two ways of sampling share batches."""
    engine, n = served.engine, RESPONSES
    old = [ask(f"old{i}", cache_key="tree", temperature=0.7) for i in range(300)]
    served.call(collect_all(engine, old))
    served.install(served.new)
    before = engine.stats()
    requests = [ask(f"new{i}", cache_key="tree", seed=i, **WAYS[i % 2]) for i in range(2 * n)]
    responses = served.call(collect_all(engine, requests))
    after = engine.stats()
    drafted = after.tokens.drafted - before.tokens.drafted
    accepted = after.tokens.accepted - before.tokens.accepted
    assert drafted > n
    assert drafted / 4 < accepted < drafted * 3 / 4
    assert after.tokens.generated - before.tokens.generated == 8 * n
    for i, how in enumerate(WAYS):
        got = np.array([tokens_of(chunks) for chunks in responses[i::2]])
        p = chi_square(got, enumerated(served.new, 4, **how))
        print(f"{how}: p = {p:.3g}; drafted {drafted}, accepted {accepted}")
        assert CLAIMS.fit(p), how
        for wrong in ({"top_k": 0}, {"min_p": 0.0}, {"top_p": 0.8}) if "top_k" in how else ():
            mutant = enumerated(served.new, 4, **(how | wrong))
            assert is_caught(chi_square(got, mutant)), wrong
    marked = sum(int((c.provenance == Provenance.DRAFTED).sum()) for r in responses for c in r)
    # Drafts accepted beyond the limit are cut off.
    assert 0.5 * accepted < marked <= accepted


def test_the_statistic_sees_another_temperature() -> None:
    """No engine: what the CPU bug does to sampling is far outside of what passes."""
    model = make_model(2)
    wrong = enumerated(model, 4, temperature=0.9)
    cells = np.random.default_rng(0).choice(len(wrong), size=RESPONSES, p=wrong / wrong.sum())
    responses = np.stack(np.unravel_index(cells, (VOCAB,) * 4), axis=1)
    assert is_caught(chi_square(responses, enumerated(model, 4, temperature=0.7)))


@pytest.mark.parametrize("how", [*WAYS, {"top_p": 0.3}])
def test_logprobs_are_those_of_a_plain_forward_pass(served: Served, how: dict[str, float]) -> None:
    served.install(served.old)
    request = ask(cache_key="logprobs", max_tokens=60, **how)
    for chunks in served.call(collect_all(served.engine, [request] * 8)):
        tokens = tokens_of(chunks)
        everything = reference(served.old, np.concatenate([PROMPT, tokens])[None], **how)[0, 2:-1]
        np.testing.assert_allclose(
            logprobs_of(chunks), drawn(served.old, PROMPT, tokens, **how), atol=1e-3
        )
        best, ids = everything.topk(TOP_K + 1)
        clear = ((best[:, :-1] - best[:, 1:]) > 1e-3).all(-1).numpy()
        best, ids = best[:, :-1], ids[:, :-1].masked_fill(best[:, :-1].isneginf(), -1)
        topk = np.concatenate([chunk.topk_logprobs for chunk in chunks])
        topk_ids = np.concatenate([chunk.topk_ids for chunk in chunks])
        np.testing.assert_allclose(topk, best.numpy(), atol=1e-3)
        np.testing.assert_array_equal(topk_ids[clear], ids.numpy()[clear])
        np.testing.assert_array_equal(topk_ids == -1, np.isneginf(topk))


def test_a_tied_weight_given_once_reaches_both_its_layers(served: Served) -> None:
    """As the trainer gives them: the output layer's name is missing."""
    engine, version = served.engine, served.install(served.old) + 1
    once = list(served.new.named_parameters())
    assert len(once) == len(served.new.state_dict()) - 1
    served.call(give_weights(engine, once, version))
    chunks = served.call(collect(engine, ask(max_tokens=60)))
    want = drawn(served.new, PROMPT, tokens_of(chunks))
    np.testing.assert_allclose(logprobs_of(chunks), want, atol=1e-3)


@pytest.mark.parametrize("how", WAYS)
def test_scores_are_those_of_the_sampled_distribution(
    served: Served, how: dict[str, float]
) -> None:
    tokens = np.random.default_rng(1).integers(0, VOCAB, 50).astype(np.int32)
    version = served.install(served.old)
    sampling = SamplingParams(max_tokens=1, top_k_logprobs=TOP_K, **how)
    requests = [ScoreRequest(f"s{i}", PROMPT, tokens[: i * 10], sampling) for i in range(6)]
    scores = served.call(served.engine.score(requests))
    assert [score.request_id for score in scores] == [f"s{i}" for i in range(6)]
    for score, request in zip(scores, requests, strict=True):
        want = drawn(served.old, PROMPT, request.tokens, **how)
        np.testing.assert_allclose(score.logprobs, want, atol=1e-3)
        assert score.topk_ids.shape == (len(request.tokens), TOP_K)
        assert score.policy_version == version
    if how["top_p"] < 1:
        assert np.isneginf(scores[-1].logprobs).any()


def test_weights_change_under_running_requests(served: Served) -> None:
    """Every token lies in the segment of the weights that drew it, and none in between."""
    engine = served.engine
    before = served.install(served.old)

    async def swap() -> list[list[TokenChunk]]:
        first, installed = asyncio.Event(), asyncio.Event()

        async def one_after_the_other(row: int) -> list[list[TokenChunk]]:
            """Responses without a break, however long the installation takes."""
            responses: list[list[TokenChunk]] = []
            while not installed.is_set() or len(responses) < 2:
                request = ask(
                    f"swap{row}.{len(responses)}", cache_key=f"swap{row % 4}", max_tokens=TOKENS
                )
                responses.append([])
                async for chunk in engine.generate(request):
                    responses[-1].append(chunk)
                    first.set()
            return responses[-2:]

        tasks = [asyncio.create_task(one_after_the_other(row)) for row in range(SLOTS)]
        await first.wait()
        await give_weights(engine, served.new.state_dict().items(), before + 1)
        installed.set()
        return list(itertools.chain(*await asyncio.gather(*tasks)))

    crossed = 0
    for chunks in served.call(swap()):
        tokens, got = tokens_of(chunks), logprobs_of(chunks)
        versions = np.repeat([c.policy_version for c in chunks], [len(c.tokens) for c in chunks])
        assert len(tokens) == TOKENS
        assert (np.diff(versions) >= 0).all()
        swapped = int((versions == before).sum())
        if swapped in (0, TOKENS):
            want = drawn(served.old if swapped else served.new, PROMPT, tokens)
        else:
            crossed += 1
            want = drawn_across(served.old, served.new, PROMPT, tokens, swapped)
        np.testing.assert_allclose(got, want, atol=1e-3)
    assert crossed >= SLOTS // 2
    assert engine.stats().policy_version == before + 1


def test_prefix_kv_of_older_weights_is_not_used(served: Served) -> None:
    prompt = np.random.default_rng(5).integers(0, VOCAB, 300).astype(np.int32)
    for model in (served.old, served.new, served.old):
        served.install(model)
        for _ in range(2):
            chunks = served.call(collect(served.engine, ask(prompt_tokens=prompt, max_tokens=20)))
            want = drawn(model, prompt, tokens_of(chunks))
            np.testing.assert_allclose(logprobs_of(chunks), want, atol=1e-3)


def test_a_response_resumes_from_its_prefix(served: Served) -> None:
    """The prefix counts for max_tokens; an old continuation is drafted from; seeds differ."""
    served.install(served.old)
    full = served.call(collect(served.engine, ask(max_tokens=40, temperature=0.05, seed=7)))
    tokens = tokens_of(full)
    before = served.engine.stats()
    request = ask(
        max_tokens=40, temperature=0.05, seed=7,
        prefix_tokens=tokens[:10], draft_tokens=tokens[10:], cache_key="resumed",
    )  # fmt: skip
    rest = served.call(collect(served.engine, request))
    after = served.engine.stats()
    assert len(tokens_of(rest)) == 30
    assert rest[-1].finish_reason == "length"
    assert after.tokens.accepted > before.tokens.accepted
    assert after.steps - before.steps < 30
    want = drawn(
        served.old, np.concatenate([PROMPT, tokens[:10]]), tokens_of(rest), temperature=0.05
    )
    np.testing.assert_allclose(logprobs_of(rest), want, atol=1e-3)


def test_seeds_name_random_streams(served: Served) -> None:
    a, b, c = served.call(
        collect_all(served.engine, [ask(f"seed{i}", max_tokens=30, seed=s) for i, s in
                                    enumerate((11, 11, 12))])
    )  # fmt: skip
    np.testing.assert_array_equal(tokens_of(a), tokens_of(b))
    assert tokens_of(a).tolist() != tokens_of(c).tolist()


def test_a_stop_token_ends_a_response(served: Served) -> None:
    requests = [
        ask(f"stop{i}", cache_key="stop", max_tokens=200, stop_tokens=(4, 5)) for i in range(60)
    ]
    for chunks in served.call(collect_all(served.engine, requests)):
        tokens = tokens_of(chunks)
        assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        if chunks[-1].finish_reason == "stop":
            assert tokens[-1] in (4, 5)
            tokens = tokens[:-1]
        assert not np.isin(tokens, (4, 5)).any()


def test_closing_the_iterator_frees_the_slot(served: Served) -> None:
    engine = served.engine

    async def some() -> int:
        responses = [engine.generate(ask(f"long{i}", max_tokens=TOKENS)) for i in range(SLOTS)]
        await asyncio.gather(*(anext(response) for response in responses))
        running = engine.stats().running
        for response in responses:
            await response.aclose()
        assert engine.stats().running == 0
        return running

    async def all_at_once() -> None:
        while await some() < SLOTS:  # on a busy machine one may end before all have begun
            pass

    served.call(all_at_once())
    served.call(collect(engine, ask()))
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.kv_used) == (0, 0, 0.0)


def test_pause_holds_and_resume_continues(served: Served) -> None:
    engine = served.engine

    async def held() -> tuple[int, int, list[TokenChunk]]:
        chunks: list[TokenChunk] = []

        async def read() -> None:
            async for chunk in engine.generate(ask(max_tokens=390)):
                chunks.append(chunk)  # noqa: PERF401  (watched while it grows)

        reader = asyncio.create_task(read())
        while not chunks:
            await asyncio.wait([reader], timeout=0.01)
        await engine.pause()
        await engine.pause()
        await asyncio.wait([reader], timeout=0.05)
        first = sum(len(chunk.tokens) for chunk in chunks)
        version = engine.stats().policy_version + 1
        with pytest.raises(EngineError, match="paused"):
            await engine.score(
                [ScoreRequest("s", PROMPT, PROMPT, SamplingParams(1, top_k_logprobs=TOP_K))]
            )
        await give_weights(engine, served.new.state_dict().items(), version)
        await asyncio.wait([reader], timeout=0.05)
        second = sum(len(chunk.tokens) for chunk in chunks)
        await engine.resume()
        await engine.resume()
        await reader
        return first, second, chunks

    for _ in range(5):  # on a busy machine a response may end before it is paused
        first, second, chunks = served.call(held())
        if first < 390:
            break
    assert first == second < 390
    assert len(tokens_of(chunks)) == 390


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": 0.001}, "at least 0.01 on (vLLM|SGLang)"),
        ({"max_tokens": 400}, "max_model_len"),
        ({"prompt_tokens": np.array([VOCAB], np.int32)}, "vocabulary"),
        ({"top_k_logprobs": 4}, "top_k_logprobs"),
        ({"prefix_tokens": np.array([1, 2, 3, 4], np.int32)}, "prefix"),
    ],
)
def test_impossible_requests_are_refused(
    served: Served, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        served.call(collect(served.engine, ask("bad", **changes)))


def test_staged_weights_change_nothing_until_they_are_installed(
    served: Served, tmp_path: Path
) -> None:
    engine, version = served.engine, served.install(served.old)

    def generates_by(model: Any, version: int) -> None:
        chunks = served.call(collect(engine, ask(max_tokens=30)))
        assert {chunk.policy_version for chunk in chunks} == {version}
        want = drawn(model, PROMPT, tokens_of(chunks))
        np.testing.assert_allclose(logprobs_of(chunks), want, atol=1e-3)

    with WeightPublisher(tmp_path, "run") as publisher:
        first = publisher.publish(served.new.state_dict().items(), version + 1)
        served.call(engine.stage_weights(first))
        generates_by(served.old, version)
        served.call(engine.install_weights(version + 1))
        generates_by(served.new, version + 1)
        # Staging memory is used again: the installed weights must not lie in it.
        for later in (version + 2, version + 3):
            second = publisher.publish(served.old.state_dict().items(), later)
            served.call(engine.stage_weights(second))
        generates_by(served.new, version + 1)
        with pytest.raises(WeightsSupersededError, match=f"holds version {version + 3}"):
            served.call(engine.stage_weights(first))
    with pytest.raises(WeightsError, match="no version is staged"):
        served.call(engine.install_weights(version + 3))
    generates_by(served.new, version + 1)


def test_unfitting_weights_change_nothing(served: Served) -> None:
    engine, version = served.engine, served.install(served.old)
    good = served.new.state_dict()
    name = "model.layers.0.mlp.up_proj.weight"
    refused: list[tuple[dict[str, torch.Tensor], str]] = [
        ({k: v for k, v in good.items() if k != name}, f"missing weights: {name}"),
        (good | {name: good[name][:-1]}, "wrong shape"),
        (good | {"extra": good[name]}, "unexpected weights"),
        (good | {name: torch.full_like(good[name], torch.nan)}, "not finite"),
    ]
    for weights, message in refused:
        with pytest.raises(WeightsError, match=message):
            served.call(give_weights(engine, weights.items(), version + 1))
    assert engine.stats().policy_version == version
    chunks = served.call(collect(engine, ask(max_tokens=20)))
    assert chunks[-1].policy_version == version
    want = drawn(served.old, PROMPT, tokens_of(chunks))
    np.testing.assert_allclose(logprobs_of(chunks), want, atol=1e-3)
