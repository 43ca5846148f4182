"""A few trajectories kept for the report, chosen evenly over the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cache.trajectory import Trajectory
from monitoring.config import MonitoringConfig
from monitoring.samples import SampleRecord, append_sample
from scheduler.messages.to_generator import PromptPayload


class SampleLog:
    """Writes the first samples of every n-th step to `samples.jsonl`, with each token's story."""

    def __init__(
        self, directory: Path, tokenizer: Any, *, steps: int, config: MonitoringConfig
    ) -> None:
        self._path = directory / "samples.jsonl"
        self._tokenizer = tokenizer
        self._every = max(1, steps // max(1, config.report_samples))
        self._seen: set[int] = set()

    def consider(
        self, trajectory: Trajectory, prompt: PromptPayload, *, reward: float, step: int
    ) -> None:
        """Keep this trajectory if its step is due and none of that step was kept yet."""
        if step % self._every or step in self._seen:
            return
        self._seen = {step}
        append_sample(
            self._path,
            SampleRecord(
                step=step,
                prompt=str(prompt.row.get("prompt", "")),
                tokens=[str(self._tokenizer.decode([t])) for t in trajectory.tokens.tolist()],
                provenance=trajectory.provenance.tolist(),
                segments=[(s.policy_version, s.start, s.end) for s in trajectory.segments],
                reward=reward,
                answer=str(prompt.row.get("answer", "")),
                logprobs=trajectory.behaviour_logprobs.tolist(),
            ),
        )
