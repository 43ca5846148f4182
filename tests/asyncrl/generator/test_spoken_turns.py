"""A growing response is split into turns once, and turns that are known are not looked into."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from asyncrl.generator.turns import conversation
from asyncrl.generator.turns.conversation import Episode, Spoken, Turn, actions_of, common
from asyncrl.rollout.trajectory import IntArray, SampleId, TrajectoryBuilder


def draw(builder: TrajectoryBuilder, tokens: IntArray) -> None:
    n = len(tokens)
    builder.append(
        tokens=tokens,
        logprobs=np.zeros(n, np.float32),
        topk_ids=np.zeros((n, 1), np.int32),
        topk_logprobs=np.zeros((n, 1), np.float32),
        noise_seeds=np.zeros(n, np.uint64),
        provenance=np.zeros(n, np.uint8),
        policy_version=0,
    )


def lists(arrays: list[IntArray]) -> list[list[int]]:
    return [one.tolist() for one in arrays]


@pytest.mark.parametrize("seed", range(20))
def test_what_is_read_piece_by_piece_is_what_is_read_at_once(seed: int) -> None:
    """Also where several turns come at once, and where a turn or an answer goes on after it."""
    rng = np.random.default_rng(seed)
    builder = TrajectoryBuilder(SampleId(0, 0), "", np.zeros(1, np.int32))
    spoken = Spoken(builder)
    draw(builder, np.array([1], np.int32))
    for _ in range(40):
        for _ in range(int(rng.integers(0, 4))):
            size = int(rng.integers(1, 4))
            if rng.random() < 0.5:
                draw(builder, rng.integers(0, 9, size).astype(np.int32))
            else:
                builder.append_observed(rng.integers(0, 9, size).astype(np.int32))
        spoken.read()
        actions, observations = actions_of(builder.tokens(), builder.observed())
        assert lists(spoken.actions) == lists(actions)
        assert lists(spoken.observations) == lists(observations)
        assert all(one.base is None for one in spoken.actions + spoken.observations)


def test_turns_that_are_known_are_not_compared_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a verification, whose tokens are other arrays."""
    compared = 0

    def counted(*arrays: Any) -> bool:
        nonlocal compared
        compared += 1
        return bool(array_equal(*arrays))

    array_equal = np.array_equal
    monkeypatch.setattr(conversation.np, "array_equal", counted)
    episode = Episode(0)
    for length in (10, 25):
        builder = TrajectoryBuilder(SampleId(0, 0), "", np.zeros(1, np.int32))
        spoken = Spoken(builder)
        for turn in range(length):
            draw(builder, np.array([turn, 1], np.int32))
            if turn < len(episode.turns):  # verified: read together with what follows
                builder.append_observed(np.array([7], np.int32))
                continue
            spoken.read()
            assert episode.keep_answered(spoken.actions) == turn
            assert common(episode.given, spoken.actions) == turn
            action = spoken.actions[turn]
            episode.given.append(action)
            episode.turns.append(Turn(action, {}, False, 0.0, np.array([7], np.int32)))
            builder.append_observed(np.array([7], np.int32))
        assert compared == (0 if length == 10 else 10), "once each, when the tokens were verified"
