"""Samples whose history is rewritten: each context is a request of its own, and is verified so."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from chat_models import chat_tokenizer, stop_ids
from generator_harness import PROMPT, SAMPLE

from asyncrl.engine.protocol import SamplingParams
from asyncrl.environments.protocol import Action, StepResult, Traits
from asyncrl.environments.rendering import TurnRenderer
from asyncrl.environments.translation import Translation
from asyncrl.generator.sample_state import SampleGeneration
from asyncrl.generator.turns.environment_turns import Episodes
from asyncrl.rollout.contexts import contexts_of
from asyncrl.rollout.trajectory import KeptTokens, Provenance

SAMPLING = SamplingParams(max_tokens=20)


def append(
    generation: SampleGeneration, tokens: list[int], version: int, kinds: list[Provenance]
) -> None:
    n = len(tokens)
    generation.builder.append(
        tokens=np.array(tokens, np.int32),
        logprobs=np.full(n, -1.5, np.float32),
        topk_ids=np.zeros((n, 1), np.int32),
        topk_logprobs=np.zeros((n, 1), np.float32),
        noise_seeds=np.zeros(n, np.uint64),
        provenance=np.array(kinds, np.uint8),
        policy_version=version,
    )


def draw(generation: SampleGeneration, *tokens: int, version: int = 1) -> None:
    append(generation, [*tokens], version, [Provenance.SAMPLED] * len(tokens))


def accept(generation: SampleGeneration, kept: KeptTokens, count: int, *drawn: int) -> None:
    kinds = np.where(kept.observed[:count], Provenance.OBSERVED, Provenance.VERIFIED).tolist()
    tokens = [*kept.tokens[:count].tolist(), *drawn]
    append(generation, tokens, 2, [*kinds, *[Provenance.SAMPLED] * len(drawn)])


def two_contexts() -> SampleGeneration:
    generation = SampleGeneration(SAMPLE, PROMPT, 7)
    draw(generation, 3, 4)
    generation.builder.append_observed(np.array([20], np.int32))
    draw(generation, 5)
    generation.builder.begin_context(np.array([30, 31, 32, 33], np.int32))
    return generation


def test_a_context_is_a_request_with_its_own_prompt_in_the_same_room() -> None:
    generation = two_contexts()
    first = len(generation.builder.prompt_tokens)
    request = generation.next_request(SAMPLING)
    assert request.prompt_tokens.tolist() == [30, 31, 32, 33]
    assert len(request.prefix_tokens) == 0
    assert request.turn_start == 0
    assert len(request.prompt_tokens) + request.sampling.max_tokens == first + 20
    seed = request.sampling.seed
    assert seed != SampleGeneration(SAMPLE, PROMPT, 7).next_request(SAMPLING).sampling.seed == 7
    draw(generation, 6)
    request = generation.next_request(SAMPLING)
    assert request.sampling.seed == seed, "one stream of random numbers for each context"
    assert request.prefix_tokens.tolist() == [6]
    assert (request.turn_start, generation.builder.used_tokens) == (0, 4 - first + 1)
    generation.builder.append_observed(np.array([21], np.int32))
    assert generation.next_request(SAMPLING).turn_start == 2


def test_each_context_has_random_numbers_of_its_own() -> None:
    """They belong to a seed and a place, and places count from the beginning of the context."""
    seeds = []
    for seed in (7, 9):
        generation = two_contexts()
        generation.seed = seed
        draw(generation, 6, 7)
        seeds.append(generation.next_request(SAMPLING).sampling.seed)
        draw(generation, 8)
        seeds.append(generation.next_request(SAMPLING).sampling.seed)
        generation.builder.begin_context(np.array([40], np.int32))
        seeds.append(generation.next_request(SAMPLING).sampling.seed)
    second, again, third, *others = seeds
    assert second == again
    assert len({7, 9, second, third, *others}) == 6
    generation = two_contexts()
    draw(generation, 6)
    generation.request_verification(9, 2)
    generation.begin_pending_verification()
    request = generation.next_request(SAMPLING)
    assert request.sampling.seed == 9
    accept(generation, request.kept, 4)  # type: ignore[arg-type]
    generation.end_attempt("stop")
    assert generation.next_request(SAMPLING).sampling.seed == others[0]


def test_verification_takes_one_context_after_another() -> None:
    generation = two_contexts()
    draw(generation, 6, 7)
    before = generation.builder.tokens().tolist()
    assert generation.request_verification(9, 2)
    generation.begin_pending_verification()
    for tokens, count in (([3, 4, 20, 5], 3), ([6, 7], 2)):
        assert generation.awaits_verification
        request = generation.next_request(SAMPLING)
        assert request.kept is not None
        assert request.kept.tokens.tolist() == tokens
        accept(generation, request.kept, len(tokens))
        counts = generation.verification_counts()
        assert (counts.verified, counts.rejected) == (count, 0)
        ended = generation.end_attempt("stop")
    assert ended == "stop"
    assert generation.builder.tokens().tolist() == before
    trajectory = generation.builder.finish("stop")
    assert trajectory.contexts == (4,)
    assert trajectory.oldest_version == 2
    assert [c.response.tolist() for c in contexts_of(trajectory)] == [[3, 4, 20, 5], [6, 7]]


def test_a_rejection_drops_later_contexts() -> None:
    generation = two_contexts()
    draw(generation, 6, 7)
    generation.request_verification(9, 2)
    generation.begin_pending_verification()
    request = generation.next_request(SAMPLING)
    assert request.kept is not None
    accept(generation, request.kept, 3, 8)
    counts = generation.verification_counts()
    assert (counts.verified, counts.rejected) == (2, 3), "and the two of the next context"
    assert generation.end_attempt("stop") == "stop", "the environment answers"
    assert not generation.awaits_verification
    assert generation.builder.contexts == ()


def test_newer_weights_between_two_contexts_lose_none_of_them() -> None:
    generation = two_contexts()
    draw(generation, 6, 7)
    generation.request_verification(9, 2)
    generation.begin_pending_verification()
    request = generation.next_request(SAMPLING)
    assert request.kept is not None
    accept(generation, request.kept, 4)
    assert generation.end_attempt("stop") is None
    unfinished = generation.unfinished()
    assert generation.request_verification(11, 3)
    generation.begin_pending_verification()
    for kept in (unfinished, generation.tokens_to_verify):
        assert kept is not None
        assert kept.tokens.tolist() == [3, 4, 20, 5, 30, 31, 32, 33, 6, 7]
        assert kept.contexts == (4,)


class Pool:
    """Of one environment, which always answers alike."""

    config = SimpleNamespace(max_turns=3, max_turn_tokens=None)
    rewards = SimpleNamespace(on_error="zero", max_attempts=1)

    async def open(self, *_: Any, **__: Any) -> Any:
        return self

    first, lost, name, traits = "what is 1 + 1?", False, "fake", Traits(replay="deterministic")
    process_end = None

    async def step(self, action: Action, *, alone: bool) -> StepResult:
        del action, alone
        return StepResult("hello there\n")

    def close(self) -> None:
        pass


@pytest.mark.parametrize("history", ["keep", "template"])
def test_a_template_that_rewrites_history_begins_a_context(history: Any) -> None:
    tokenizer = chat_tokenizer("qwen3")
    renderer = TurnRenderer(tokenizer, stop_tokens=stop_ids("qwen3"), history=history)
    translation = Translation(
        renderer, tokenizer.decode, len(tokenizer), max_observation_tokens=500
    )
    pool: Any = Pool()
    episodes = Episodes(pool, translation, max_tokens=400, max_model_len=2000)
    generation = SampleGeneration(SAMPLE, PROMPT, 7)
    generation.episode = episodes.new(generation)

    async def play() -> None:
        await episodes.begin(generation)
        generation.clear_tokens()
        turn = "<think>\nhello\n</think>\n\nthere<|im_end|>"
        draw(generation, *tokenizer(turn, add_special_tokens=False)["input_ids"])
        assert await episodes.answer(generation) is None

    asyncio.run(play())
    builder = generation.builder
    seen = [*builder.context_prompt, *builder.tokens()[builder.context_start :]]
    text = tokenizer.decode(seen)
    assert ("</think>" in text.split("<|im_end|>")[1]) == (history == "keep")
    assert text.endswith("hello there\n<|im_end|>\n<|im_start|>assistant\n")
    assert bool(builder.contexts) == (history == "template")
