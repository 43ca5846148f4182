"""The learner: sums the gradients of groups, then makes one exact step.

```
group ─► add_group ─► advantages ─► micro-batches ─► forward, backward ─► .grad += sums
group ─► add_group ─► ...                                                    │
                                   step: .grad / denominator, clip, AdamW ◄──┘ policy_version += 1
```

A step's denominator (response tokens, or samples) is known only when its last group has arrived, so
gradients are accumulated as sums and divided once. Whatever the order of groups and their
micro-batches, the gradient is that of the whole batch, up to rounding: no group waits for another,
and nothing is biased towards groups that finish early.

Synchronous and single-threaded: the trainer process decides when to call which method.
"""

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from asyncrl.rollout.trajectory import FloatArray, Provenance, Trajectory
from asyncrl.rollout.truncation import EVERYTHING, Truncation
from asyncrl.trainer.accumulation import NewGroup, Work, padded
from asyncrl.trainer.algorithms.base import Rewards
from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.trainer.base.errors import BatchError, CheckpointError, NonFiniteError
from asyncrl.trainer.checkpoint import checkpoint
from asyncrl.trainer.checkpoint.checkpoint import Snapshot
from asyncrl.trainer.checkpoint.format import files as checkpoint_files
from asyncrl.trainer.checkpoint.format.manifest import Published, settings_of
from asyncrl.trainer.checkpoint.trainer_lease import UNFENCED, TrainerLease
from asyncrl.trainer.loss import Objective
from asyncrl.trainer.model.model_loading import multiply_in_tf32
from asyncrl.trainer.optimizer.optimizer import Update, learning_rate
from asyncrl.trainer.optimizer.training_state import Shardings, TrainingState
from asyncrl.trainer.optimizer_updates import Stepping
from asyncrl.trainer.ranks import ALONE, World
from asyncrl.trainer.scoring import Models, for_own_device, load_models
from asyncrl.trainer.sharding.lockstep import Lockstep
from asyncrl.trainer.sharding.weights import Weights
from asyncrl.wire.records.step import LearnerMetrics, TrainedStep
from asyncrl.wire.weights.layout import Fingerprint

_ROUNDING = 1e-3
"""Tolerance for positive log-probabilities caused by rounding, in nats."""
_LAST_PROVENANCE = int(max(Provenance))
CENTRE = "advantage_centre"
"""Key of `Stepping.centre` in the state's values."""
_BASE = "base_weights"
Group = tuple[Sequence[Trajectory], FloatArray]


def check_group(
    trajectories: Sequence[Trajectory], rewards: Rewards, size: int, vocab_size: int, version: int
) -> int:
    """Check the distinct samples of a group of `size`, and their rewards; return the group's index.

    Raises BatchError, naming group or sample. No token may follow a newer policy than `version`.
    """
    groups = {t.id.group for t in trajectories}
    samples = {t.id.sample for t in trajectories}
    if len(groups) != 1 or len(samples) != len(trajectories):
        raise BatchError(f"not distinct samples of one group: {[str(t.id) for t in trajectories]}")
    group = groups.pop()
    if not len(trajectories) == len(rewards) == size:
        raise BatchError(
            f"group {group}: {len(trajectories)} trajectories and {len(rewards)} rewards, "
            f"expected {size} of each"
        )
    if not np.isfinite(rewards).all():
        raise BatchError(f"group {group}: rewards must be finite, got {rewards.tolist()}")
    for trajectory in trajectories:
        check_trajectory(trajectory, vocab_size, version)
    return group


def check_trajectory(trajectory: Trajectory, vocab_size: int, version: int) -> None:
    """Raise BatchError, naming the sample and the fault, if it cannot be trained on."""
    name = f"trajectory {trajectory.id}"
    if not len(trajectory.prompt_tokens) or not len(trajectory.tokens):
        raise BatchError(f"{name}: the prompt or the response is empty")
    for tokens in (trajectory.prompt_tokens, trajectory.tokens):
        first, last = tokens.min(), tokens.max()
        if first < 0 or last >= vocab_size:
            raise BatchError(
                f"{name}: token ids must lie in [0, {vocab_size}), "
                f"got {first} to {last}: is the engine serving another model?"
            )
    lowest, highest = trajectory.behaviour_logprobs.min(), trajectory.behaviour_logprobs.max()
    if not (math.isfinite(lowest) and math.isfinite(highest)):  # a NaN is both
        raise BatchError(f"{name}: behaviour log-probabilities are not finite")
    if highest > _ROUNDING:
        raise BatchError(f"{name}: a behaviour log-probability of {highest:.3g} is above 0")
    provenance = trajectory.provenance.max()
    if provenance > _LAST_PROVENANCE:
        raise BatchError(f"{name}: {provenance} is not a valid Provenance value")
    _check_observed(trajectory, name)
    _check_segments(trajectory, name)
    newest = trajectory.segments[-1].policy_version
    if newest > version:
        raise BatchError(
            f"{name}: drawn under version {newest}, "
            f"but the trainer is at {version}: was an old checkpoint restored?"
        )


