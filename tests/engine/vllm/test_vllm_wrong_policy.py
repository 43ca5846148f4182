"""Sabotage of a real vLLM that log-probabilities show, named by the trainer's check of a step."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from served_engine import PROMPT as SHORT
from served_engine import TOP_K, VOCAB, Served, ask, collect_all
from served_vllm import REAL_VLLM

from asyncrl.controller.policy_watch import conclusion
from asyncrl.engine.protocol import SamplingParams
from asyncrl.engine.vllm.client.engine import VllmCore
from asyncrl.generator.process import rescore
from asyncrl.rollout.trajectory import SampleId, Trajectory, TrajectoryBuilder
from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.trainer.learner import Learner
from asyncrl.trainer.objective.logprob_mismatch import FLOAT32_CPU
from asyncrl.trainer_process.delivery_check import WholeGroup
from asyncrl.trainer_process.policy_check import PolicyCheck
from asyncrl.wire.messages.to_generator import Rescore, ToRescore
from asyncrl.wire.records.wrong_policy import WrongPolicy
from asyncrl.wire.weights.writer import WeightPublisher

pytestmark = REAL_VLLM

GENERATOR = "generator-0"
GROUP = 4
TOKENS = 20
"""In each response: a step of one group has 80, enough to be judged."""
LONG = np.random.default_rng(7).integers(0, VOCAB, 300).astype(np.int32)
"""Fills two blocks of the prefix cache."""


class Step:
    """One step on samples of the engine's version, judged as in a run.

    Args:
        served: decodes with the policy that was installed last.
        folder: for the trainer's model and published weights.
    """

    def __init__(self, served: Served, folder: Path) -> None:
        self._served = served
        served.install(served.old)
        self._version = served.install(served.new)
        served.new.save_pretrained(folder / "new")
        config = TrainerConfig(device="cpu")
        self._learner = Learner(config, str(folder / "new"), group_size=GROUP, seed=0)
        self._learner.policy_version = self._version
        self._publisher = WeightPublisher(folder, "vllm-step")
        old = [
            (name, one) for name, one in served.old.state_dict().items() if "lm_head" not in name
        ]
        self._publisher.publish(old, self._version - 1)
        self._check = PolicyCheck(FLOAT32_CPU, self._learner.policy, self._publisher)

    def close(self) -> None:
        self._publisher.close()

    def findings(self, prompt: np.ndarray) -> list[WrongPolicy]:
        """What a run would say of new samples of one prompt."""
        trajectories = self._draw(prompt)
        rewards = np.array([1, 0, 0, 0], np.float32)
        rows = self._learner.add_group(trajectories, rewards)
        self._check.add(WholeGroup(0, trajectories, rewards, [GENERATOR] * GROUP, []), rows)
        found = self._check.findings(self._version)
        assert self._check.follows == (not found)
        return [self._concluded(one) if one.samples else one.found for one in found]

    def _draw(self, prompt: np.ndarray) -> list[Trajectory]:
        asked = [ask(f"{i}", prompt_tokens=prompt, max_tokens=TOKENS, seed=i) for i in range(GROUP)]
        drawn = []
        for i, chunks in enumerate(self._served.call(collect_all(self._served.engine, asked))):
            builder = TrajectoryBuilder(SampleId(0, i), "p", prompt)
            for chunk in chunks:
                chunk.append_to(builder)
            drawn.append(builder.finish("length"))
        return drawn

    def _concluded(self, message: Any) -> WrongPolicy:
        """As the controller concludes, after the generator has scored the samples again."""
        answers: asyncio.Queue[Any] = asyncio.Queue()
        line: Any = SimpleNamespace(generator=GENERATOR, send=answers.put)
        sampling = SamplingParams(1, top_k_logprobs=TOP_K)
        samples = tuple(ToRescore(one.prompt_tokens, one.tokens) for one in message.samples)
        self._served.call(rescore(self._served.engine, sampling, line, Rescore(1, samples)))
        return conclusion(message, answers.get_nowait())


@pytest.fixture
def step(served: Served, tmp_path: Path) -> Iterator[Step]:
    made = Step(served, tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("prompt", [SHORT, LONG], ids=["short", "long"])
def test_a_healthy_step_is_not_mentioned(step: Step, prompt: np.ndarray) -> None:
    assert step.findings(prompt) == []


def test_a_wrong_temperature_is_named(served: Served, step: Step) -> None:
    llm = served.engine._process.vllm.llm
    served.call(llm.collective_rpc("asyncrl_fault", args=("temperature", "")))
    try:
        (found,) = step.findings(SHORT)
    finally:
        served.call(llm.collective_rpc("asyncrl_fault", args=("none", "")))
    assert (found.cause, found.generator) == ("temperature", GENERATOR)
    assert "samples at temperature 1.1 instead of 1:" in found.text


def test_kv_of_older_weights_is_named(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One salt for all versions: vLLM takes the prompt's KV that the old weights computed."""
    monkeypatch.setattr(VllmCore, "_salt", lambda _: "one for all")
    served.install(served.old)
    served.call(collect_all(served.engine, [ask("before", prompt_tokens=LONG)]))
    step = Step(served, tmp_path)
    try:
        (found,) = step.findings(LONG)
    finally:
        step.close()
    assert (found.cause, found.generator) == ("kv", GENERATOR)
    assert "they were drawn on KV that other weights had computed" in found.text
