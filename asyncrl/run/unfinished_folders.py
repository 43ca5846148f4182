"""Where a run keeps unfinished run-ahead: `unfinished/step-000010/GENERATOR.bin`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from trainer.checkpoint_files import by_step, path_of


def unfinished_folder(run: Path, step: int) -> Path:
    """The folder of the files that go with the checkpoint after `step` steps; named alike."""
    return path_of(run / "unfinished", step)


def remove_unfinished(run: Path, *, unless: Callable[[int], bool]) -> None:
    """Remove the folders of steps for which `unless` is false. Raises OSError."""
    for step, folder in by_step(run / "unfinished").items():
        if not unless(step):
            shutil.rmtree(folder)