def _check_observed(trajectory: Trajectory, name: str) -> None:
    """Check that observed tokens have log-probability 0, begin each context, and are not all."""
    trained = trajectory.trained
    if not trained.any():
        raise BatchError(f"{name}: every token is observed, so there is nothing to train on")
    wrong = np.flatnonzero(~trained & (trajectory.behaviour_logprobs != 0))
    if len(wrong):
        at = int(wrong[0])
        raise BatchError(
            f"{name}: token {at} is observed, so its log-probability is 0, "
            f"not {trajectory.behaviour_logprobs[at]:.3g}"
        )
    before = 0
    for place in trajectory.contexts:
        if not before < place < len(trained) or trained[place]:
            raise BatchError(
                f"{name}: a context must begin with an observed token after the one before it, "
                f"but the contexts begin at {list(trajectory.contexts)} of {len(trained)} tokens"
            )
        before = place


def _check_segments(trajectory: Trajectory, name: str) -> None:
    """Check that segments cover the response without gaps, and versions do not fall."""
    end, version = 0, trajectory.oldest_version
    for segment in trajectory.segments:
        if segment.start != end or segment.end <= end or segment.policy_version < version:
            raise BatchError(
                f"{name}: segments must cover the response in order, with versions that do not "
                f"fall, but after token {end} of version {version} comes {segment}"
            )
        end, version = segment.end, segment.policy_version
    if end != len(trajectory.tokens):
        raise BatchError(f"{name}: segments cover {end} of {len(trajectory.tokens)} tokens")


def state_of(models: Models, update: Update) -> TrainingState:
    """The learner's part of a checkpoint: policy or adapter, critic, and a reference that moves."""
    adapter = models.policy.adapter
    policy = models.policy.model if adapter is None else adapter.module()
    modules: dict[str, nn.Module] = {"policy": policy}
    optimizers: dict[str, Optimizer] = {"policy": update.optimizer}
    shardings = [update.sharding]
    if models.critic is not None:
        modules["critic"] = models.critic.module
        optimizers["critic"] = models.critic.update.optimizer
        shardings.append(models.critic.update.sharding)
    if models.reference is not None and models.reference.moves:
        modules["reference"] = models.reference.policy.model
    values: dict[str, Any] = {} if adapter is None else {_BASE: adapter.base_digest()}
    return TrainingState(modules, optimizers, values=values, sharding=Shardings(shardings))


def check_reference(directory: Path, models: Models, own: str, saved: str) -> None:
    """Check that the KL penalty's reference, which is not in the checkpoint, is the same as before.

    `own` and `saved` are digests of initial weights; an empty `saved` is unknown. Raises
    CheckpointError if the reference stays at the initial model and that model has changed.
    """
    reference, adapter = models.reference, models.policy.adapter
    if reference is None or reference.moves or not saved or own == saved:
        return
    if adapter is not None and adapter.config.adapter is None:
        return  # it is the adapter's model, which `restore` compares
    raise CheckpointError(
        f"{directory} belongs to a run that started from other weights than model.path has now, "
        "which would be the reference of its KL penalty; set model.path to the model that the run "
        "started from"
    )


