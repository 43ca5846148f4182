"""Trained samples of numbered steps, and a sample log that holds them."""

from __future__ import annotations

from pathlib import Path

from asyncrl.monitoring.records.samples import SampleSegment
from asyncrl.monitoring.records.trained_samples import SampleFiles, TrainedSample


def record(step: int, sample: int = 0, *, response: str = "é\n") -> TrainedSample:
    """One sample that a step has used."""
    return TrainedSample(
        step=step, group=step, sample=sample, prompt_id="p", prompt="1+1=", response=response,
        reward=0.5, finish_reason="stop", generator="g0", prompt_length=4, response_length=2,
        segments=[SampleSegment(step, 0, 2)], sampled=1, drafted=1, verified=0,
    )  # fmt: skip


def written(folder: Path, *, steps: int = 40, limit_bytes: int = 1 << 30) -> None:
    """Write two samples of each step."""
    files = SampleFiles(folder, limit_bytes=limit_bytes)
    for step in range(steps):
        files.append([record(step, 0), record(step, 1)])
    files.close()
