"""The noise floor: some responses are verified again under the policy that drew them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from generator_harness import PROMPT, SAMPLE, GeneratorHarness, play, settle, verify
from tiny_models import STOP

from asyncrl.cache.config import CacheConfig
from asyncrl.cache.tree.rollout_tree import RolloutCache
from asyncrl.engine.config import EngineConfig
from asyncrl.engine.protocol import GenerateRequest, SamplingParams, TokenChunk
from asyncrl.engine.torch.engine import TorchEngine
from asyncrl.generator.background import BackgroundTasks
from asyncrl.generator.noise_floor import EVERY, NoiseFloorProbe, _compared
from asyncrl.rollout.trajectory import KeptTokens, Provenance, SampleId, TrajectoryBuilder
from asyncrl.wire.messages import from_generator as fg
from asyncrl.wire.messages import to_generator as tg
from asyncrl.wire.records.noise_floor import NoiseFloor
from asyncrl.wire.weights.layout import WeightManifest

AGAIN = "noise-floor-5.1-v0"


async def finish_a_sample(harness: GeneratorHarness) -> None:
    await harness.send(tg.Generate(SAMPLE, PROMPT, 7))
    harness.engine.feed("train-5.1", [3, 4], 0)
    harness.engine.feed("train-5.1", [5, 6], 0, end="stop")
    await settle()


def test_a_finished_response_is_verified_again_and_nothing_else_changes() -> None:
    async def scenario(harness: GeneratorHarness) -> None:
        await finish_a_sample(harness)
        first, again = harness.engine.requests
        assert again.request_id == AGAIN
        assert again.cache_key == "", "the cache would draft from it and be fed twice"
        assert isinstance(again.kept, KeptTokens)
        assert again.kept.tokens.tolist() == [3, 4, 5, 6]
        assert again.kept.lenience is None
        assert again.sampling.seed not in (None, first.sampling.seed)
        assert again.sampling.max_tokens == 4, "nothing is drawn when all tokens are accepted"
        assert again.priority > first.priority, "it never takes the slot of a due sample"
        before = harness.generator.tokens
        harness.engine.feed(AGAIN, [3, 4, 9], 0, verified=2)
        await settle()
        assert harness.engine.interrupted == [AGAIN], "it would go on drawing"
        measured = harness.generator.noise_floor.measured
        assert measured == NoiseFloor(
            samples=1, cut_samples=1, judged=4, rejected=2, abs_mean=0.0, square_mean=0.0
        )
        assert harness.generator.tokens == before, "counted as verification of real work"
        assert len(harness.finished()) == 1
        assert await harness.delivered() == [4.0]
        report = [m for m in harness.control.sent if isinstance(m, fg.GeneratorReport)][-1]
        assert report.noise_floor == NoiseFloor()  # of the start; the next one has it

    play(scenario, noise_floor_every=1)


def test_tokens_that_an_earlier_verification_accepted_are_the_prefix() -> None:
    async def scenario(harness: GeneratorHarness) -> None:
        harness.engine.version = 2
        await harness.send(tg.Generate(SAMPLE, PROMPT, 7))
        harness.engine.feed("train-5.1", [3, 4, 5], 1, end="stop")
        await settle()
        assert len(harness.engine.requests) == 1, "another version drew it"
        await harness.send(verify())
        harness.engine.feed("train-5.1-v2", [3, 6, 7], 2, verified=1, end="stop")
        await settle()
        again = harness.engine.requests[-1]
        assert again.request_id == "noise-floor-5.1-v2"
        assert again.prefix_tokens.tolist() == [3]
        assert again.kept is not None
        assert again.kept.tokens.tolist() == [6, 7]
        harness.engine.feed(again.request_id, [6, 7], 2, verified=2, end="stop")
        await settle()
        assert harness.generator.noise_floor.measured.judged == 2
        assert harness.generator.noise_floor.measured.cut_samples == 0

    play(scenario, noise_floor_every=1)


def test_what_was_not_drawn_by_the_installed_policy_alone_is_not_measured() -> None:
    async def scenario(harness: GeneratorHarness) -> None:
        await harness.send(tg.Generate(SAMPLE, PROMPT, 7))
        harness.engine.feed("train-5.1", [3], 0)
        harness.engine.feed("train-5.1", [4], 1, end="stop")  # on KV of version 0
        harness.engine.version = 1
        await settle()
        assert len(harness.engine.requests) == 1
        await harness.send(verify(min_version=1))
        harness.engine.feed("train-5.1-v1", [3, 4], 1, verified=2, end="stop")
        await settle()
        assert len(harness.engine.requests) == 2, "no token is left that decoding drew"

    play(scenario, noise_floor_every=1)


@pytest.mark.parametrize(
    "command",
    [
        tg.InstallWeights(WeightManifest(policy_version=1, path="", nbytes=0, tensors=())),
        tg.Rewind(policy_version=0, lineage=1),
        tg.Pause(),
    ],
    ids=lambda command: type(command).__name__,
)
def test_new_weights_a_rewind_and_a_pause_end_the_measurement(command: tg.ToGenerator) -> None:
    async def scenario(harness: GeneratorHarness) -> None:
        await finish_a_sample(harness)
        assert harness.generator.noise_floor.running
        await harness.send(command)
        assert harness.engine.abandoned == [AGAIN]
        assert not harness.generator.noise_floor.running
        harness.engine.feed(AGAIN, [3, 4, 5, 6], 0, verified=4, end="stop")
        await settle()
        assert harness.generator.noise_floor.measured == NoiseFloor()

    play(scenario, noise_floor_every=1)


def test_nothing_is_measured_while_paused() -> None:
    async def scenario(harness: GeneratorHarness) -> None:
        await harness.send(tg.Pause())
        await finish_a_sample(harness)  # its last tokens were on their way
        assert len(harness.engine.requests) == 1
        await harness.send(tg.Resume())

    play(scenario, noise_floor_every=1)


def test_a_verdict_of_newer_weights_is_dropped() -> None:
    async def scenario(harness: GeneratorHarness) -> None:
        await finish_a_sample(harness)
        harness.engine.feed(AGAIN, [9], 1, end="stop")
        await settle()
        assert not harness.generator.noise_floor.running
        assert harness.generator.noise_floor.measured == NoiseFloor()

    play(scenario, noise_floor_every=1)


@pytest.mark.parametrize(("every", "measurements"), [(1, 1), (None, 0)])
def test_one_response_is_measured_at_a_time_and_none_unless_configured(
    every: int | None, measurements: int
) -> None:
    async def two(harness: GeneratorHarness) -> None:
        await finish_a_sample(harness)
        other = SampleId(group=5, sample=2)
        await harness.send(tg.Generate(other, PROMPT, 8))
        harness.engine.feed("train-5.2", [3], 0, end="stop")
        await settle()
        assert len(harness.engine.requests) == 2 + measurements

    play(two, noise_floor_every=every)


def test_a_share_of_all_samples_is_chosen_by_id() -> None:
    def chosen(every: int | None) -> int:
        probe = NoiseFloorProbe(None, SamplingParams(max_tokens=8), every)  # type: ignore[arg-type]
        samples = (SampleId(group, sample) for group in range(1000) for sample in range(8))
        return sum(probe._is_chosen(sample) for sample in samples)

    assert chosen(None) == 0
    assert chosen(1) == 8000
    # The mean is 125, and the standard deviation 11.
    assert 80 < chosen(EVERY) < 170


class CountingCache:
    """A cache that counts the tokens it is fed."""

    def __init__(self) -> None:
        self.cache, self.fed = RolloutCache(CacheConfig()), 0

    def extend(self, rows: Any, tokens: Any, offsets: Any) -> None:
        self.fed += len(tokens)
        self.cache.extend(rows, tokens, offsets)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)


async def responses(
    model: str, *, top_k: int, every: int | None
) -> tuple[list[list[int]], int, NoiseFloor]:
    """Sixty responses of a real engine, three at a time, with this share verified again.

    Returns their tokens, how many tokens the cache was fed, and the noise floor.
    """
    source = CountingCache()
    engine = TorchEngine(
        EngineConfig(slots=3, max_model_len=64, top_k_logprobs=top_k, threads=1, device="cpu"),
        model,
        source=source,  # type: ignore[arg-type]
        max_draft_tokens=4,
        seed=5,
        batch_invariant=True,
    )
    await engine.start()
    sampling = SamplingParams(max_tokens=24, top_k_logprobs=top_k, stop_tokens=(STOP,))
    probe, tasks = NoiseFloorProbe(engine, sampling, every), BackgroundTasks()

    async def response(group: int) -> list[int]:
        prompt = np.array([1, 2, 3], np.int32)
        builder = TrajectoryBuilder(SampleId(group, 0), "p", prompt)
        own = replace(sampling, seed=group)
        async for chunk in engine.generate(GenerateRequest(f"r{group}", "p", prompt, own)):
            chunk.append_to(builder)
        trajectory = builder.finish("stop")
        probe.consider(trajectory, tasks)
        return trajectory.tokens.tolist()

    texts = []
    for start in range(0, 60, 3):
        texts += await asyncio.gather(*(response(start + i) for i in range(3)))
    await probe.idle()
    tasks.raise_failure()
    await engine.close()
    return texts, source.fed, probe.measured


def test_a_real_engine_has_no_noise_in_float32_and_its_samples_and_its_cache_stay_the_same(
    tiny_qwen3: str,
) -> None:
    async def main() -> None:
        # With four of ten tokens listed, the noise that named the others has to stay with them.
        texts, fed, measured = await responses(tiny_qwen3, top_k=4, every=1)
        assert measured.samples > 5
        assert measured.judged > 40
        assert measured.rejected == 0
        assert measured.abs_mean is not None
        assert measured.abs_mean < 1e-5
        assert (texts, fed) == (await responses(tiny_qwen3, top_k=4, every=None))[:2]

    asyncio.run(asyncio.wait_for(main(), 300))  # compiling may take minutes


def test_observed_tokens_are_not_judged() -> None:
    kept = KeptTokens(
        np.array([3, 4, 8, 9, 5, 6], np.int32),
        np.array([-1, -2, 0, 0, -1, -2], np.float32),
        np.empty((6, 0), np.int32),
        np.empty((6, 0), np.float32),
        np.zeros(6, np.uint64),
        np.array([False, False, True, True, False, False]),
    )
    kinds = [Provenance.VERIFIED] * 2 + [Provenance.OBSERVED] * 2 + [Provenance.VERIFIED, 0]
    verdict = TokenChunk(
        AGAIN,
        np.array([3, 4, 8, 9, 5, 7], np.int32),
        np.array([-1.5, -2, 0, 0, -1, -3], np.float32),
        *(kept.topk_ids, kept.topk_logprobs, kept.noise_seeds),
        provenance=np.array(kinds, np.uint8),
        policy_version=0,
    )
    found = _compared(kept, verdict)
    assert (found.judged, found.rejected, found.cut_samples) == (4, 1, 1)
    assert found.abs_mean == pytest.approx(0.5 / 3)
    assert found.square_mean == pytest.approx(0.25 / 3)


def test_a_sample_of_several_turns_is_verified_after_the_turns_that_were_verified() -> None:
    builder = TrajectoryBuilder(SAMPLE, "p", np.array([1], np.int32))
    for number, kind in ((3, Provenance.VERIFIED), (4, Provenance.SAMPLED)):
        builder.append(
            tokens=np.array([number], np.int32),
            logprobs=np.array([-1], np.float32),
            topk_ids=np.empty((1, 1), np.int32),
            topk_logprobs=np.zeros((1, 1), np.float32),
            noise_seeds=np.zeros(1, np.uint64),
            provenance=np.array([kind], np.uint8),
            policy_version=0,
        )
        builder.append_observed(np.array([8, 9], np.int32))
    probe = NoiseFloorProbe(None, SamplingParams(max_tokens=9), 1)  # type: ignore[arg-type]
    request = probe._request(builder.finish("stop"), 3, 0)
    assert request.prefix_tokens.tolist() == [3, 8, 9]
    assert request.turn_start == 3
    assert request.kept is not None
    assert request.kept.observed.tolist() == [False, True, True]
