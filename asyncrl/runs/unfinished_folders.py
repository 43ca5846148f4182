"""Where a run keeps unfinished samples.

unfinished/step-000010/GENERATOR.bin   run-ahead that goes with a checkpoint
unfinished/moved/GENERATOR.bin         what a generator that leaves had
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path

from asyncrl.trainer.checkpoint.format.files import by_step, path_of


def unfinished_folder(run: Path, step: int) -> Path:
    """The folder of the files that go with the checkpoint after `step` steps; named alike."""
    return path_of(run / "unfinished", step)


def moved_folder(run: Path) -> Path:
    """The folder of the samples of generators that leave."""
    return run / "unfinished" / "moved"


def remove_moved(run: Path) -> None:
    """Remove that folder, if it is there. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(moved_folder(run))


def remove_unfinished(run: Path, *, unless: Callable[[int], bool]) -> None:
    """Remove the folders of steps for which `unless` is false. Raises OSError."""
    for step, folder in by_step(run / "unfinished").items():
        if not unless(step):
            shutil.rmtree(folder)
