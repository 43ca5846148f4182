"""Controller to trainer."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of this direction."""


class StepPlan(Message, frozen=True):
    """The groups that a step trains on; sent when the set is final, before or after they arrive."""

    step: int
    groups: tuple[int, ...]


class SaveCheckpoint(Message, frozen=True):
    """Write a checkpoint before taking the next step."""


class Shutdown(Message, frozen=True):
    """End, in order: answer with `Goodbye`."""

    checkpoint: bool
    """Write a checkpoint first."""


ToTrainer = StepPlan | SaveCheckpoint | Shutdown
