"""A generator process with a fake engine: weights, lenient reuse, evaluation and failures."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from generator_harness import PROMPT, SAMPLE, GeneratorHarness, play, settle

from asyncrl.engine.errors import EngineError, RequestError
from asyncrl.engine.weights import StagedWeights
from asyncrl.generator import process
from asyncrl.rollout.trajectory import KeptTokens
from asyncrl.wire.messages import from_generator as fg
from asyncrl.wire.messages import to_generator as tg
from asyncrl.wire.weights.writer import WeightPublisher


def test_recompute_resumes_every_sample_from_its_tokens_under_the_new_weights(tmp_path):
    async def scenario(harness: GeneratorHarness) -> None:
        await harness.send(tg.Generate(SAMPLE, PROMPT, 7))
        harness.engine.feed("train-5.1", [3], 1)
        await settle()
        harness.engine.unreported["train-5.1"] = ([4], 1)
        with WeightPublisher(tmp_path, "run") as publisher:
            manifest = publisher.publish([("w", torch.zeros(3))], 2)
            await harness.send(tg.InstallWeights(manifest, rebuild_kv=True))
        assert harness.engine.updates == [(2, set())], "no request is running during the swap"
        again = harness.engine.requests[-1]
        assert (again.prefix_tokens.tolist(), again.kept) == ([3, 4], None)

    play(scenario)


def test_weights_that_a_lost_trainer_removed_are_answered_with_the_old_version(tmp_path):
    async def scenario(harness: GeneratorHarness) -> None:
        staged = StagedWeights(lambda _: None)
        harness.engine.stage_weights = lambda one: asyncio.to_thread(staged.stage, one)
        with WeightPublisher(tmp_path, "run") as publisher:
            manifest = publisher.publish([("w", torch.zeros(3))], 2)
        await harness.send(tg.InstallWeights(manifest))
        for _ in range(500):
            if answers := [m for m in harness.control.sent if isinstance(m, fg.WeightsInstalled)]:
                break
            await asyncio.sleep(0.01)
        assert [answer.policy_version for answer in answers] == [0]
        assert harness.engine.updates == []

    play(scenario)


def test_with_lenient_reuse_samples_begin_with_earlier_rollouts():
    class Earlier:
        def tokens_to_verify(self, prompt_id: str, sample: int) -> KeptTokens:
            assert (prompt_id, sample) == ("p", 1)
            one = np.zeros((1, 0))
            return KeptTokens(
                np.array([3], np.int32),
                np.array([-1.0], np.float32),
                one,
                one,
                np.zeros(1, np.uint64),
                lenience=1.5,
            )

    async def scenario(harness: GeneratorHarness) -> None:
        await harness.send(tg.Generate(SAMPLE, PROMPT, 7))
        kept = harness.engine.requests[0].kept
        assert kept is not None
        assert kept.lenience == 1.5

    play(scenario, lenient_reuse=Earlier())


def test_a_task_that_fails_ends_the_process_with_its_error():
    async def scenario() -> None:
        harness = GeneratorHarness()
        harness.engine.error = EngineError("out of memory")
        running = asyncio.create_task(harness.process.run(metrics_port=None))
        await harness.send(tg.Generate(SAMPLE, PROMPT, 7))
        with pytest.raises(EngineError, match="out of memory"):
            await running
        assert not any(isinstance(m, fg.Goodbye) for m in harness.control.sent)

    asyncio.run(scenario())


def test_the_end_of_due_samples_is_reported_before_the_next_regular_report(monkeypatch):
    monkeypatch.setattr(process, "REPORT_SECONDS", 1e7)
    monkeypatch.setattr(process, "_NOTES_PER_REPORT", 10**9)

    async def scenario(harness: GeneratorHarness) -> None:
        def reports() -> int:
            return sum(isinstance(m, fg.GeneratorReport) for m in harness.control.sent)

        await harness.send(tg.Generate(SAMPLE, PROMPT, 7))
        await asyncio.sleep(0.1)  # a note sees the due sample
        assert reports() == 1
        harness.engine.feed("train-5.1", [3, 4], 1, end="stop")
        while reports() < 2:  # noqa: ASYNC110 - `play` bounds it
            await asyncio.sleep(0.01)

    play(scenario)


def test_a_request_that_the_engine_refuses_is_a_failed_sample():
    async def scenario(harness: GeneratorHarness) -> None:
        harness.engine.error = RequestError("too long")
        await harness.send(tg.Generate(SAMPLE, PROMPT, 7))
        assert fg.SampleFailed("g0", SAMPLE, "too long", user_error=False) in harness.control.sent

    play(scenario)


def test_a_held_out_sample_is_rewarded_reported_and_forgotten():
    async def scenario(harness: GeneratorHarness) -> None:
        await harness.send(tg.Evaluate(round=3, index=4, prompt=PROMPT, seed=7))
        harness.engine.feed("eval-3.4", [3, 4], 1, end="stop")
        await settle()
        assert fg.EvaluationSample("g0", 3, 4, 2.0, 1, 1, 2) in harness.control.sent
        assert not harness.finished()
        assert not harness.process.samples.held

    play(scenario)
