"""Where a run keeps unfinished run-ahead: `unfinished/step-000010/GENERATOR.bin`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path


def unfinished_folder(run: Path, step: int) -> Path:
    """The folder of the files that go with the checkpoint after `step` steps."""
    return run / "unfinished" / f"step-{step:06d}"


def remove_unfinished(run: Path, *, unless: Callable[[int], bool]) -> None:
    """Remove the folders of steps for which `unless` is false. Raises OSError."""
    for folder in (run / "unfinished").glob("step-*"):
        number = folder.name.removeprefix("step-")
        if number.isdecimal() and not unless(int(number)):
            shutil.rmtree(folder)
