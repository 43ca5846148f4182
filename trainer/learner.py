"""The learner: groups in as they complete, one exact optimizer step when the batch is whole.

```
group ─► add_group ─► advantages ─► micro-batches ─► forward, backward ─► .grad += sums
group ─► add_group ─► ...                                                    │
                                   step: .grad / denominator, clip, AdamW ◄──┘ policy_version += 1
```

A step's denominator (response tokens, or samples) is known only when its last group is in, so
gradients are accumulated as sums and divided once. A sum does not depend on the order of its
terms: whatever order groups arrive in and however they are cut into micro-batches, the gradient
is that of the whole batch at once, up to rounding. Nothing waits, nothing is biased.

Synchronous and single-threaded; the process around it decides when to call what.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.trajectory import FloatArray, Trajectory
from trainer import checkpoint, checkpoint_files
from trainer.algorithms.base import Rewards, TokenBatch
from trainer.algorithms.factory import make
from trainer.config import TrainerConfig
from trainer.errors import BatchError, NonFiniteError, TrainerError
from trainer.optimizer import learning_rate, make_adamw, scale_and_clip
from trainer.packing import split_by_tokens
from trainer.policy import PackedBatch, Policy
from trainer.totals import StepTotals
from wire.records import LearnerMetrics

logger = logging.getLogger(__name__)


class Learner:
    """Trains one model on groups of `group_size` trajectories.

    Args:
        config: the trainer's settings.
        model_path: a Hugging Face directory or hub id of a causal language model.
        group_size: samples in every group.
        seed: of torch's generators (nothing here draws from them today).
        temperature: of sampling; log-probabilities are of the same processed distribution.
        top_p: of sampling; see `trainer.policy` for what a nucleus means to the trainer.
        total_steps: where cosine and linear schedules end unless `schedule_steps` says it.

    Raises:
        UnsupportedModelError: the model cannot be loaded or trained packed.
        TrainerError: the schedule has no end, or the algorithm cannot use groups of this size.
    """

    def __init__(
        self,
        config: TrainerConfig,
        model_path: str,
        *,
        group_size: int,
        seed: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        total_steps: int | None = None,
    ) -> None:
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        torch.manual_seed(seed)
        learning_rate(config, config.warmup_steps, total_steps)  # an impossible one fails here
        device = resolve_device(config.device)
        common: dict[str, Any] = {
            "dtype": config.dtype,
            "device": device,
            "temperature": temperature,
            "top_p": top_p,
        }
        self._config = config
        self._model_path = model_path
        self._group_size = group_size
        self._total_steps = total_steps
        self._setting = {
            "group_size": group_size,
            "seed": seed,
            "temperature": temperature,
            "top_p": top_p,
        }
        self._algorithm = make(config)
        try:
            self._algorithm.advantages(np.zeros(group_size))
        except ValueError as error:
            raise TrainerError(f"trainer.algorithm {config.algorithm!r}: {error}") from error
        self._policy = Policy(
            model_path, gradient_checkpointing=config.gradient_checkpointing, **common
        )
        self._reference: Policy | None = None
        if self._algorithm.needs_reference:
            self._reference = Policy(model_path, **common)
            self._reference.model.requires_grad_(requires_grad=False)
        self._optimizer = make_adamw(self._policy.model, config)
        self._version = 0
        self._reset()

    @property
    def _skips_zero_variance(self) -> bool:
        """A loss that reads the reference has a gradient without advantages too."""
        return self._config.skip_zero_variance_groups and not self._algorithm.needs_reference

    @property
    def policy_version(self) -> int:
        """Optimizer steps done; the version of the weights that `tensors` gives."""
        return self._version

    @property
    def model(self) -> torch.nn.Module:
        """The model being trained, with transformers' parameter names."""
        model: torch.nn.Module = self._policy.model
        return model

    def add_group(self, trajectories: Sequence[Trajectory], rewards: FloatArray) -> None:
        """Run forward and backward for a complete group; adds to the step's gradient sums.

        `rewards` is `[G]`, in the order of `trajectories`.

        Raises:
            BatchError: the group does not fit; nothing was accumulated.
            NonFiniteError: the model's log-probabilities of the group are not finite; the step's
                gradient sums hold part of the group and must be dropped (`discard`).
        """
        values = np.asarray(rewards, np.float64)
        group = self._checked(trajectories, values)
        advantages = self._algorithm.advantages(values)
        silent = not advantages.any()
        if not (silent and self._skips_zero_variance):
            for indices in split_by_tokens(
                [len(t.prompt_tokens) + len(t.tokens) for t in trajectories],
                self._config.micro_batch_tokens,
            ):
                self._accumulate([trajectories[i] for i in indices], advantages[indices], group)
        self._seen.add(group)
        self._totals.add_group(
            trajectories, values, policy_version=self._version, zero_variance=silent
        )

    def step(self) -> LearnerMetrics:
        """Divide, clip, AdamW; `policy_version` grows by one. Returns the step's metrics.

        Without any group the weights stay as they are (no decay, no momentum) and only the
        version grows: a step whose every group failed does not stop a run, and shows as
        `groups: 0`. A step whose groups all lack signal has gradient 0 and is an ordinary one.

        Raises:
            NonFiniteError: the gradient is not finite; weights, optimizer and version are
                unchanged and the gradient sums are dropped.
        """
        rate = learning_rate(self._config, self._version, self._total_steps)
        totals = self._totals
        by_token = self._config.loss_normalization == "token"
        denominator = float(max(1, totals.tokens if by_token else totals.samples))
        norm = 0.0
        if totals.groups:
            try:
                norm = self._apply(rate, denominator)
            except NonFiniteError as error:
                self._reset()
                raise NonFiniteError(f"step {self._version}: {error}") from error
        self._version += 1
        self._reset()
        return totals.metrics(denominator, grad_norm=norm, learning_rate=rate)

    def discard(self) -> None:
        """Drop the step's gradient sums and forget its groups: they may be added again."""
        self._reset()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight once (a tied one under its first name) and persistent buffers, HF names."""
        wanted = self._policy.model.state_dict(keep_vars=True)
        seen: set[int] = set()
        for name, tensor in wanted.items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield name, tensor.detach()

    def save(self, directory: Path) -> None:
        """Write a checkpoint of this version to `directory`, whole or not at all.

        Groups added since the last step are not part of it: at restore they must come again.
        Older checkpoints beside it are removed, `keep_checkpoints` stay.

        Raises:
            CheckpointError: it could not be written; what was there is untouched.
        """
        checkpoint.write(
            directory,
            checkpoint.Contents(
                model=self._policy.model,
                optimizer=self._optimizer.state_dict(),
                model_path=self._model_path,
                policy_version=self._version,
                setting=self._described(),
            ),
        )
        checkpoint_files.prune(directory.parent, self._config.keep_checkpoints)

    def restore(self, directory: Path) -> None:
        """Continue from a checkpoint, bit for bit; pending gradient sums are dropped.

        Raises:
            CheckpointError: not a complete checkpoint, of another format, of another model, or
                written under settings that would give another run.
        """
        loaded = checkpoint.read(directory, self._policy.model, self._described())
        self._optimizer.load_state_dict(loaded.optimizer)
        self._version = loaded.policy_version
        self._reset()

    def _checked(self, trajectories: Sequence[Trajectory], rewards: NDArray[np.float64]) -> int:
        """Refuse what cannot be trained on; returns the group's index."""
        groups = {t.id.group for t in trajectories}
        samples = {t.id.sample for t in trajectories}
        if len(groups) != 1 or len(samples) != len(trajectories):
            raise BatchError(
                f"not the distinct samples of one group: {[str(t.id) for t in trajectories]}"
            )
        group = groups.pop()
        if not len(trajectories) == len(rewards) == self._group_size:
            raise BatchError(
                f"group {group}: {len(trajectories)} trajectories and {len(rewards)} rewards, "
                f"expected {self._group_size} of each"
            )
        if group in self._seen:
            raise BatchError(f"group {group} was already added to step {self._version}")
        if not np.isfinite(rewards).all():
            raise BatchError(f"group {group}: rewards must be finite, got {rewards.tolist()}")
        for trajectory in trajectories:
            _check_trajectory(trajectory, self._policy.vocab_size, self._version)
        return group

    def _accumulate(
        self, trajectories: Sequence[Trajectory], advantages: Rewards, group: int
    ) -> None:
        """Forward and backward of one micro-batch; its sums go into gradients and totals."""
        packed = PackedBatch.of(
            [(t.prompt_tokens, t.tokens) for t in trajectories], self._policy.device
        )
        scores = self._policy.score(packed)
        batch = self._token_batch(
            scores.logprobs, trajectories, advantages, self._reference_logprobs(packed)
        )
        sums = self._algorithm.loss(batch)
        if not bool(torch.isfinite(sums.loss)):
            raise NonFiniteError(f"group {group}: the loss is {float(sums.loss.detach())}")
        sums.loss.backward()
        stale = np.concatenate([t.staleness(self._version) for t in trajectories])
        fresh = torch.from_numpy(stale == 0).to(self._policy.device)
        self._totals.add_tokens(batch, scores, sums, fresh)

    def _reference_logprobs(self, packed: PackedBatch) -> Tensor | None:
        """`[N]` under the initial model, where the algorithm asks for it."""
        if self._reference is None:
            return None
        with torch.no_grad():
            return self._reference.score(packed).logprobs

    def _token_batch(
        self,
        logprobs: Tensor,
        trajectories: Sequence[Trajectory],
        advantages: Rewards,
        reference_logprobs: Tensor | None,
    ) -> TokenBatch:
        lengths = np.array([len(t.tokens) for t in trajectories])
        by_token = self._config.loss_normalization == "token"
        weights = np.ones(len(lengths)) if by_token else 1.0 / lengths

        def put(values: NDArray[Any]) -> Tensor:
            return torch.from_numpy(values).to(logprobs.device, logprobs.dtype)

        return TokenBatch(
            logprobs=logprobs,
            behaviour_logprobs=put(np.concatenate([t.behaviour_logprobs for t in trajectories])),
            advantages=put(np.repeat(advantages, lengths)),
            weights=put(np.repeat(weights, lengths)),
            reference_logprobs=reference_logprobs,
        )

    def _apply(self, rate: float, denominator: float) -> float:
        parameters = [p for p in self._policy.model.parameters() if p.requires_grad]
        for parameter in parameters:
            # Without a gradient AdamW would leave the momentum out: a different step.
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        norm = scale_and_clip(parameters, denominator, self._config.max_grad_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        return norm

    def _reset(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        self._totals = StepTotals(self._algorithm.signals)
        self._seen: set[int] = set()

    def _described(self) -> dict[str, Any]:
        return {**self._config.model_dump(mode="json"), **self._setting}


def resolve_device(name: str) -> torch.device:
    """`auto` is a GPU where there is one; anything else is torch's name for a device."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _check_trajectory(trajectory: Trajectory, vocab_size: int, version: int) -> None:
    """Raises BatchError, naming the sample."""
    if not len(trajectory.prompt_tokens) or not len(trajectory.tokens):
        raise BatchError(f"trajectory {trajectory.id}: an empty prompt or response")
    for tokens in (trajectory.prompt_tokens, trajectory.tokens):
        if tokens.min() < 0 or tokens.max() >= vocab_size:
            raise BatchError(
                f"trajectory {trajectory.id}: token ids must lie in [0, {vocab_size}), "
                f"got {tokens.min()} to {tokens.max()}: is the engine serving another model?"
            )
    if not np.isfinite(trajectory.behaviour_logprobs).all():
        raise BatchError(f"trajectory {trajectory.id}: behaviour log-probabilities not finite")
    newest = max(segment.policy_version for segment in trajectory.segments)
    if newest > version:
        raise BatchError(
            f"trajectory {trajectory.id}: drawn under version {newest}, "
            f"but the trainer is at {version}: was an old checkpoint restored?"
        )
