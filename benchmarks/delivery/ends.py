"""Trajectories like real ones, and the trainer's end that takes them in."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from asyncrl.rollout.trajectory import Provenance, SampleId, Trajectory, TrajectoryBuilder
from asyncrl.trainer.objective.group_check import check_trajectory
from asyncrl.trainer_process.delivery_check import Intake
from asyncrl.trainer_process.group_queue import GroupQueue
from asyncrl.wire.messages.data import TrajectoryDelivery
from asyncrl.wire.messages.frames import digest_of, encode_trajectory
from asyncrl.wire.messages.to_trainer import Expect, ExpectedSample

VOCAB = 151_936
MAX_BYTES = 64 << 20
"""Longest message; far above the longest of the benchmark."""
WINDOW = 64
"""Deliveries that a sender has under way."""
NAME = "generator-0"
"""The sender."""
GROUP = 8
"""Samples of a group."""
_PROMPT = 200


def trajectory_of(tokens: int) -> Trajectory:
    """A trajectory of random tokens, half of them drafted.

    Its stored top-K is empty: that does not travel to the trainer.
    """
    rng = np.random.default_rng(tokens)
    builder = TrajectoryBuilder(sample_of(0), "train-17", rng.integers(0, VOCAB, _PROMPT, np.int32))
    builder.append(
        tokens=rng.integers(0, VOCAB, tokens, np.int32),
        logprobs=-rng.exponential(1.0, tokens).astype(np.float32),
        topk_ids=np.empty((tokens, 0), np.int32),
        topk_logprobs=np.empty((tokens, 0), np.float32),
        noise_seeds=np.zeros(tokens, np.uint64),
        provenance=rng.integers(0, Provenance.OBSERVED, tokens, np.uint8),
        policy_version=0,
    )
    return builder.finish("stop")


def sample_of(index: int) -> SampleId:
    """The samples of group 0 come first."""
    return SampleId(*divmod(index, GROUP))


def delivery_of(trajectory: Trajectory) -> TrajectoryDelivery:
    return encode_trajectory(trajectory, reward=1.0, step=0, terms=(1.0,))


class TrainerEnd:
    """The intake and the queue of a trainer at version 0, which takes each group at once."""

    def __init__(self, trajectory: Trajectory) -> None:
        self._queue = GroupQueue(GROUP)
        self._intake = Intake(
            self._queue,
            lambda one: check_trajectory(one, VOCAB, 0),
            steps=1,
            functions=1,
        )
        self._trajectory = trajectory
        self._ordered = 0

    def order(self) -> Trajectory:
        """The next sample, which is reported and ordered."""
        trajectory = replace(self._trajectory, id=sample_of(self._ordered))
        self._ordered += 1
        digest = digest_of(encode_trajectory(trajectory, reward=0.0, step=0))
        expected = ExpectedSample(trajectory.id, len(trajectory.tokens), 0, digest)
        for _ in self._intake.expect(Expect(0, NAME, (expected,)), next_step=0).here:
            raise AssertionError("nothing was delivered yet")
        return trajectory

    def take_in(self, delivery: TrajectoryDelivery) -> None:
        """Keep a delivery that was ordered. Raises DeliveryNotKept."""
        if not self._intake.receive(NAME, delivery, next_step=0):
            raise AssertionError(f"sample {delivery.sample} was not ordered")
        self._queue.take(0, allowed=None)
