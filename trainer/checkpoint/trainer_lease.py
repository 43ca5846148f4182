"""The right to write to a run's folder: only the trainer that was started last has it.

A trainer that the controller treats as lost may live on, on another node that still reaches the
disk. So the controller writes a random token to RUN/.trainer before it starts a trainer, and passes
it the token. A trainer that finds another one there, as before a rename, stops writing and exits.
"""

import contextlib
import logging
import secrets
from collections.abc import Iterator
from pathlib import Path

from asyncrl.trainer.base.errors import Superseded
from asyncrl.wire.transport.atomic_files import write_atomically

logger = logging.getLogger(__name__)

FENCE_FILE = ".trainer"
_BYTES = 64


def raise_fence(run: Path) -> str:
    """Fence off a run's earlier trainers; return the next one's token, empty if the disk fails."""
    word, path = secrets.token_hex(16), run / FENCE_FILE
    try:
        write_atomically(path, word)
    except OSError as error:
        logger.warning("%s cannot be written: %s", path, error.strerror)
        return ""
    return word


@contextlib.contextmanager
def fenced(run: Path) -> Iterator[str]:
    """Raise the fence for the block, and restore the previous one if the block fails."""
    path, before = run / FENCE_FILE, None
    with contextlib.suppress(OSError, UnicodeDecodeError):
        before = path.read_text(encoding="utf-8")
    word = raise_fence(run)
    try:
        yield word
    except BaseException:
        with contextlib.suppress(OSError):
            if before is None:
                path.unlink(missing_ok=True)
            else:
                write_atomically(path, before)
        raise


class TrainerLease:
    """Checks one trainer's token `word`; an empty one disables the fence."""

    def __init__(self, run: Path, word: str) -> None:
        self._path = run / FENCE_FILE
        self._word = word

    def check(self) -> None:
        """Raise Superseded if another trainer was started; passes if the file is unreadable."""
        if not self._word:
            return
        try:
            with self._path.open("rb") as file:
                found = file.read(_BYTES)
        except OSError:
            return
        if found and found != self._word.encode():
            raise Superseded(f"another trainer replaced this one ({self._path}); it stops writing")


UNFENCED = TrainerLease(Path(), "")
