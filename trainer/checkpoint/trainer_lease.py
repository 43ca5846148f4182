"""Which trainer may write to a run's folder: the one that was started last.

A lost trainer is dead as far as the controller knows. On another node it may live on, cut off from
Ray but not from the disk. So the controller writes a random word to RUN/.trainer before it starts a
trainer, and tells it the word. A trainer that finds another word there writes no checkpoint and no
samples any more, and ends. It looks immediately before a checkpoint gets its name.
"""

from __future__ import annotations

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
    """Fence off all earlier trainers of a run; the word for the next one.

    Empty if the disk does not take it: then the next one is not fenced either.
    """
    word, path = secrets.token_hex(16), run / FENCE_FILE
    try:
        write_atomically(path, word)
    except OSError as error:
        logger.warning("%s cannot be written: %s", path, error.strerror)
        return ""
    return word


@contextlib.contextmanager
def fenced(run: Path) -> Iterator[str]:
    """As `raise_fence`, for what follows; if that fails, the fence is where it was before."""
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


class Fence:
    """What one trainer asks.

    Args:
        run: the run's folder.
        word: that the trainer was started with; empty: it is not fenced.
    """

    def __init__(self, run: Path, word: str) -> None:
        self._path = run / FENCE_FILE
        self._word = word

    def check(self) -> None:
        """Look whether this is still the run's trainer; reads a small file.

        A file that is missing or cannot be read fences nobody.

        Raises:
            Superseded: another one was started.
        """
        if not self._word:
            return
        try:
            with self._path.open("rb") as file:
                found = file.read(_BYTES)
        except OSError:
            return
        if found and found != self._word.encode():
            raise Superseded(
                f"another trainer was started in place of this one ({self._path}), which writes "
                "nothing more"
            )


UNFENCED = Fence(Path(), "")
"""For a trainer that nobody replaces."""
