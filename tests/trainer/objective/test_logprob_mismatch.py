"""What rounding cannot explain: limits, the slope that is a temperature, sums by trajectory."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from asyncrl.rollout.trajectory import Provenance, SampleId, Trajectory, TrajectoryBuilder
from asyncrl.trainer.objective.logprob_mismatch import (
    FLOAT32_CPU,
    MIN_TOKENS,
    TENSOR_CORES,
    Disagreement,
    Limits,
    disagreement_of,
)


def trajectory(logprobs: np.ndarray) -> Trajectory:
    n = len(logprobs)
    builder = TrajectoryBuilder(SampleId(0, 0), "p", np.array([1], np.int32))
    builder.append(
        tokens=np.zeros(n, np.int32),
        logprobs=logprobs.astype(np.float32),
        topk_ids=np.zeros((n, 0), np.int32),
        topk_logprobs=np.zeros((n, 0), np.float32),
        provenance=np.full(n, Provenance.SAMPLED, np.uint8),
        noise_seeds=np.zeros(n, np.uint64),
        policy_version=0,
    )
    return builder.finish("length")


def drawn(
    engine_temperature: float, tokens: int, noise: float, *, vocabulary: int = 50, seed: int = 0
) -> Disagreement:
    """Tokens of random distributions, drawn at this temperature; the trainer's is 1."""
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(0, 2, (tokens, vocabulary)))
    engine = (logits / engine_temperature).log_softmax(-1)
    chosen = torch.multinomial(engine.exp(), 1, generator=torch.Generator().manual_seed(seed))
    recorded = engine.gather(1, chosen)[:, 0].numpy() + rng.normal(0, noise, tokens)
    ours = logits.log_softmax(-1)
    entropy = torch.special.entr(ours.exp()).sum(-1)
    rows = disagreement_of(
        ours.gather(1, chosen)[:, 0], entropy, [trajectory(recorded)], np.ones(1, bool)
    )
    return Disagreement.total(rows)


def test_sums_are_by_trajectory_and_only_of_those_that_count() -> None:
    samples = [trajectory(np.full(n, -1.0)) for n in (2, 1, 3)]
    logprobs = torch.tensor([-1.5, -1.0, -2.0, -1.0, -1.0, -9.0])
    entropy = torch.full((6,), 2.0)
    rows = disagreement_of(logprobs, entropy, samples, np.array([True, False, True]))
    np.testing.assert_allclose(
        rows,
        [
            # d: -0.5, 0; g: 0.5, 1
            [2, 0.5, 0.25, -0.25, 0.25 + 1, -0.5, 1.5],
            [0, 0, 0, 0, 0, 0, 0],
            # d: 0, 0, -1 in place of -8; g: 1, 1, -7
            [3, 1.0, 1.0, 7.0, 2 + 49, 1.0, 9.0],
        ],
        atol=1e-6,
    )


@pytest.mark.parametrize("temperature", [0.8, 0.97, 1.03, 1.25])
def test_the_slope_is_the_logarithm_of_the_temperature(temperature: float) -> None:
    found = drawn(temperature, 4000, 0.01)
    assert found.slope == pytest.approx(math.log(temperature), rel=0.15)
    assert TENSOR_CORES.exceeded_by(found)


@pytest.mark.parametrize(("limits", "noise"), [(FLOAT32_CPU, 3e-4), (TENSOR_CORES, 0.05)])
@pytest.mark.parametrize("tokens", [MIN_TOKENS, 500])
def test_rounding_is_not_mentioned(limits: Limits, noise: float, tokens: int) -> None:
    """Noise far above what healthy engines have, 300 times."""
    for seed in range(300):
        assert not limits.exceeded_by(drawn(1.0, tokens, noise, seed=seed))


def sharp(tokens: int, *, engine_temperature: float = 1.0, seed: int) -> Disagreement:
    """Tokens of a policy that is sure at 19 of 20 positions; the engine rounds to bfloat16.

    Rounding does not show where the policy is sure, so a few tokens have all of d and all of g.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(tokens, 50, generator=generator, dtype=torch.float64)
    logits[torch.rand(tokens, generator=generator) > 0.05, 0] += 20.0
    noise = 0.02 * torch.randn(tokens, 50, generator=generator, dtype=torch.float64)
    engine = ((logits + noise) / engine_temperature).log_softmax(-1)
    chosen = torch.multinomial(engine.exp(), 1, generator=generator)
    ours = logits.log_softmax(-1)
    rows = disagreement_of(
        ours.gather(1, chosen)[:, 0],
        torch.special.entr(ours.exp()).sum(-1),
        [trajectory(engine.gather(1, chosen)[:, 0].numpy())],
        np.ones(1, bool),
    )
    return Disagreement.total(rows)


@pytest.mark.parametrize("tokens", [MIN_TOKENS, 256])
def test_rounding_of_a_few_uncertain_tokens_is_no_temperature(tokens: int) -> None:
    assert not any(TENSOR_CORES.exceeded_by(sharp(tokens, seed=seed)) for seed in range(300))


@pytest.mark.parametrize("temperature", [0.9, 1.1])
def test_a_temperature_shows_when_enough_tokens_are_uncertain(temperature: float) -> None:
    found = sharp(8000, engine_temperature=temperature, seed=1)
    assert found.mean < TENSOR_CORES.mean
    assert TENSOR_CORES.exceeded_by(found)


def test_few_tokens_say_nothing() -> None:
    assert not FLOAT32_CPU.exceeded_by(drawn(2.0, MIN_TOKENS - 1, 0.0))
    assert FLOAT32_CPU.exceeded_by(drawn(2.0, MIN_TOKENS, 0.0))
    assert not FLOAT32_CPU.exceeded_by(Disagreement())
    assert Disagreement().mean == Disagreement().slope == 0.0


def test_a_flat_policy_has_no_slope() -> None:
    """Where every token is as probable as any other, temperature changes nothing."""
    found = Disagreement(tokens=1000, gaps=1e-3)
    assert not FLOAT32_CPU.exceeded_by(found)
    assert found.ratio_beyond(0.0) == 0.0
