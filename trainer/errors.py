"""What can go wrong in the trainer.

TrainerError
├── UnsupportedModelError        the trainer cannot train this model
├── BatchError        a group does not fit (size, tokens, version, twice): nothing was accumulated
├── NonFiniteError    a gradient or loss is not a number: the weights were not touched
└── CheckpointError   a checkpoint cannot be written, read or resumed from

`BatchError` and `NonFiniteError` name the group or the step.
"""

from __future__ import annotations


class TrainerError(Exception):
    """Root of what the trainer raises."""


class UnsupportedModelError(TrainerError):
    """The model cannot be loaded or trained; the message says why and what would work."""


class BatchError(TrainerError):
    """A group was refused; the step's accumulated gradient is as it was before."""


class NonFiniteError(TrainerError):
    """A gradient is not finite, so the step was refused; weights and optimizer are untouched."""


class CheckpointError(TrainerError):
    """A checkpoint could not be written, read or resumed from; the message names the file."""
