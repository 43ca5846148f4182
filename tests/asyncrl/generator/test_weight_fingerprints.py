"""A generator that decodes with other weights than the trainer's says so and ends."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from generator_harness import PROMPT, SAMPLE, GeneratorHarness, play, settle

from asyncrl.engine.errors import EngineError, WeightsSupersededError
from asyncrl.engine.protocol import ScoreRequest
from asyncrl.errors import WrongPolicyError
from asyncrl.rollout.trajectory import SampleId
from asyncrl.wire.messages import from_generator as fg
from asyncrl.wire.messages import to_generator as tg
from asyncrl.wire.messages.data import decode_floats, encode_tokens
from asyncrl.wire.weights.fingerprint import fingerprint
from asyncrl.wire.weights.layout import Fingerprint, WeightManifest


def held(value: float) -> Fingerprint:
    return fingerprint([("w", torch.full((3,), value)), ("head", torch.full((2,), value))])


def manifest(version: int) -> WeightManifest:
    return WeightManifest(version, "", 0, (), held(float(version)))


def sent(messages: deque[Any], kind: type[Any]) -> list[Any]:
    return [message for message in messages if isinstance(message, kind)]


async def install(harness: GeneratorHarness, version: int, found: Fingerprint) -> None:
    """The engine holds `found` after the installation of a version."""
    install_weights = harness.engine.install_weights

    async def changing(policy_version: int) -> None:
        await install_weights(policy_version)
        harness.engine.held = found

    harness.engine.install_weights = changing  # type: ignore[method-assign]
    await harness.send(tg.InstallWeights(manifest(version)))
    harness.engine.install_weights = install_weights  # type: ignore[method-assign]


def test_the_right_weights_are_installed_without_a_word() -> None:
    async def scenario(harness: GeneratorHarness) -> None:
        (ready,) = sent(harness.control.sent, fg.GeneratorReady)
        assert ready.fingerprint == Fingerprint({}, "")
        for version in (1, 2):
            await install(harness, version, held(float(version)))
        installed = sent(harness.control.sent, fg.WeightsInstalled)
        assert [one.policy_version for one in installed] == [1, 2]
        assert not sent(harness.control.sent, fg.WrongPolicyFound)

    play(scenario)


def test_nothing_is_generated_before_the_engine_has_the_first_policy() -> None:
    """Where training starts from an adapter, the engine's own weights are no policy of the run."""

    async def scenario(harness: GeneratorHarness) -> None:
        (ready,) = sent(harness.control.sent, fg.GeneratorReady)
        assert ready.policy_version == -1
        await harness.send(tg.Generate(SAMPLE, PROMPT, 7))
        ahead = tg.Evaluate(1, 0, PROMPT, 5, tg.FixedVersion(1, True, 60.0, 6))
        await harness.send(ahead)
        await harness.send(tg.Rewind(0, lineage=1))  # the first trainer is lost before a step
        assert sent(harness.control.sent, fg.Rewound)[0].policy_version == -1
        await harness.send(ahead)
        assert harness.engine.requests == []
        await harness.send(tg.InstallWeights(manifest(0), lineage=1))
        assert [one.policy_version for one in sent(harness.control.sent, fg.WeightsInstalled)] == [
            0
        ]
        assert len(harness.engine.requests) == 2, "the sample, and the held-out one ahead of time"

    play(scenario, starts_with_policy=False, stops_on_wrong_policy=False)


def test_the_process_ends_before_it_can_deliver_what_other_weights_draw() -> None:
    async def scenario(harness: GeneratorHarness) -> None:
        await install(harness, 1, held(1.0))
        await harness.send(tg.Generate(SAMPLE, PROMPT, 7))
        harness.engine.feed("train-5.1", [3], 1)
        await settle()
        stale = fingerprint([("w", torch.full((3,), 2.0)), ("head", torch.full((2,), 1.0))])
        await install(harness, 2, stale)
        (found,) = sent(harness.control.sent, fg.WrongPolicyFound)
        assert (found.found.cause, found.found.policy_version) == ("weights", 2)
        assert "1 of 2 tensors differ (head)" in found.found.text
        assert "version 1: they were not installed" in found.found.text
        assert len(sent(harness.control.sent, fg.WeightsInstalled)) == 1, "of version 1"
        assert await harness.delivered() == []

    with pytest.raises(WrongPolicyError, match=r"g0 decodes with other weights .* version 2"):
        play(scenario)


def test_nothing_is_delivered_until_the_weights_are_compared() -> None:
    """Comparing takes longer than installing, so the engine draws meanwhile."""

    async def scenario(harness: GeneratorHarness) -> None:
        await install(harness, 1, held(1.0))
        await harness.send(tg.Generate(SAMPLE, PROMPT, 7))
        harness.engine.feed("train-5.1", [3], 1, end="stop")
        await settle()
        comparing, fingerprint_of = asyncio.Event(), harness.engine.fingerprint
        installed = asyncio.Event()

        async def slowly() -> Fingerprint:
            if harness.engine.version == 2:
                installed.set()
                await comparing.wait()
            return await fingerprint_of()

        harness.engine.fingerprint = slowly  # type: ignore[method-assign]
        swap = asyncio.create_task(install(harness, 2, held(2.0)))
        await installed.wait()
        await harness.send(tg.Deliver(5, (SAMPLE,)))
        await settle()
        assert list(harness.data.sent) == []
        comparing.set()
        await swap
        await settle()
        assert [one.sample for one in harness.data.sent] == [SAMPLE]

    play(scenario)


