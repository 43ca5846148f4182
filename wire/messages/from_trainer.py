"""Trainer to controller."""

from __future__ import annotations

import msgspec

from wire.weights.layout import WeightManifest


class Message(msgspec.Struct, frozen=True, tag=lambda name: f"trainer.{name}"):
    """Base of this direction; tagged with the sender, as the controller's hub hears both."""


class TrainerReady(Message, frozen=True):
    """The model is loaded (or resumed) and its weights are published."""

    policy_version: int
    """Optimizer steps done: the next step to train."""
    manifest: WeightManifest
    data_address: str
    """Where generators deliver trajectories."""
    metrics_port: int | None = None


class StepFinished(Message, frozen=True):
    """An optimizer step is done and its weights are published."""

    step: int
    """The step trained, from 0; the new policy version is step + 1."""
    groups: tuple[int, ...]
    """The groups it consumed, exactly once each."""
    manifest: WeightManifest
    metrics: dict[str, float]


class CheckpointWritten(Message, frozen=True):
    """A checkpoint is complete on disk."""

    policy_version: int
    path: str


class TrainerReport(Message, frozen=True):
    """Once a second; also the sign of life."""

    policy_version: int
    queued_trajectories: int
    busy_seconds: float


class Failure(Message, frozen=True):
    """The process cannot go on and is about to end."""

    reason: str
    user_error: bool


class Goodbye(Message, frozen=True):
    """The process ends as asked."""

    policy_version: int


FromTrainer = TrainerReady | StepFinished | CheckpointWritten | TrainerReport | Failure | Goodbye
