"""A finished sample at the generator that holds it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from asyncrl.generator.conversation import Episode
from asyncrl.rewards.calls import Reward
from asyncrl.rollout.trajectory import VerifiableTrajectory
from asyncrl.wire.messages.to_generator import PromptPayload


@dataclass(frozen=True, slots=True)
class HeldSample:
    """A finished sample that was not delivered yet."""

    trajectory: VerifiableTrajectory
    prompt: PromptPayload
    reward: asyncio.Task[Reward]
    """Computed after the sample has left its slot; raises AsyncrlError."""
    deadline_seconds: float | None = None
    """That it has if it is generated on."""
    episode: Episode | None = None
    """What it and its environment have said; None: it has no environment."""

    def close(self) -> None:
        """It will not be verified any more: end its environment."""
        if self.episode is not None:
            self.episode.close()

    def without_versions_after(self, version: int) -> HeldSample:
        """The same sample, now that the policies of later versions are gone."""
        trajectory = self.trajectory.without_versions_after(version)
        return self if trajectory is self.trajectory else replace(self, trajectory=trajectory)
