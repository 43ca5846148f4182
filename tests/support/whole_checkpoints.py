"""Checkpoints that are whole by their manifest and hold no weights, and ways to damage one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from asyncrl.trainer.checkpoint.format.files import path_of
from asyncrl.trainer.checkpoint.format.manifest import write_manifest

WEIGHTS = "state/weights-00000-00001.safetensors"
TRAINING = "state/training-00000-00001.safetensors"


def write_whole(
    checkpoints: Path, *steps: int, settings: dict[str, Any] | None = None
) -> list[Path]:
    """Make a whole checkpoint of each step."""
    made = []
    for step in steps:
        directory = path_of(checkpoints, step)
        for name in (WEIGHTS, TRAINING, "model/config.json", "state/index.json"):
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_bytes(f"{name} of step {step}".encode() * 100)
        write_manifest(directory, policy_version=step, settings=settings or {})
        made.append(directory)
    return made


def truncate(path: Path) -> None:
    """Cut a file to its half."""
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
