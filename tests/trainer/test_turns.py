"""Tokens that no policy has drawn: in no loss, no denominator and no mean, against plain loops."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from plain_policies import Group, make_learner, plain_model
from turns_of import Rows, plain_scores, trained_of, turn_batch

from asyncrl.rollout.contexts import contexts_of, longest_response
from asyncrl.rollout.trajectory import Provenance, Segment
from asyncrl.trainer.algorithms.base import Algorithm, LossSums, StepSums, TokenBatch, finisher
from asyncrl.trainer.algorithms.corrections import make
from asyncrl.trainer.base.algorithm_registry import entry_of, known_algorithms
from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.trainer.base.errors import BatchError
from asyncrl.trainer.learner import Learner, check_trajectory
from asyncrl.trainer.model.packing import PackedBatch
from asyncrl.trainer.optimizer.optimizer import scale_and_clip

ModelPath = Callable[[str], str]
CPU = torch.device("cpu")
CASES: list[tuple[str, dict[str, Any]]] = [
    (name, {"algorithm": name, "loss_normalization": kind})
    for name in known_algorithms()
    if not entry_of(name).critic
    for kind in ("token", "sequence", "sample")
] + [
    (f"{name}", {"algorithm": "grpo", "correction": name})
    for name in ("token_masked", "sequence_masked", "sequence_rejected")
] + [
    (f"KL {name}", {"algorithm": "reinforce", "kl_coefficient": 0.2, "kl_estimator": name})
    for name in ("k1", "k3")
]  # fmt: skip


@pytest.fixture(scope="module")
def turns(model_path: ModelPath) -> tuple[list[Group], Rows]:
    return turn_batch(model_path("qwen3"), branches=True)


@dataclasses.dataclass
class Plain:
    """What the plain loop knows: each sequence scored alone, and its mask applied by hand."""

    model: Any
    other: Any
    """A reference that has a KL from the policy."""
    logprobs: torch.Tensor
    """`[N]` of the generated tokens, with their graph."""
    initial: torch.Tensor
    """`[N]` under the reference."""


@pytest.fixture(scope="module")
def plain(model_path: ModelPath, turns: tuple[list[Group], Rows]) -> Plain:
    batch, rows = turns
    model, other = (plain_model(model_path("qwen3")) for _ in range(2))
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for one in other.parameters():
            one += 0.05 * torch.randn(one.shape, generator=generator, dtype=torch.float64)
    found = [
        torch.cat([plain_scores(one, rows[sample.id]) for group, _ in batch for sample in group])
        for one in (model, other)
    ]
    return Plain(model, other, found[0], found[1].detach())


@pytest.mark.parametrize(
    "settings", [pytest.param(s, id=f"{n} {s.get('loss_normalization', '')}") for n, s in CASES]
)
def test_value_and_gradient_are_those_of_generated_tokens(
    model_path: ModelPath,
    turns: tuple[list[Group], Rows],
    plain: Plain,
    settings: dict[str, Any],
) -> None:
    batch, rows = turns
    learner = make_learner(model_path("qwen3"), **settings)
    if (reference := learner._models.reference) is not None:
        reference.policy.model.load_state_dict(plain.other.state_dict())
    for index in (2, 0, 3, 1):
        learner.add_group(*batch[index])
    got = _gradient(learner)
    loss, want = _expected(plain, settings, batch, rows)
    assert learner._sums.totals.sums.loss == pytest.approx(loss, rel=1e-9, abs=1e-12)
    assert max(float(one.abs().max()) for one in want.values()) > 1e-4
    for name, one in want.items():
        torch.testing.assert_close(got[name], one, atol=1e-10, rtol=1e-8, msg=name)


def _gradient(learner: Learner) -> dict[str, torch.Tensor]:
    denominator = learner._sums.finish(learner.world)
    model = learner.policy.model
    scale_and_clip(model.parameters(), denominator, float("inf"))
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def _expected(
    plain: Plain, settings: dict[str, Any], batch: list[Group], rows: Rows
) -> tuple[float, dict[str, torch.Tensor]]:
    """Sum of the loss, and gradient."""
    config = TrainerConfig.model_validate(settings)
    algorithm = make(config)
    samples = [one for group, _ in batch for one in group]
    counts = np.array(trained_of(batch, rows))
    by_length = config.loss_normalization == "sequence"
    behaviour = [one.behaviour_logprobs[one.provenance == Provenance.SAMPLED] for one in samples]
    advantages = [algorithm.advantages(rewards) for _, rewards in batch]
    tokens = TokenBatch(
        logprobs=plain.logprobs,
        behaviour_logprobs=torch.from_numpy(np.concatenate(behaviour)).double(),
        advantages=torch.from_numpy(np.repeat(np.concatenate(advantages), counts)),
        weights=torch.from_numpy(np.repeat(1 / counts if by_length else np.ones(16), counts)),
        owners=torch.from_numpy(np.repeat(np.arange(16), counts)),
        reference_logprobs=plain.initial if config.kl_coefficient else None,
    )
    loss = _finished(algorithm, algorithm.loss(tokens), counts)
    divisor = counts.sum() if config.loss_normalization == "token" else 16
    plain.model.zero_grad()
    (loss / divisor).backward(retain_graph=True)
    return loss.item(), {n: p.grad for n, p in plain.model.named_parameters() if p.grad is not None}


def _finished(algorithm: Algorithm, sums: LossSums, counts: np.ndarray) -> torch.Tensor:
    """The loss of a whole step."""
    final = finisher(algorithm)
    if final is None:
        return sums.loss
    measured = {name: one.detach().reshape(-1)[0].item() for name, one in sums.sums.items()}
    factors = final.finish(StepSums(4, 0, int(counts.sum()), measured))
    return factors.scale * sums.loss + sum(factors.parts[n] * one for n, one in sums.parts.items())


def test_a_step_counts_generated_tokens(
    model_path: ModelPath, turns: tuple[list[Group], Rows]
) -> None:
    (batch, rows), ages = turns, []
    learner = make_learner(model_path("qwen3"))
    learner.step()
    found = []
    for group, rewards in batch:
        aged = []
        for one in group:
            end = len(one.tokens)
            old = end // 2 if one.id.sample % 2 else 0
            segments = tuple(s for s in (Segment(0, 0, old), Segment(1, old, end)) if s.end)
            aged.append(dataclasses.replace(one, segments=segments))
            ages += (np.arange(end) < old)[one.provenance == Provenance.SAMPLED].tolist()
        found += learner.add_group(aged, rewards)[:, 0].tolist()
    metrics = learner.step()
    counts = trained_of(batch, rows)
    tokens = sum(len(one.tokens) for group, _ in batch for one in group)
    assert found[::2] == counts[::2], "compared with the engine: those of the trainer's version"
    assert found[1::2] == [0] * 8
    assert metrics.staleness.mean == pytest.approx(np.mean(ages))
    assert metrics.batch.tokens == metrics.batch.tokens_computed == sum(counts)
    assert metrics.batch.tokens_observed == tokens - sum(counts) > 0
    assert metrics.batch.response_length_mean == pytest.approx(np.mean(counts))
    assert sum(n * k for n, k in metrics.batch.response_lengths.items()) == sum(counts)
    gap = metrics.mismatch.abs_mean
    assert gap is not None
    assert 0.1 < gap < 0.4, "0.25 nats of noise; with observed tokens it is several nats"


def test_only_generated_tokens_reach_the_head(turns: tuple[list[Group], Rows]) -> None:
    (group, _), rows = turns[0][3], turns[1]
    packed = PackedBatch.of_samples(group, CPU)
    want = np.concatenate([r.response[r.trained] for one in group for r in rows[one.id]])
    assert packed.targets.tolist() == want.tolist()
    before = packed.tokens[0, packed.predictors]
    ends = [
        np.append(r.prompt[-1:], r.response[:-1])[r.trained] for one in group for r in rows[one.id]
    ]
    assert before.tolist() == np.concatenate(ends).tolist()


def test_prompts_are_shared_where_they_are_equal_and_not_where_they_have_one_length() -> None:
    """Samples of a group whose environment gives each a prompt of its own."""
    one, other, third = (np.array(tokens, np.int32) for tokens in ([1, 2, 3], [1, 2, 4], [1, 2]))
    response = np.array([5, 6], np.int32)
    prompts = [one, one.copy(), other, third, third, one]
    packed = PackedBatch.of([(prompt, response) for prompt in prompts], CPU)
    assert packed.tokens[0].tolist() == [1, 2, 3, 5, 5, 1, 2, 4, 5, 1, 2, 5, 5, 1, 2, 3, 5]


def test_a_trajectory_that_cannot_be_trained_on_is_refused(
    turns: tuple[list[Group], Rows],
) -> None:
    one = turns[0][1][0][3]
    observed = np.flatnonzero(~one.trained)
    check_trajectory(one, 32, 0)

    def refused(message: str, **changes: Any) -> None:
        with pytest.raises(BatchError, match=message):
            check_trajectory(dataclasses.replace(one, **changes), 32, 0)

    refused("every token is observed", provenance=np.full_like(one.provenance, Provenance.OBSERVED))
    logprobs = one.behaviour_logprobs.copy()
    logprobs[observed[1]] = -0.5
    refused(f"token {observed[1]} is observed, .* is 0, not -0.5", behaviour_logprobs=logprobs)
    for contexts in ((0,), (len(one.tokens),), one.contexts[::-1], (one.contexts[0] - 1,), (-1,)):
        refused("a context must begin with an observed token", contexts=contexts)


def test_a_context_that_ended_before_it_was_generated_in_is_not_trained_on(
    turns: tuple[list[Group], Rows],
) -> None:
    one = turns[0][1][0][3]
    more = np.array([7, 8, 9], np.int32)
    cut = dataclasses.replace(
        one,
        tokens=np.append(one.tokens, more),
        behaviour_logprobs=np.append(one.behaviour_logprobs, np.zeros(3, np.float32)),
        provenance=np.append(one.provenance, np.full(3, Provenance.OBSERVED, np.uint8)),
        contexts=(*one.contexts, len(one.tokens)),
    )
    assert len(contexts_of(cut)) == len(contexts_of(one)) == 3
    last = contexts_of(cut, one_more=True)[-1]
    assert (last.prompt.tolist(), last.response.tolist()) == (more.tolist(), [0])
    assert longest_response(cut) == longest_response(one) == 5
