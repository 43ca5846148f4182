"""Checkpoints of sharded states, and of writers that are killed: see `forked_states`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from forked_runs import forking

from asyncrl.trainer.base.errors import CheckpointError
from asyncrl.trainer.checkpoint.format.index import Chunk, Part, SavedTensor, merge


def test_a_checkpoint_is_whole_or_absent_and_read_by_any_number_of_ranks(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "forked_states", str(tmp_path)]
    with forking():
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def _part(*boxes: tuple[tuple[int, ...], tuple[int, ...]], shape: tuple[int, ...]) -> Part:
    chunks = tuple(Chunk("weights.safetensors", "x", offsets, sizes) for offsets, sizes in boxes)
    return Part({"x": SavedTensor("float32", shape, chunks)}, {})


def test_chunks_that_do_not_make_up_the_tensor_are_refused() -> None:
    halves = _part(((0, 0), (2, 3)), ((2, 0), (2, 3)), shape=(4, 3))
    assert merge([halves], {}).tensors["x"].shape == (4, 3)
    for wrong, says in (
        (_part(((0, 0), (2, 3)), shape=(4, 3)), "do not make up"),
        (_part(((0, 0), (2, 3)), ((1, 0), (2, 3)), shape=(4, 3)), "overlap"),
        (_part(((0, 0), (2, 3)), ((3, 0), (2, 3)), shape=(4, 3)), "outside"),
    ):
        with pytest.raises(CheckpointError, match=says):
            merge([wrong], {})
    with pytest.raises(CheckpointError, match="disagree"):
        merge([halves, _part(((0, 0), (4, 4)), shape=(4, 4))], {})
