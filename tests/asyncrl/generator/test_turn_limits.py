"""A run or an environment may limit turns; a turn ends at its limit, and not the sample."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest

from asyncrl.engine.protocol import SamplingParams
from asyncrl.environments.protocol import BadAnswerError, Traits, max_turn_tokens_of
from asyncrl.generator.sample_state import SampleGeneration
from asyncrl.generator.turns.conversation import Episode
from asyncrl.rollout.trajectory import SampleId
from asyncrl.wire.messages.data import encode_tokens
from asyncrl.wire.messages.to_generator import PromptPayload

SAMPLING = SamplingParams(max_tokens=20)


def generation_of(limit: int | None, of_run: int | None = None) -> SampleGeneration:
    prompt = PromptPayload("p", encode_tokens(np.array([1, 2], np.int32)), {})
    generation = SampleGeneration(SampleId(0, 0), prompt, 7)
    session: Any = types.SimpleNamespace(max_turn_tokens=limit)
    generation.episode = Episode(3, turn_limit=of_run, session=session)
    return generation


def draw(generation: SampleGeneration, count: int) -> None:
    generation.builder.append(
        tokens=np.full(count, 5, np.int32),
        logprobs=np.zeros(count, np.float32),
        topk_ids=np.full((count, 1), 5, np.int32),
        topk_logprobs=np.zeros((count, 1), np.float32),
        noise_seeds=np.zeros(count, np.uint64),
        provenance=np.zeros(count, np.uint8),
        policy_version=0,
    )


def last_token(generation: SampleGeneration) -> int:
    """Length of the response at which the next request ends."""
    request = generation.next_request(SAMPLING)
    return request.sampling.last_token(request.turn_start)


@pytest.mark.parametrize(("of_environment", "of_run"), [(6, None), (6, 9), (None, 6)])
def test_a_limit_counts_from_the_beginning_of_the_turn(
    of_environment: int | None, of_run: int | None
) -> None:
    generation = generation_of(of_environment, of_run)
    assert last_token(generation) == 6
    draw(generation, 2)  # interrupted: the rest of the turn has four tokens
    assert last_token(generation) == 6
    draw(generation, 4)
    assert generation.turn_has_ended("length", SAMPLING.max_tokens)
    generation.builder.append_observed(np.array([8, 8, 8], np.int32))
    assert last_token(generation) == 15
    draw(generation, 6)
    generation.builder.append_observed(np.array([8], np.int32))
    # The last turn is cut by the limit of all turns, which ends the sample.
    assert last_token(generation) == 20
    draw(generation, 4)
    assert not generation.turn_has_ended("length", SAMPLING.max_tokens)


def test_without_a_limit_only_a_stop_ends_a_turn() -> None:
    generation = generation_of(None)
    assert last_token(generation) == 20
    draw(generation, 20)
    assert generation.turn_has_ended("stop", 20)
    assert not generation.turn_has_ended("length", 20)
    assert not generation.turn_has_ended(None, 20)


def test_only_environments_that_cannot_go_back_may_limit_turns() -> None:
    environment = types.SimpleNamespace(max_turn_tokens=4)
    assert max_turn_tokens_of(environment, Traits()) == 4
    assert max_turn_tokens_of(object(), Traits()) is None
    with pytest.raises(BadAnswerError, match="only an environment without"):
        max_turn_tokens_of(environment, Traits(replay="deterministic"))
    with pytest.raises(BadAnswerError, match="from 1"):
        max_turn_tokens_of(types.SimpleNamespace(max_turn_tokens=0), Traits())
