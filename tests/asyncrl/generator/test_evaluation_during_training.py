"""Held-out samples of one policy version in a generator that trains, with a fake engine."""

from __future__ import annotations

from typing import Any, Self

import pytest
import torch
from generator_harness import PROMPT, SAMPLE, GeneratorHarness, play, settle

from asyncrl.wire.messages import from_generator as fg
from asyncrl.wire.messages import to_generator as tg
from asyncrl.wire.weights.writer import WeightPublisher


def evaluate(
    version: int, index: int = 4, *, ahead: bool = True, hold: float = 1000.0
) -> tg.Evaluate:
    fixed = tg.FixedVersion(version, ahead, hold, verify_seed=99)
    return tg.Evaluate(round=3, index=index, prompt=PROMPT, seed=7, fixed=fixed)


class Weights:
    """Published versions."""

    def __init__(self, path: Any) -> None:
        self._publisher = WeightPublisher(path, "run")
        self.manifests: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._publisher.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._publisher.__exit__(*error)  # type: ignore[arg-type]

    def install(self, version: int) -> tg.InstallWeights:
        tensors = [("w", torch.full((3,), float(version)))]
        return tg.InstallWeights(self._publisher.publish(tensors, version))


def of_evaluation(harness: GeneratorHarness) -> list[Any]:
    kinds = fg.EvaluationSample | fg.EvaluationMissed
    return [one for one in harness.control.sent if isinstance(one, kinds)]


def test_a_sample_begun_ahead_is_verified_under_its_version_whether_it_was_finished_or_not(
    tmp_path: Any,
) -> None:
    async def scenario(harness: GeneratorHarness) -> None:
        with Weights(tmp_path) as weights:
            await harness.send(evaluate(1, 4))
            await harness.send(evaluate(1, 5))
            first, second = harness.engine.requests
            assert (first.priority, first.sampling.seed) == (1, 7), "run-ahead"
            harness.engine.feed("eval-3.4", [3, 4], 0, end="stop")
            harness.engine.feed("eval-3.5", [5], 0)
            await settle()
            assert of_evaluation(harness) == [], "the finished one waits for its version"
            await harness.send(weights.install(1))
            kept = {one.request_id: one for one in harness.engine.requests[2:]}
            assert {name: one.kept.tokens.tolist() for name, one in kept.items()} == {
                "eval-3.4-v1": [3, 4],
                "eval-3.5-v1": [5],
            }
            assert {one.sampling.seed for one in kept.values()} == {99}
            assert {one.priority for one in kept.values()} == {0}
            assert all(one.order > 10**9 for one in kept.values()), "after due samples"
            harness.engine.feed("eval-3.4-v1", [3, 4], 1, verified=2, end="stop")
            harness.engine.feed("eval-3.5-v1", [6, 7, 8], 1, end="stop")
            await settle()
            assert of_evaluation(harness) == [
                fg.EvaluationSample("g0", 3, 4, 2.0, 1, 1, 2),
                fg.EvaluationSample("g0", 3, 5, 3.0, 1, 1, 3),
            ]
            assert first.order == second.order

    play(scenario)


def test_newer_weights_wait_for_unfinished_samples_and_for_nothing_else(tmp_path: Any) -> None:
    async def scenario(harness: GeneratorHarness) -> None:
        with Weights(tmp_path) as weights:
            await harness.send(weights.install(1))
            await harness.send(evaluate(1))
            await harness.send(tg.Generate(SAMPLE, PROMPT, 7))
            harness.engine.feed("eval-3.4", [3], 1)
            await settle()
            await harness.send(weights.install(2))
            assert harness.engine.version == 1
            harness.engine.feed("eval-3.4", [4], 1, end="stop")
            await settle()
            assert harness.engine.version == 2
            [sample] = of_evaluation(harness)
            assert (sample.policy_version, sample.newest_version) == (1, 1)
            assert 0 < sample.held_seconds < 60

    play(scenario)


def test_after_hold_seconds_the_round_is_given_up_and_the_weights_are_installed(
    tmp_path: Any,
) -> None:
    async def scenario(harness: GeneratorHarness) -> None:
        with Weights(tmp_path) as weights:
            await harness.send(weights.install(1))
            for index in (4, 5):
                await harness.send(evaluate(1, index, hold=0.0))
            harness.engine.feed("eval-3.4", [3, 4], 1)
            await settle()
            await harness.send(weights.install(2))
            [missed] = of_evaluation(harness)
            assert missed.round == 3
            assert "evaluation.hold_seconds" in missed.reason
            assert "2 held-out samples are unfinished" in missed.reason
            assert harness.engine.version == 2
            assert sorted(harness.engine.abandoned) == ["eval-3.4", "eval-3.5"]

    play(scenario)


@pytest.mark.parametrize("ahead", [True, False])
def test_a_version_that_is_skipped_is_never_evaluated(tmp_path: Any, ahead: bool) -> None:
    async def scenario(harness: GeneratorHarness) -> None:
        with Weights(tmp_path) as weights:
            for index in (4, 5):
                await harness.send(evaluate(1, index, ahead=ahead))
            assert len(harness.engine.requests) == 2 * ahead
            await harness.send(weights.install(2))
            [missed] = of_evaluation(harness)
            assert "installed version 2 without 1 before it" in missed.reason
            await harness.send(evaluate(1, 6))
            assert "after 1" in of_evaluation(harness)[-1].reason, "it came too late"

    play(scenario)


def test_where_tokens_cannot_be_verified_a_sample_begins_with_its_version(tmp_path: Any) -> None:
    async def scenario(harness: GeneratorHarness) -> None:
        with Weights(tmp_path) as weights:
            await harness.send(evaluate(1, ahead=False))
            assert harness.engine.requests == []
            await harness.send(weights.install(1))
            [request] = harness.engine.requests
            assert (request.priority, request.kept) == (0, None)
            await harness.send(tg.AbandonEvaluation(3))
            assert harness.engine.abandoned == ["eval-3.4"]
            await harness.send(weights.install(2))
            assert harness.engine.version == 2, "nothing is held for a round that was given up"
            assert of_evaluation(harness) == []

    play(scenario)


def test_due_samples_take_the_slots_of_held_out_ones_that_run_ahead() -> None:
    async def scenario(harness: GeneratorHarness) -> None:
        for index in (4, 5):
            await harness.send(evaluate(1, index))
            harness.engine.feed(f"eval-3.{index}", [3], 0)
        await settle()
        await harness.send(tg.Generate(SAMPLE, PROMPT, 7))
        assert harness.engine.interrupted == ["eval-3.5"]
        assert harness.engine.requests[-1].prefix_tokens.tolist() == [3]

    play(scenario)
