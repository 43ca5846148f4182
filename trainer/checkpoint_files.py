"""Finds and removes checkpoints, without importing torch.

It reads names and `state.json` only.

The controller looks for checkpoints before it starts a process; `trainer.checkpoint` writes and
loads them.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from trainer.errors import CheckpointError

_NAME = re.compile(r"step-(\d+)")


def latest(checkpoints: Path) -> Path | None:
    """The newest complete checkpoint in a run's folder; None where there is none."""
    found = _complete(checkpoints)
    return found[-1] if found else None


def version_of(directory: Path) -> int:
    """Policy version of a complete checkpoint, the steps trained. Raises CheckpointError."""
    return int(read_state(directory)["policy_version"])


def prune(checkpoints: Path, keep: int) -> None:
    """Remove all but the newest `keep` complete checkpoints, and remains of a killed writer."""
    for old in _complete(checkpoints)[:-keep]:
        # state.json first, so that an interrupted removal leaves nothing that looks complete.
        (old / "state.json").unlink()
        shutil.rmtree(old, ignore_errors=True)
    for left in [*checkpoints.glob(".step-*.writing"), *checkpoints.glob(".step-*.old")]:
        shutil.rmtree(left, ignore_errors=True)


def read_state(directory: Path) -> dict[str, Any]:
    """The contents of `state.json`. Raises CheckpointError when the checkpoint is not complete."""
    try:
        state = json.loads((directory / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{directory} is not a complete checkpoint: {error}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{directory}/state.json is not an object")
    return state


def _complete(checkpoints: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    found = []
    for path in checkpoints.glob("step-*"):
        match = _NAME.fullmatch(path.name)
        if match and (path / "state.json").is_file():
            found.append((int(match[1]), path))
    return [path for _, path in sorted(found)]
