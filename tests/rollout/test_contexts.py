"""A sample of several contexts: how it grows, what is trained on, and how it is verified."""

from __future__ import annotations

import numpy as np
import pytest

from asyncrl.rollout.contexts import Verification, contexts_of, joined, longest_response
from asyncrl.rollout.trajectory import KeptTokens, Provenance, SampleId, TrajectoryBuilder


def builder() -> TrajectoryBuilder:
    return TrajectoryBuilder(SampleId(2, 1), "p", np.array([1, 2], np.int32))


def draw(
    into: TrajectoryBuilder, *tokens: int, kind: Provenance = Provenance.SAMPLED, width: int = 2
) -> None:
    n = len(tokens)
    into.append(
        tokens=np.array(tokens, np.int32),
        logprobs=np.full(n, -0.5, np.float32),
        topk_ids=np.zeros((n, width), np.int32),
        topk_logprobs=np.full((n, width), -0.5, np.float32),
        noise_seeds=np.full(n, 17, np.uint64),
        provenance=np.full(n, kind, np.uint8),
        policy_version=4,
    )


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def grown() -> TrajectoryBuilder:
    """Two turns; a context with a turn; another context."""
    growing = builder()
    draw(growing, 10, 11)
    growing.append_observed(ids(20, 21))
    draw(growing, 12)
    growing.begin_context(ids(30, 31, 32))
    assert growing.context_prompt.tolist() == [30, 31, 32]
    assert growing.turn_start == growing.context_start == 8
    draw(growing, 13, 14)
    growing.begin_context(ids(40))
    draw(growing, 15)
    return growing


def test_each_context_has_its_prompt_and_each_drawn_token_is_in_one() -> None:
    trajectory = grown().finish("stop")
    assert trajectory.contexts == (5, 10)
    found = [(c.prompt.tolist(), c.response.tolist(), c.start) for c in contexts_of(trajectory)]
    assert found == [
        ([1, 2], [10, 11, 20, 21, 12], 0),
        ([30, 31, 32], [13, 14], 8),
        ([40], [15], 11),
    ]
    drawn = np.concatenate([c.response[c.trained] for c in contexts_of(trajectory)])
    assert drawn.tolist() == trajectory.tokens[trajectory.trained].tolist()
    assert longest_response(trajectory) == 5
    assert trajectory.kept().contexts == trajectory.contexts


def test_a_context_begins_after_a_token_and_with_a_prompt() -> None:
    growing = builder()
    assert growing.context_prompt.tolist() == [1, 2]
    with pytest.raises(ValueError, match=r"trajectory 2\.1: observed tokens follow no turn"):
        growing.begin_context(ids(3))
    draw(growing, 10)
    with pytest.raises(ValueError, match=r"trajectory 2\.1: a context .* an empty prompt"):
        growing.begin_context(ids())
    assert growing.contexts == ()


def test_contexts_are_verified_one_after_another() -> None:
    kept, again = grown().kept(), builder()
    verification = Verification(kept, again)
    submitted = []
    for _ in range(4):
        part = verification.to_verify_now()
        if part is None:
            break
        assert not part.contexts, "an engine knows of no contexts"
        submitted.append((again.context_prompt.tolist(), part.tokens.tolist()))
        for token, observed in zip(part.tokens, part.observed, strict=True):
            if observed:
                again.append_observed(ids(token))
            else:
                draw(again, int(token), kind=Provenance.VERIFIED)
        assert verification.to_verify_now() is None
        if not verification.begin_next():
            break
    assert submitted == [
        ([1, 2], [10, 11, 20, 21, 12]),
        ([30, 31, 32], [13, 14]),
        ([40], [15]),
    ]
    assert again.tokens().tolist() == kept.tokens.tolist()
    assert again.contexts == kept.contexts


@pytest.mark.parametrize("drawn", [(10, 19), (10, 11, 19, 18, 17), (19,)])
def test_after_a_rejection_no_later_context_stands(drawn: tuple[int, ...]) -> None:
    """Also where as many tokens were drawn as there were."""
    again = builder()
    verification = Verification(grown().kept(), again)
    draw(again, *drawn[:-1], kind=Provenance.VERIFIED)
    draw(again, drawn[-1])
    assert not verification.begin_next()
    assert verification.to_verify_now() is None
    assert verification.unjudged() is None
    assert verification.draft().tolist() == [10, 11, 20, 21, 12][len(drawn) :]
    again.begin_context(ids(50))
    assert verification.to_verify_now() is None, "it is another conversation"


def test_what_was_observed_at_a_contexts_end_is_kept_and_is_no_turn() -> None:
    growing = builder()
    draw(growing, 10)
    growing.append_observed(ids(20))
    growing.begin_context(ids(30))
    again = builder()
    verification = Verification(growing.kept(), again)
    part = verification.to_verify_now()
    assert part is not None
    assert part.tokens.tolist() == [10], "the engine would begin a turn after [10, 20]"
    draw(again, 10, kind=Provenance.VERIFIED)
    assert verification.begin_next()
    assert again.tokens().tolist() == [10, 20, 30]
    assert verification.to_verify_now() is None, "nothing was drawn in it"


def test_contexts_that_were_not_submitted_are_kept_for_another_verification() -> None:
    kept, again = grown().kept(), builder()
    verification = Verification(kept, again)
    assert verification.unjudged() is None, "all of it is in tokens to verify"
    draw(again, 10, 11, kind=Provenance.VERIFIED, width=3)
    again.append_observed(ids(20, 21))
    draw(again, 12, kind=Provenance.VERIFIED, width=3)
    assert verification.begin_next()
    rest = verification.unjudged()
    assert rest is not None
    both = joined(again.kept(), rest)
    for name in ("tokens", "logprobs", "noise_seeds", "observed"):
        assert getattr(both, name).tolist() == getattr(kept, name).tolist(), name
    assert both.contexts == kept.contexts
    assert both.topk_ids.shape == (12, 3)
    assert both.topk_ids[-1].tolist() == [0, 0, -1]
    assert both.topk_logprobs[-1].tolist() == [-0.5, -0.5, -np.inf]


def test_a_sample_of_one_context_is_verified_as_it_was() -> None:
    growing = builder()
    draw(growing, 10, 11)
    kept: KeptTokens = growing.kept()
    again = builder()
    verification = Verification(kept, again)
    assert verification.to_verify_now() is kept
    draw(again, 10, kind=Provenance.VERIFIED)
    draw(again, 12)
    assert not verification.begin_next()
    assert verification.draft().tolist() == []
