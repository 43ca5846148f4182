"""The trainer's errors. `BatchError` and `NonFiniteError` name the group or the step.

TrainerError
├── UnsupportedModelError  the trainer cannot load or train this model
├── BatchError             a group was refused (size, tokens, version, twice): nothing accumulated
├── NonFiniteError         a loss or gradient is not finite: the weights are untouched
├── Superseded             another trainer was started in this one's place
├── RankLost               another rank of the trainer was lost, or is late
└── CheckpointError        a checkpoint cannot be read or resumed from
    └── CheckpointUnwritable  it cannot be written: the disk is full, read-only, or at fault
"""

from asyncrl.wire.messages.from_trainer import CheckpointFault


class TrainerError(Exception):
    """Root of the trainer's errors."""


class UnsupportedModelError(TrainerError):
    """The model cannot be loaded or trained; the message says why and what would work."""


class BatchError(TrainerError):
    """A group was refused; the step's accumulated gradient is unchanged."""


class NonFiniteError(TrainerError):
    """A loss or gradient is not finite; weights and optimizer are untouched."""


class Superseded(TrainerError):  # noqa: N818 - names the event
    """Another trainer was started in place of this one, which must stop writing."""


class RankLost(TrainerError):  # noqa: N818 - names the event
    """Another rank of the trainer did not take part in an exchange; the trainer is replaced."""


class CheckpointError(TrainerError):
    """A checkpoint could not be written, read or resumed from; the message names the file."""


class CheckpointUnwritable(CheckpointError):  # noqa: N818 - names the state
    """The disk refused a checkpoint; nothing of it is left."""

    def __init__(self, message: str, cause: CheckpointFault) -> None:
        super().__init__(message)
        self.cause = cause
