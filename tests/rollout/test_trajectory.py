"""Trajectories: segments, staleness, and what a builder refuses."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from asyncrl.rollout.trajectory import Provenance, SampleId, Segment, TrajectoryBuilder


def builder() -> TrajectoryBuilder:
    return TrajectoryBuilder(SampleId(group=2, sample=1), "p", np.array([5, 6], np.int32))


def chunk(tokens: list[int], policy_version: int, **changes: Any) -> dict[str, Any]:
    n = len(tokens)
    arrays = {
        "tokens": np.array(tokens, np.int32),
        "logprobs": np.full(n, -0.5, np.float32),
        "topk_ids": np.array([[token, -1] for token in tokens], np.int32).reshape(n, 2),
        "topk_logprobs": np.full((n, 2), -0.5, np.float32),
        "noise_seeds": np.full(n, 17, np.uint64),
        "provenance": np.full(n, Provenance.SAMPLED, np.uint8),
    }
    return arrays | {"policy_version": policy_version} | changes


def test_chunks_of_one_version_form_one_segment() -> None:
    growing = builder()
    for tokens, version in (([1, 2], 3), ([], 9), ([3], 3), ([4], 5)):
        growing.append(**chunk(tokens, version))
    assert len(growing) == 4
    assert growing.oldest_version == 3
    trajectory = growing.finish("stop")
    assert trajectory.segments == (Segment(3, 0, 3), Segment(5, 3, 4))
    assert trajectory.tokens.tolist() == [1, 2, 3, 4]
    assert trajectory.versions().tolist() == [3, 3, 3, 5]
    assert trajectory.staleness(trained_by=6).tolist() == [3, 3, 3, 1]
    assert trajectory.oldest_version == 3


def test_a_finished_trajectory_is_read_only() -> None:
    growing = builder()
    growing.append(**chunk([1, 2], 0))
    trajectory = growing.finish("length")
    with pytest.raises(ValueError, match="read-only"):
        trajectory.tokens[0] = 7


def test_kept_tokens_are_those_appended_so_far() -> None:
    growing = builder()
    growing.append(**chunk([1, 2], 0))
    growing.append(**chunk([3], 1, provenance=np.array([Provenance.DRAFTED], np.uint8)))
    kept = growing.kept()
    assert len(kept) == 3
    assert kept.tokens.tolist() == growing.tokens().tolist() == [1, 2, 3]
    assert kept.topk_ids.tolist() == [[1, -1], [2, -1], [3, -1]]
    assert kept.noise_seeds.tolist() == [17] * 3
    assert kept.lenience is None
    assert growing.count(Provenance.DRAFTED) == 1
    assert growing.count(Provenance.VERIFIED) == 0


def test_impossible_chunks_are_refused() -> None:
    growing = builder()
    with pytest.raises(ValueError, match=r"trajectory 2\.1: finished without any token"):
        growing.finish("stop")
    growing.append(**chunk([1], 4))
    with pytest.raises(ValueError, match=r"trajectory 2\.1: .* version 3 follows .* 4"):
        growing.append(**chunk([2], 3))
    with pytest.raises(ValueError, match=r"trajectory 2\.1: the arrays of a chunk differ"):
        growing.append(**chunk([2], 4, logprobs=np.zeros(2, np.float32)))
    assert len(growing) == 1


def test_the_end_of_kept_tokens_has_the_end_of_every_array() -> None:
    growing = builder()
    growing.append(**chunk([1, 2, 3], 0))
    kept = growing.kept()
    rest = kept.after(1)
    for field in fields(kept):
        if field.name not in ("lenience", "contexts"):
            assert getattr(rest, field.name).tolist() == getattr(kept, field.name)[1:].tolist()
    assert len(kept.after(len(kept))) == 0


def test_observed_tokens_separate_turns_and_are_not_trained_on() -> None:
    growing = builder()
    with pytest.raises(ValueError, match=r"trajectory 2\.1: observed tokens follow no turn"):
        growing.append_observed(np.array([9], np.int32))
    growing.append(**chunk([1, 2], 3))
    growing.append_observed(np.array([8, 9], np.int32))
    assert growing.turn_start == 4
    growing.append(**chunk([3], 5))
    growing.append_observed(np.empty(0, np.int32))
    assert growing.turn_start == 4
    trajectory = growing.finish("stop")
    assert trajectory.tokens.tolist() == [1, 2, 8, 9, 3]
    assert trajectory.trained.tolist() == [True, True, False, False, True]
    assert trajectory.segments == (Segment(3, 0, 4), Segment(5, 4, 5))
    assert trajectory.behaviour_logprobs.tolist() == [-0.5, -0.5, 0.0, 0.0, -0.5]
    assert trajectory.topk_ids[2:4].tolist() == [[8, -1], [9, -1]]
    assert np.exp(trajectory.topk_logprobs[2:4]).sum(axis=1).tolist() == [1.0, 1.0]
    assert trajectory.kept().observed.tolist() == [False, False, True, True, False]
    assert growing.observed().tolist() == trajectory.kept().observed.tolist()
    assert trajectory.kept().after(3).observed.tolist() == [True, False]


def test_accepted_observed_tokens_tell_where_the_turn_begins() -> None:
    growing = builder()
    provenance = np.array([Provenance.VERIFIED, Provenance.OBSERVED, Provenance.SAMPLED], np.uint8)
    growing.append(**chunk([1, 8, 2], 3, provenance=provenance))
    assert growing.turn_start == 2
    assert not growing.kept().observed[0]
