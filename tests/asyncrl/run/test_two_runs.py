"""A run that starts from another run's model draws other samples, with the same `run.seed`.

Learner, engine core, requests and checkpoint are real; only the loop around them is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from false_alarms import Claims, coincidence, is_caught
from tiny_models import make_qwen3, save
from torch_cores import core_of, hf_logprobs, load, request, run
from transformers import AutoModelForCausalLM

from asyncrl.rollout.trajectory import SampleId, Trajectory, TrajectoryBuilder
from asyncrl.tasks.prompts import Prompt, Task
from asyncrl.tasks.sample_requests import SampleRequests
from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.trainer.checkpoint.export import export
from asyncrl.trainer.learner import Learner
from asyncrl.wire.messages.data import decode_tokens

PROMPTS, GROUP_SIZE, LENGTH = 96, 4, 2
CLAIMS = Claims(__file__)

Samples = dict[tuple[str, int], Trajectory]
"""By prompt and index of the sample in its group."""


def task() -> Task:
    prompts = [
        Prompt(f"p{i}", np.array([i % 10, i // 10], np.int32), "", {}) for i in range(PROMPTS)
    ]
    return Task(prompts, (), (), None)


def learner_of(model: str) -> Learner:
    settings: dict[str, Any] = {"learning_rate": 0.02, "warmup_steps": 0, "device": "cpu"}
    config = TrainerConfig.model_validate(settings)
    return Learner(config, model, group_size=GROUP_SIZE, seed=0)


def drawn_by_the_first_step(model: str, requests: SampleRequests) -> Samples:
    """The samples of the first epoch's groups, as a generator draws them from this model."""
    builders: dict[str, TrajectoryBuilder] = {}
    asked = []
    for sample in [SampleId(g, s) for g in range(PROMPTS) for s in range(GROUP_SIZE)]:
        command = requests.generate(sample, 0)
        name, prompt = str(sample), decode_tokens(command.prompt.tokens)
        builders[name] = TrajectoryBuilder(sample, command.prompt.prompt_id, prompt)
        asked.append(request(name, prompt, max_tokens=LENGTH, stop_tokens=(), seed=command.seed))
    for name, chunks in run(core_of(load(model, slots=16)), asked).items():
        for chunk in chunks:
            chunk.append_to(builders[name])
    trajectories = [builder.finish("length") for builder in builders.values()]
    return {(one.prompt_id, one.id.sample): one for one in trajectories}


def train(learner: Learner, samples: Samples) -> None:
    """One step in which the first two samples of each group are right."""
    by_group: dict[int, list[Trajectory]] = {}
    for one in samples.values():
        by_group.setdefault(one.id.group, []).append(one)
    for group in by_group.values():
        learner.add_group(group, np.array([one.id.sample < 2 for one in group], np.float32))
    learner.step()


def repetitions(model: str, first: Samples, second: Samples) -> tuple[int, Sequence[float]]:
    """How many rewarded texts the second run has again, and how probable each of these is."""
    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    again, chances = 0, []
    for key, one in first.items():
        if key[1] < 2:
            again += one.tokens.tolist() == second[key].tokens.tolist()
            table = hf_logprobs(module, one.prompt_tokens, one.tokens.tolist())
            chances.append(float(np.exp(table[np.arange(LENGTH), one.tokens].sum())))
    return again, chances


@pytest.mark.parametrize("scale", [1.0, 4.0], ids=["flat", "sharp"])
def test_what_a_model_was_trained_on_comes_again_as_often_as_chance(
    tmp_path: Path, scale: float
) -> None:
    model = save(make_qwen3(seed=3, scale=scale), tmp_path / "model")
    learner = learner_of(model)
    requests = SampleRequests(task(), 0)
    requests.starts_from(learner.initial_weights)
    first = drawn_by_the_first_step(model, requests)
    train(learner, first)
    learner.save(tmp_path / "step-000001")
    export(tmp_path / "step-000001", tmp_path / "trained")
    trained = str(tmp_path / "trained")

    second_run = SampleRequests(task(), 0)
    second_run.starts_from(learner_of(trained).initial_weights)
    second = drawn_by_the_first_step(trained, second_run)
    again, chances = repetitions(trained, first, second)
    assert CLAIMS.fit(coincidence(again, chances)), f"{again} of {len(chances)}"

    # Streams that are keyed by the seed alone, so that the second run has those of the first.
    same = drawn_by_the_first_step(trained, requests)
    again, chances = repetitions(trained, first, same)
    assert is_caught(coincidence(again, chances)), "the test would not see repeated numbers"