class Learner:
    """Trains one model on groups of `group_size` trajectories.

    Log-probabilities are of the processed distribution (`temperature`, `truncation`: see
    `asyncrl.trainer.model.policy`). Schedules end at `total_steps` unless `schedule_steps` is set.
    With `world`, `step` and `save` are collectives, which may raise RankLost. `max_tokens` is the
    longest response, for `overlong_buffer`; `fence` stops a replaced trainer's checkpoints.

    Raises UnsupportedModelError if the model cannot be loaded or trained packed; TrainerError if
    the schedule has no end, or the objective does not fit the run.
    """

    def __init__(
        self,
        config: TrainerConfig,
        model_path: str,
        *,
        group_size: int,
        seed: int,
        temperature: float = 1.0,
        truncation: Truncation = EVERYTHING,
        total_steps: int | None = None,
        max_tokens: int | None = None,
        fence: TrainerLease = UNFENCED,
        world: World = ALONE,
    ) -> None:
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        config = for_own_device(config)
        world.agree(config.compute_dtype, "trainer.dtype, which auto chooses by each rank's GPU")
        torch.manual_seed(seed)
        learning_rate(config, config.warmup_steps, total_steps)  # refuses an impossible schedule
        self._config, self._model_path, self._group_size = config, model_path, group_size
        self._total_steps = total_steps
        self._settings = settings_of(
            config, group_size=group_size, seed=seed, temperature=temperature, truncation=truncation
        )
        self._objective = Objective(config, group_size, max_tokens)
        self.world = world
        self._models = load_models(
            config,
            model_path,
            world,
            temperature=temperature,
            truncation=truncation,
            with_reference=self._objective.algorithm.needs_reference,
            with_critic=self._objective.needs_critic,
        )
        self.policy = self._models.policy
        """The policy being trained; parameters have transformers' names."""
        if self.policy.device.type == "cuda" and config.compute_dtype == "float32":
            multiply_in_tf32(self._models.modules())  # only now: the loading compares in float32
        self._update = Update(self.policy.model, config, world)
        self.lockstep = Lockstep(world if self.policy.is_sharded else ALONE)
        self.weights = Weights(self.policy, world)
        """The weights to publish."""
        self._stepping = Stepping(
            config, self._objective, self._models, self._update, world, self.lockstep
        )
        self._state = state_of(self._models, self._update)
        self._snapshot = Snapshot()
        self._published: Published | None = None
        self.initial_weights = self.weights.fingerprint().whole
        """Digest of the weights that the run started from; empty if its checkpoint lacks it."""
        self._own_weights = self.initial_weights
        self.policy_version = 0
        """Number of steps done: the version of the weights that `tensors` yields."""
        self.peak_rates: Mapping[int, float] = {}
        """Overrides of the peak learning rate, keyed by the first step that uses each."""
        self._fence = fence
        self.discard()
        world.agree(self.initial_weights, "the weights of model.path")

    def check_trajectory(self, trajectory: Trajectory) -> None:
        """Raise BatchError if the trajectory cannot be trained on at this version."""
        check_trajectory(trajectory, self.policy.vocab_size, self.policy_version)

    def add_group(self, trajectories: Sequence[Trajectory], rewards: FloatArray) -> Tensor:
        """Call `add_groups` with one group and return its `[G, SUMS]`."""
        return self.add_groups([(trajectories, rewards)])[0]

    def add_groups(self, groups: Sequence[Group]) -> list[Tensor]:
        """Run forward and backward for complete groups, adding to the step's gradient sums.

        The groups' samples share micro-batches. Returns one `[G, SUMS]` per group
        (`trainer.objective.logprob_mismatch`), on the learner's device, that compares the engine's
        log-probabilities with the learner's; zeros where nothing was computed or an older policy
        drew a token. Raises BatchError if a group does not fit; then nothing was accumulated.
        """
        self._stepping.check()
        checked: list[NewGroup] = []
        numbers = set(self._sums.groups)
        for trajectories, rewards in groups:
            values = np.asarray(rewards, np.float64)
            size, vocab_size, version = (
                self._group_size,
                self.policy.vocab_size,
                self.policy_version,
            )
            group = check_group(trajectories, values, size, vocab_size, version)
            if group in numbers:
                raise BatchError(f"group {group} was already added to step {self.policy_version}")
            numbers.add(group)
            checked.append(NewGroup(group, trajectories, values))
        return self._sums.add(checked, self.policy_version)

    def step(self) -> LearnerMetrics:
        """Divide, clip and apply AdamW, then increment `policy_version`; return the metrics.

        With `ppo_epochs` or `minibatches` above 1 this takes several optimizer steps. Without any
        group (`batch.groups` 0) only the version grows: there is no decay and no momentum, so a
        step whose groups all failed does not stop the run.

        Raises NonFiniteError if a loss or the gradient is not finite. Weights, optimizer and
        version are unchanged and the gradient sums are dropped. After the first of several
        optimizer steps some weights have changed: the learner then accepts only `restore`.
        """
        self.settle()
        version = self.policy_version
        rate = learning_rate(self._config, version, self._total_steps, self.peak_rates)
        self._stepping.check()
        try:
            metrics = self._stepping.take(self._sums, version, rate)
        except NonFiniteError as error:
            self.discard()
            raise NonFiniteError(f"step {version}: {error}") from error
        self.policy_version += 1
        self._state.values[CENTRE] = self._stepping.centre
        if self._models.reference is not None:
            self._models.reference.follow(self.policy, self.policy_version)
        self._published = None
        self.discard()
        return metrics

    @torch.no_grad()
    def mean_loss(self, trajectories: Sequence[Trajectory]) -> float:
        """Return -log p of a trained token, in nats, mean over all ranks' samples. Collective.

        `trajectories` are this rank's. NaN if there are none on any rank.
        """
        count, own, budget = len(trajectories), np.zeros(2), self._config.micro_batch_tokens
        work = Work(list(trajectories), [0.0] * count, [(one, 0) for one in range(count)])
        for part in padded(work, budget, self.lockstep, self.policy_version):
            with self.lockstep.turn(is_empty=part.is_padding):
                scores, _ = self._models.score(part.trajectories)
            if not part.is_padding:
                own += float(-scores.logprobs.double().sum()), len(scores.logprobs)
        gathered = self.world.gather(own.tobytes(), "the loss of held-out samples")
        total, tokens = np.sum([np.frombuffer(one) for one in gathered], axis=0)
        return float(total / tokens) if tokens else math.nan

    def discard(self) -> None:
        """Drop the step's gradient sums and groups; the groups may be added again."""
        self._sums = self._stepping.empty()

    def pad(self) -> None:
        """Compute a micro-batch of padding: `lockstep` decided that all ranks compute one."""
        self._sums.pad(self.policy_version)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the published tensors, as `Weights.tensors` does."""
        return self.weights.tensors()

    def fingerprint(self, dtype: torch.dtype) -> Fingerprint:
        """Fingerprint the live weights as engines of this dtype hold them, tied ones per name."""
        found = self.weights.fingerprint(dtype)
        if self._config.lora.serve == "merged":  # otherwise an export has other weights
            self._published = Published(str(dtype).removeprefix("torch."), found.whole)
        return found

    def pending(self, *, copied: bool) -> checkpoint.Pending:
        """Prepare a checkpoint of this version. `write` writes it, perhaps on another thread.

        Groups added since the last step are not part of it. With `copied`, the state is copied to
        host memory and training may continue; `settle` waits for the copy. Without it, or if a rank
        lacks the memory, `step` must not be called before the checkpoint is written. The previous
        pending checkpoint must have been written or given up. Collective.
        """
        self.settle()
        adapter = self.policy.adapter
        contents = checkpoint.Contents(
            state=self._state,
            model=self.policy.model,
            model_path=self._model_path,
            policy_version=self.policy_version,
            settings=self._settings,
            initial_weights=self.initial_weights,
            published=self._published,
            adapter=None if adapter is None else adapter.settings(self._model_path),
        )
        return checkpoint.pending(contents, self._snapshot if copied else None, self.world)

    def write(
        self,
        pending: checkpoint.Pending,
        directory: Path,
        steps: Sequence[TrainedStep] = (),
        given_up: threading.Event | None = None,
    ) -> None:
        """Write a checkpoint to `directory` atomically, then remove all but `keep_checkpoints`.

        `steps` are the records of the steps since the last checkpoint. If another thread sets
        `given_up` during the write, the checkpoint is removed. Raises CheckpointUnwritable if the
        disk refused it, with existing checkpoints untouched; Superseded.
        """
        pending.write(directory, steps, given_up, self._fence)
        if self.world.leads:
            keep = self._config.keep_checkpoints
            checkpoint_files.prune(directory.parent, keep, written=directory)

    def save(self, directory: Path, steps: Sequence[TrainedStep] = ()) -> None:
        """Write a checkpoint of this version and wait for it. Raises the errors of `write`."""
        self.write(self.pending(copied=False), directory, steps)

    def settle(self) -> float:
        """Wait until weights and optimizer state may change; return the seconds waited."""
        return self._snapshot.wait()

    def restore(self, directory: Path) -> None:
        """Continue from a checkpoint, bit for bit; pending gradient sums are dropped.

        Raises CheckpointError if it is incomplete, or of another format, model or run.
        """
        self.settle()
        loaded = checkpoint.read(directory, self._state, self._settings, self.world.rank)
        if loaded.values.get(_BASE) != self._state.values.get(_BASE):
            raise CheckpointError(f"{directory} has an adapter of another model than model.path")
        check_reference(directory, self._models, self._own_weights, loaded.initial_weights)
        self.policy_version, self.initial_weights = loaded.policy_version, loaded.initial_weights
        self._published = None
        self._stepping.torn = False
        self._stepping.centre = float(loaded.values.get(CENTRE, 0.0))
        self.discard()
