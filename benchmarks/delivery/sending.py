"""The sender of `benchmarks.delivery`, which a process of its own imports without torch."""

import asyncio
from dataclasses import dataclass, replace

import numpy as np

from asyncrl.rollout.trajectory import Provenance, SampleId, Trajectory, TrajectoryBuilder
from asyncrl.wire import Line
from asyncrl.wire.messages.data import Received, TrajectoryDelivery, encode_trajectory
from asyncrl.wire.transport.keys import LineKeys
from asyncrl.wire.transport.outbox import ONE_PART
from benchmarks.plain_sockets import without_curve

VOCAB = 151_936
WINDOW = 64
"""Deliveries that a sender has under way."""
NAME = "generator-0"
"""The sender."""
GROUP = 8
"""Samples of a group."""
_PROMPT = 200
SECONDS = 300
"""Within which a trajectory arrives."""


@dataclass(frozen=True)
class Way:
    tcp: bool = False
    """Over loopback TCP; otherwise over ipc."""
    curve: bool = True
    together: int = 1
    """Trajectories that leave in one turn of the generator's event loop."""


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


def send(address: str, keys: LineKeys, tokens: int, count: int, way: Way) -> None:
    """Deliver `count` trajectories, with WINDOW of them unacknowledged. Runs in its own process."""

    async def deliver() -> None:
        line: Line[Received] = Line(address, keys, Received, together_bytes=ONE_PART)
        trajectory = trajectory_of(tokens)
        for index in range(count + WINDOW):
            if index >= WINDOW and index - WINDOW < count:
                await line.receive_within(SECONDS, what="an acknowledgement")
            if index < count:
                line.send_soon(delivery_of(replace(trajectory, id=sample_of(index))))
                if index % way.together == way.together - 1:
                    await asyncio.sleep(0)
        line.close()

    with without_curve(enabled=not way.curve):
        asyncio.run(deliver())
