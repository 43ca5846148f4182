"""Controller to trainer."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of this direction."""


class StepPlan(Message, frozen=True):
    """The groups that a step trains on. Sent once per step, when the set is final."""

    step: int
    groups: tuple[int, ...]


class Shutdown(Message, frozen=True):
    """End the process; answer with `Goodbye`."""

    checkpoint: bool
    """Write a checkpoint first."""


ToTrainer = StepPlan | Shutdown
