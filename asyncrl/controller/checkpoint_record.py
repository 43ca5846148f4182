"""What became of the trainer's checkpoints, for the user."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from asyncrl.trainer.checkpoint.format.files import newest_complete
from asyncrl.wire.messages.from_trainer import CheckpointFailed, CheckpointWritten


class CheckpointRecord:
    """Says once when checkpoints begin to fail, for each cause, and once when they succeed again.

    Args:
        directory: of all checkpoints of the run.
        say: shows a sentence to the user.
    """

    def __init__(self, directory: Path, say: Callable[[str], None]) -> None:
        self._directory = directory
        self._say = say
        self.listeners: list[Callable[[CheckpointWritten | CheckpointFailed], None]] = []
        """Are told of every attempt."""
        self._failed: CheckpointFailed | None = None

    def written(self, message: CheckpointWritten) -> None:
        """The trainer wrote a checkpoint."""
        if self._failed is not None:
            self._say(f"checkpoints can be written now: {message.path}")
        self._failed = None
        self._tell(message)

    def _tell(self, message: CheckpointWritten | CheckpointFailed) -> None:
        for listener in self.listeners:
            listener(message)

    def failed(self, message: CheckpointFailed) -> None:
        """The disk did not take a checkpoint."""
        if self._failed is None or self._failed.cause != message.cause:
            self._say(
                f"{message.reason}. Training continues; the next attempt is after step "
                f"{message.retry_version} or at the end of the run; {self._newest()}"
            )
        self._failed = message
        self._tell(message)

    def missing(self, steps: int) -> str | None:
        """Why the state after `steps` steps is not saved; None if it is, or there is none."""
        newest = newest_complete(self._directory)
        if steps == 0 or (newest is not None and newest >= steps):
            return None
        why = "the trainer ended without saving it; see logs/trainer.log"
        if self._failed is not None:
            why = self._failed.reason
        place = "from the first step" if newest is None else "from there"
        return (
            f"the last state of the run, after step {steps}, is not saved: {why}; "
            f"{self._newest()}. Once checkpoints can be written, continue {place} with --resume"
        )

    def _newest(self) -> str:
        newest = newest_complete(self._directory)
        if newest is None:
            return "there is no checkpoint yet"
        return f"the newest checkpoint is that of step {newest}"
