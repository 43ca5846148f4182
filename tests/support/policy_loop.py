"""A generator's engine, a trainer and all checks of the policy in one process, step by step.

Everything is real but the processes and sockets: `DecodeCore`, `Learner`, published weights,
fingerprints and `PolicyCheck`. A test may break one part; `step` returns what the run would say.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny_models import VOCAB
from torch_cores import core_of, request

from asyncrl.controller.policy_watch import conclusion
from asyncrl.engine.protocol import SamplingParams, ScoreRequest
from asyncrl.engine.torch.model import load_model
from asyncrl.rollout.trajectory import SampleId, Trajectory, TrajectoryBuilder
from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.trainer.base.lora_config import LoraConfig
from asyncrl.trainer.learner import Learner
from asyncrl.trainer.objective.logprob_mismatch import FLOAT32_CPU, TENSOR_CORES
from asyncrl.trainer_process.delivery_check import WholeGroup
from asyncrl.trainer_process.policy_check import PolicyCheck
from asyncrl.wire.messages.data import decode_tokens, encode_floats
from asyncrl.wire.messages.from_generator import Rescored
from asyncrl.wire.messages.from_trainer import WrongPolicyFound
from asyncrl.wire.records.wrong_policy import WrongPolicy, compare_weights, not_compared
from asyncrl.wire.weights.layout import Fingerprint
from asyncrl.wire.weights.writer import WeightPublisher

GENERATOR = "generator-0"


class PolicyLoop:
    """Training steps on fresh samples of the present policy.

    Args:
        model: a directory.
        published: where weights are published.
        dtype: of the engine.
        tokens: in each response.
        groups: in each step.
        group_size: samples of each.
        learning_rate: large enough that a step can be seen in the log-probabilities.
        lora: of the trainer.
    """

    def __init__(
        self,
        model: str,
        published: Path,
        *,
        dtype: torch.dtype = torch.float32,
        tokens: int = 12,
        groups: int = 2,
        group_size: int = 4,
        learning_rate: float = 3e-3,
        lora: LoraConfig | None = None,
    ) -> None:
        torch.set_num_threads(1)
        config = TrainerConfig(
            learning_rate=learning_rate, device="cpu", warmup_steps=0, lora=lora or LoraConfig()
        )
        self.learner = Learner(config, model, group_size=group_size, seed=0)
        adapter = self.learner.policy.adapter
        self.publisher = WeightPublisher(
            published, "loop", lora=None if adapter is None else adapter.spec
        )
        device = torch.device("cpu")
        self.core = core_of(
            load_model(model, slots=18, max_len=128, device=device, dtype=dtype),
            max_draft_tokens=0,
        )
        limits = FLOAT32_CPU if dtype == torch.float32 else TENSOR_CORES
        self.check = PolicyCheck(limits, self.learner.policy, self.publisher)
        self.temperature = 1.0
        """That the engine samples at; the trainer's is 1."""
        self.before_drawing: Callable[[], None] = lambda: None
        self.before_installing: Callable[[], None] = lambda: None
        self.means: list[float] = []
        """Mean difference of the log-probabilities of each step."""
        self._dtype = dtype
        self._tokens, self._groups, self._group_size = tokens, groups, group_size
        self._rng = np.random.default_rng(0)
        expected = self._publish()
        assert not_compared(expected, self.core.fingerprint) == []
        assert self._compared(0, expected) == []

    def close(self) -> None:
        self.publisher.close()

    def step(self) -> list[WrongPolicy]:
        """Draw, compare, train, publish, install, compare. Returns all findings."""
        version = self.learner.policy_version
        self.before_drawing()
        for group in range(self._groups):
            trajectories = self._draw(version * self._groups + group)
            rewards = self._rng.normal(size=self._group_size).astype(np.float32)
            rows = self.learner.add_group(trajectories, rewards)
            self.means.append(float(rows[:, 1].sum() / rows[:, 0].sum()))
            self.check.add(
                WholeGroup(group, trajectories, rewards, [GENERATOR] * self._group_size, []), rows
            )
        found = [self._concluded(one) for one in self.check.findings(version)]
        self.learner.step()
        before = version, self.core.fingerprint
        expected = self._publish()
        self.before_installing()
        self.core.install_weights(version + 1)
        return found + self._compared(version + 1, expected, before)

    def prompt(self, group: int) -> np.ndarray:
        """24 tokens that depend on the group."""
        return np.random.default_rng(group).integers(0, VOCAB - 1, 24).astype(np.int32)

    def _draw(self, group: int) -> list[Trajectory]:
        names = [f"{group}.{index}" for index in range(self._group_size)]
        prompt = self.prompt(group)
        builders = {
            name: TrajectoryBuilder(SampleId(group, index), f"p{group}", prompt)
            for index, name in enumerate(names)
        }
        for name in names:
            self.core.add(
                request(
                    name,
                    prompt,
                    max_tokens=self._tokens,
                    stop_tokens=(),
                    temperature=self.temperature,
                    seed=int(self._rng.integers(1 << 62)),
                )
            )
        ended: dict[str, Trajectory] = {}
        while len(ended) < self._group_size:
            for chunk in self.core.step():
                if chunk.request_id in builders:
                    chunk.append_to(builders[chunk.request_id])
                    if chunk.finish_reason is not None:
                        ended[chunk.request_id] = builders[chunk.request_id].finish("length")
        return [ended[name] for name in names]

    def _publish(self) -> Fingerprint:
        """Publish the trainer's weights with this fingerprint, and stage them."""
        expected = self.learner.fingerprint(self._dtype)
        manifest = self.publisher.publish(
            self.learner.tensors(), self.learner.policy_version, expected
        )
        self.core.stage_weights(manifest)
        return expected

    def _compared(
        self, version: int, expected: Fingerprint, before: Any = None
    ) -> list[WrongPolicy]:
        wrong = compare_weights(
            GENERATOR, version, expected=expected, found=self.core.fingerprint, before=before
        )
        return [] if wrong is None else [wrong]

    def _concluded(self, message: WrongPolicyFound) -> WrongPolicy:
        """As the controller concludes, after the generator has scored the samples again."""
        if not message.samples:
            return message.found
        scores = self.core.score(
            [
                ScoreRequest(
                    str(index),
                    decode_tokens(one.prompt_tokens),
                    decode_tokens(one.tokens),
                    SamplingParams(max_tokens=1, temperature=self.temperature, top_k_logprobs=4),
                )
                for index, one in enumerate(message.samples)
            ]
        )
        logprobs = tuple(encode_floats(score.logprobs) for score in scores)
        return conclusion(message, Rescored(GENERATOR, 1, self.core.policy_version, logprobs))
