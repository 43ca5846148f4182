"""Which checkpoints are kept for their accuracy (`evaluation.keep_best`).

The controller, which evaluates, writes `checkpoints/best.json`; whoever removes old checkpoints
reads it. Without the file none is spared.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from asyncrl.wire.transport.atomic_files import write_atomically

logger = logging.getLogger(__name__)

NAME = "best.json"


class BestCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of best.json."""

    every: int
    """`evaluation.every`: multiples of it are evaluated."""
    known: int
    """The accuracy of steps up to this one is known, or will never be."""
    step: int | None = None
    """The step with the best accuracy; None: there is none yet."""
    accuracy: float | None = None
    """Its accuracy, 0 to 1."""
    of: str = ""
    """The set that it was measured on."""

    def spares(self, step: int) -> bool:
        """Whether the checkpoint of a step must stay: it is the best, or may turn out to be."""
        return step == self.step or (step > self.known and step % self.every == 0)


def write_best(checkpoints: Path, best: BestCheckpoint | None) -> None:
    """Replace best.json, or remove it. Raises OSError."""
    if best is None:
        (checkpoints / NAME).unlink(missing_ok=True)
    else:
        text = msgspec.json.format(msgspec.json.encode(best), indent=2).decode()
        write_atomically(checkpoints / NAME, text + "\n")


def read_best(checkpoints: Path) -> BestCheckpoint | None:
    """The contents of best.json; None if there is none.

    Raises:
        OSError, msgspec.DecodeError: it cannot be read.
    """
    try:
        return msgspec.json.decode((checkpoints / NAME).read_bytes(), type=BestCheckpoint)
    except FileNotFoundError:
        return None


def spared(checkpoints: Path) -> Callable[[int], bool]:
    """Whether the checkpoint of a step must stay. If best.json cannot be read, all must."""
    try:
        best = read_best(checkpoints)
    except (OSError, msgspec.DecodeError) as error:
        logger.warning("no checkpoint is removed: %s: %s", checkpoints / NAME, error)
        return lambda _: True
    return (lambda _: False) if best is None else best.spares
