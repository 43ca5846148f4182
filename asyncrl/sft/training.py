"""The loop of supervised fine-tuning, in each rank's process.

    python -m asyncrl.sft.training RANK_JSON    a rank but the first, started by that one

An example is a group of one sample whose advantage is 1 and whose correction is 1, so the learner's
policy gradient is that of the mean of -log p. The order of the examples depends on the seed and the
step only: a resumed run continues where it stopped, and ranks need not talk about it.
"""

import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from asyncrl.config.run_config import RunConfig, load_config
from asyncrl.launch.start_order import configure_allocator
from asyncrl.tasks.examples import Examples, load_examples
from asyncrl.tasks.model_tokenizer import load_tokenizer
from asyncrl.tasks.prompts import prompt_order
from asyncrl.trainer.base.errors import CheckpointUnwritable
from asyncrl.trainer.checkpoint.format.files import path_of
from asyncrl.trainer.checkpoint.trainer_lease import TrainerLease
from asyncrl.trainer.learner import Learner
from asyncrl.trainer.model.memory_estimate import keep_freed_memory
from asyncrl.trainer.ranks.world import ALONE, World, join
from asyncrl.trainer.scoring import resolve_device
from asyncrl.trainer.sharding.lockstep import NextAction, RankStatus, RankWork
from asyncrl.user_code.process_tree import end_with_parent
from asyncrl.wire.records.step import LearnerMetrics


class Watcher:
    """The use of a rank's numbers: none, but on the first rank."""

    say: Callable[[str], None] = print  # to the rank's log

    @property
    def is_stopped(self) -> bool:
        """True if the user wants the run to end after this step."""
        return False

    def has_loss(self, version: int) -> bool:  # noqa: ARG002
        """True if this version's held-out loss is known, from before a resume."""
        return False

    def finished(self, step: int, metrics: LearnerMetrics, seconds: float) -> None:
        """Note that a step (from 0) is done."""

    def evaluated(self, version: int, loss: float) -> None:
        """Note the held-out loss after this many steps; NaN without held-out examples."""


class Rank(msgspec.Struct, frozen=True, kw_only=True):
    """The order by which the first rank starts another."""

    run: str
    model_path: str
    most_tokens: int | None
    rank: int
    meeting: str
    fence: str
    threads: int
    parent: int
    resume_from: int | None


class SftTraining:
    """One rank's learner and examples. All ranks call the same methods in the same order."""

    def __init__(
        self,
        config: RunConfig,
        examples: Examples,
        model_path: str,
        *,
        world: World = ALONE,
        threads: int | None = None,
        fence: str = "",
        resume_from: int | None = None,
    ) -> None:
        self._config, self._world, self._examples = config, world, examples
        world.agree(examples.digest, "the examples, which each rank reads and tokenises")
        self.learner = Learner(
            config.trainer.model_copy(update={"threads": threads or config.trainer.threads}),
            model_path,
            group_size=1,
            seed=config.run.seed,
            total_steps=config.run.steps,
            fence=TrainerLease(config.directory, fence),
            world=world,
        )
        self._checkpoints = config.directory / "checkpoints"
        if resume_from is not None:
            self.learner.restore(path_of(self._checkpoints, resume_from))

    def train(self, watcher: Watcher) -> None:
        """Train to the last step, or until the first rank's watcher is stopped, and save."""
        config, learner = self._config, self.learner
        steps, every = config.run.steps, config.trainer.checkpoint_every
        saved, failures, retry = learner.policy_version, 0, None
        self._evaluate(watcher)
        while learner.policy_version < steps and not self._world.decided(
            watcher.is_stopped, "whether the user ends the run"
        ):
            began, version = time.monotonic(), learner.policy_version
            metrics = self.step()
            watcher.finished(version, metrics, time.monotonic() - began)
            version += 1
            if version % every == 0 or version in (steps, retry):
                if (error := self._save()) is None:
                    saved, failures, retry = version, 0, None
                elif version < steps:  # as in a run of RL
                    retry = version + min(2**failures, every)
                    failures += 1
                    watcher.say(f"{error}; training continues; next attempt after step {retry}")
            self._evaluate(watcher)
        if learner.policy_version != saved and (error := self._save()) is not None:
            raise error

    def _save(self) -> CheckpointUnwritable | None:
        """Write a checkpoint; return the error of a disk that refuses it, the same on each rank."""
        found = None
        try:
            self.learner.save(path_of(self._checkpoints, self.learner.policy_version))
        except CheckpointUnwritable as error:
            found = error
        if not self._world.any(found is not None, "whether the disk took the checkpoint"):
            return None
        return found or CheckpointUnwritable("the disk refused another rank's part", "io_error")

    def step(self) -> LearnerMetrics:
        """Make an optimizer step of the next examples of all ranks."""
        version, size = self.learner.policy_version, self._config.sft.batch_size
        train, seed = self._examples.train, self._config.run.seed
        mine = range(version * size, (version + 1) * size)[self._world.rank :: self._world.size]
        samples = [
            train[prompt_order(len(train), seed, position)].trajectory(position, version)
            for position in mine
        ]
        self.learner.add_groups([([one], np.zeros(1, np.float32)) for one in samples])
        lockstep = self.learner.lockstep
        while lockstep.is_shared:
            action = lockstep.agree(RankStatus(RankWork.DONE))
            if action is NextAction.FINISH:
                break
            self.learner.pad()
        return self.learner.step()

    def _evaluate(self, watcher: Watcher) -> None:
        """Measure the held-out loss of this version, if it is due and not known."""
        version, evaluation = self.learner.policy_version, self._config.evaluation
        steps = self._config.run.steps
        is_due = version % (evaluation.every or steps) == 0 and (version or evaluation.at_start)
        if (is_due or version == steps) and not self._world.decided(
            watcher.has_loss(version), "whether the held-out loss is known"
        ):
            chosen = self._examples.held_out[: evaluation.prompts]
            mine = enumerate(chosen[self._world.rank :: self._world.size])
            loss = self.learner.mean_loss([one.trajectory(n, version) for n, one in mine])
            watcher.evaluated(version, loss)


def prepare_memory(config: RunConfig) -> None:
    """Let the allocators of this process keep and grow what they have, as in a run of RL."""
    configure_allocator(os.environ)
    if resolve_device(config.trainer.device).type == "cpu":
        keep_freed_memory()


def join_ranks(config: RunConfig, meeting: Path, rank: int) -> World:
    """Meet the other ranks. Raises RankLost if one does not come."""
    return join(
        meeting,
        rank,
        config.trainer.ranks,
        on_gpu=resolve_device(config.trainer.device).type == "cuda",
        join_seconds=config.launcher.startup_seconds,
        seconds=config.trainer.rank_seconds,
    )


def main(text: str) -> None:
    """Be a rank but the first."""
    spec = msgspec.json.decode(text, type=Rank)
    end_with_parent(spec.parent, signal.SIGKILL)
    config = load_config(Path(spec.run) / "config.yaml")
    logging.basicConfig(level=config.monitoring.log_level.upper(), stream=sys.stderr)
    prepare_memory(config)
    tokenizer = load_tokenizer(spec.model_path)
    examples = load_examples(config.task, config.sft, tokenizer, config.run.seed, spec.most_tokens)
    world = join_ranks(config, Path(spec.meeting), spec.rank)
    SftTraining(
        config,
        examples,
        spec.model_path,
        world=world,
        threads=spec.threads,
        fence=spec.fence,
        resume_from=spec.resume_from,
    ).train(Watcher())
    world.close()


if __name__ == "__main__":
    main(sys.argv[1])
