"""How long deltas are between consecutive steps of real training, in the engines' bfloat16.

Two models take steps of the project's trainer (AdamW in float32, a 7B recipe's learning rate of
1e-6) on samples of their own: the built-in one, which is trained, with the rewards of its task, and
a random one with weights of the scale that models of 7B have (standard deviation 0.02), with random
rewards. Each step is published as a run does, and the bytes are those that a node would be sent.

The first steps of AdamW are the longest, at the learning rate in each element, so the shares of
later steps are no larger.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asyncrl.engine.protocol import GenerateRequest, SamplingParams
from asyncrl.engine.torch.core import CoreSettings, DecodeCore
from asyncrl.engine.torch.model import load_model
from asyncrl.rewards.functions import arithmetic
from asyncrl.rollout.trajectory import SampleId, Trajectory, TrajectoryBuilder
from asyncrl.tasks.config import TaskConfig
from asyncrl.tasks.loading import load_task
from asyncrl.tasks.model import default_cache_dir, ensure_builtin_model
from asyncrl.tasks.prompts import Prompt
from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.trainer.learner import Learner
from asyncrl.wire.messages.chain import Ask
from asyncrl.wire.weights.chain.source import PublishedVersions
from asyncrl.wire.weights.chunks import Grid, name_of
from asyncrl.wire.weights.layout import SHARED_MEMORY, WeightManifest
from asyncrl.wire.weights.writer import WeightPublisher

LEARNING_RATE = 1e-6
_GROUPS, _GROUP_SIZE, _TOKENS = 4, 4, 48
_MAX_LEN = 160

Reward = Callable[[Prompt, Trajectory], float]


def share_of(versions: PublishedVersions, before: WeightManifest, after: WeightManifest) -> float:
    """Bytes that a node which holds one version is sent of the next, over all bytes."""
    sent = 0
    for index in range(Grid(after.nbytes).count):
        held, base = versions.to_send(Ask(name_of(after), index, name_of(before)))
        sent += sum(map(len, held.encoded(index, base)[1]))
    return sent / after.nbytes


class _Run:
    """Samples, steps and publishes in one process."""

    def __init__(
        self, model: str, directory: Path, prompts: Sequence[Prompt], stop: tuple[int, ...]
    ) -> None:
        cpu = torch.device("cpu")
        config = TrainerConfig(learning_rate=LEARNING_RATE, device="cpu", warmup_steps=0)
        self.learner = Learner(config, model, group_size=_GROUP_SIZE, seed=0)
        slots = _GROUPS * _GROUP_SIZE
        loaded = load_model(
            model, slots=slots + 2, max_len=_MAX_LEN, device=cpu, dtype=torch.bfloat16
        )
        self.core = DecodeCore(loaded, CoreSettings(None, 0, 4096, 16, 8), None, seed=0)
        self.publisher = WeightPublisher(directory, "deltas", dtype=torch.bfloat16)
        self._prompts, self._stop = prompts, stop

    def publish(self) -> WeightManifest:
        version = self.learner.policy_version
        manifest = self.publisher.publish(self.learner.tensors(), version)
        self.core.stage_weights(manifest)
        self.core.install_weights(version)
        return manifest

    def step(self, reward: Reward) -> float:
        version = self.learner.policy_version
        builders: dict[str, TrajectoryBuilder] = {}
        for group in range(_GROUPS):
            prompt = self._prompts[(version * _GROUPS + group) % len(self._prompts)]
            for index in range(_GROUP_SIZE):
                name = f"{group}.{index}"
                sample = SampleId(version * _GROUPS + group, index)
                builders[name] = TrajectoryBuilder(sample, prompt.prompt_id, prompt.tokens)
                sampling = SamplingParams(
                    max_tokens=_TOKENS,
                    stop_tokens=self._stop,
                    top_k_logprobs=8,
                    seed=1000 * version + 10 * group + index,
                )
                self.core.add(GenerateRequest(name, "", prompt.tokens, sampling))
        ended: dict[str, Trajectory] = {}
        while len(ended) < len(builders):
            for chunk in self.core.step():
                chunk.append_to(builders[chunk.request_id])
                if chunk.finish_reason is not None:
                    ended[chunk.request_id] = builders[chunk.request_id].finish(chunk.finish_reason)
        for group in range(_GROUPS):
            prompt = self._prompts[(version * _GROUPS + group) % len(self._prompts)]
            drawn = [ended[f"{group}.{index}"] for index in range(_GROUP_SIZE)]
            rewards = np.array([reward(prompt, one) for one in drawn], np.float32)
            self.learner.add_group(drawn, rewards)
        return float(self.learner.step().learning.grad_norm)


def steps(
    model: str, prompts: Sequence[Prompt], reward: Reward, count: int, stop: tuple[int, ...] = ()
) -> dict[str, Any]:
    """The shares of `count` consecutive steps, and the scale of the weights."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as folder:
        run, versions = _Run(model, Path(folder), prompts, stop), PublishedVersions()
        try:
            before = run.publish()
            versions.add(before)
            shares, norms = [], []
            for _ in range(count):
                norms.append(run.step(reward))
                after = run.publish()
                versions.add(after)
                shares.append(share_of(versions, before, after))
                before = after
        finally:
            run.publisher.close()
        matrices = [t for _, t in run.learner.tensors() if t.ndim > 1]
        scale = float(torch.cat([t.flatten() for t in matrices]).std())
    return {
        "parameters": sum(t.numel() for _, t in run.learner.tensors()),
        "standard_deviation": scale,
        "shares": shares,
        "gradient_norms": norms,
    }


def measure(make_random: Callable[[Path], str], count: int) -> dict[str, Any]:
    """Both models. `make_random` saves the random one into a folder and returns its path."""
    trained = str(ensure_builtin_model(default_cache_dir()))
    task = load_task(TaskConfig(), trained, seed=0)

    def right(prompt: Prompt, drawn: Trajectory) -> float:
        return arithmetic("", task.tokenizer.decode(drawn.tokens[:-1]), prompt.example)

    found = {"trained": steps(trained, task.train, right, count, task.stop_tokens)}
    with tempfile.TemporaryDirectory() as folder:
        rng = np.random.default_rng(0)
        prompts = [
            Prompt(f"p{i}", rng.integers(0, 4000, 24).astype(np.int32), "", {}) for i in range(8)
        ]
        model = make_random(Path(folder))
        found["random"] = steps(model, prompts, lambda *_: float(rng.normal()), count)
    return found
