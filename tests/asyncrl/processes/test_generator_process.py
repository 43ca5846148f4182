"""Weight installation and lenient reuse in a generator process with a fake engine."""

from __future__ import annotations

import numpy as np
import torch
from generator_harness import PROMPT, SAMPLE, GeneratorHarness, play, settle

from rollout.trajectory import KeptTokens
from wire.messages import to_generator as tg
from wire.weights.writer import WeightPublisher


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


def test_with_lenient_reuse_samples_begin_with_earlier_rollouts():
    class Earlier:
        def tokens_to_verify(self, prompt_id: str, sample: int) -> KeptTokens:
            assert (prompt_id, sample) == ("p", 1)
            one = np.zeros((1, 0))
            return KeptTokens(
                np.array([3], np.int32), np.array([-1.0], np.float32), one, one, lenience=1.5
            )

    async def scenario(harness: GeneratorHarness) -> None:
        await harness.send(tg.Generate(SAMPLE, PROMPT, 7))
        kept = harness.engine.requests[0].kept
        assert kept is not None
        assert kept.lenience == 1.5

    play(scenario, lenient_reuse=Earlier())