def test_what_is_due_with_the_weights_is_verified_before_they_are_compared() -> None:
    async def scenario(harness: GeneratorHarness) -> None:
        await install(harness, 1, held(1.0))
        running = SampleId(group=5, sample=0)
        await harness.send(tg.Generate(SAMPLE, PROMPT, 7))
        await harness.send(tg.Generate(running, PROMPT, 7))
        harness.engine.feed("train-5.1", [3], 1, end="stop")
        harness.engine.feed("train-5.0", [3], 1)
        await settle()
        comparing, fingerprint_of = asyncio.Event(), harness.engine.fingerprint

        async def slowly() -> Fingerprint:
            if harness.engine.version == 2:
                await comparing.wait()
            return await fingerprint_of()

        async def changing(policy_version: int) -> None:
            assert len(harness.engine.requests) == 2, "nothing is verified under the old weights"
            harness.engine.version, harness.engine.held = policy_version, held(2.0)

        harness.engine.fingerprint = slowly  # type: ignore[method-assign]
        harness.engine.install_weights = changing  # type: ignore[method-assign]
        due = tg.Verify((running, SAMPLE), (8, 9), 2)
        unreached = tg.Verify((SAMPLE,), (11,), 3)  # newer weights were published in place of 3
        await harness.send(tg.InstallWeights(manifest(2), verify=(due, unreached)))
        await settle()
        asked = harness.engine.requests[2:]
        assert sorted(one.request_id for one in asked) == ["train-5.0-v2", "train-5.1-v2"]
        assert sorted(one.sampling.seed or 0 for one in asked) == [8, 9]
        assert [one.policy_version for one in sent(harness.control.sent, fg.WeightsInstalled)] == [
            1
        ]
        comparing.set()
        await settle()
        assert sent(harness.control.sent, fg.WeightsInstalled)[-1].policy_version == 2

    play(scenario)


def test_weights_that_are_not_installed_verify_nothing() -> None:
    async def scenario(harness: GeneratorHarness) -> None:
        await install(harness, 1, held(1.0))
        await harness.send(tg.Generate(SAMPLE, PROMPT, 7))
        harness.engine.feed("train-5.1", [3], 1, end="stop")
        await settle()

        async def overwritten(_: WeightManifest) -> None:
            raise WeightsSupersededError("overwritten")

        harness.engine.stage_weights = overwritten  # type: ignore[method-assign]
        due = tg.Verify((SAMPLE,), (9,), 2)
        await harness.send(tg.InstallWeights(manifest(2), verify=(due,)))
        await settle()
        assert len(harness.engine.requests) == 1
        assert SAMPLE in harness.process.samples.held

    play(scenario)


def test_with_warn_it_says_so_and_continues() -> None:
    async def scenario(harness: GeneratorHarness) -> None:
        await install(harness, 1, held(9.0))
        assert len(sent(harness.control.sent, fg.WrongPolicyFound)) == 1
        await install(harness, 2, held(2.0))
        installed = sent(harness.control.sent, fg.WeightsInstalled)
        assert [one.policy_version for one in installed] == [1, 2]
        assert len(sent(harness.control.sent, fg.WrongPolicyFound)) == 1

    play(scenario, stops_on_wrong_policy=False)


def test_tokens_are_scored_again_on_request() -> None:
    async def scenario(harness: GeneratorHarness) -> None:
        asked: list[ScoreRequest] = []

        async def score(requests: Sequence[ScoreRequest]) -> list[Any]:
            asked.extend(requests)
            return [
                SimpleNamespace(logprobs=-one.tokens.astype(np.float32), policy_version=3)
                for one in requests
            ]

        harness.engine.score = score  # type: ignore[attr-defined]
        sample = tg.ToRescore(PROMPT.tokens, encode_tokens(np.array([3, 4], np.int32)))
        await harness.send(tg.Rescore(7, (sample,)))
        (answer,) = sent(harness.control.sent, fg.Rescored)
        assert (answer.number, answer.policy_version) == (7, 3)
        assert decode_floats(answer.logprobs[0]).tolist() == [-3.0, -4.0]
        assert asked[0].prompt_tokens.tolist() == [1, 2]
        assert asked[0].sampling is harness.generator.sampling

        async def fails(_requests: Sequence[ScoreRequest]) -> list[Any]:
            raise EngineError("the engine is paused")

        harness.engine.score = fails  # type: ignore[attr-defined]
        await harness.send(tg.Rescore(8, (sample,)))
        answer = sent(harness.control.sent, fg.Rescored)[-1]
        assert (answer.number, answer.logprobs, answer.reason) == (8, (), "the engine is paused")

    play(scenario)
