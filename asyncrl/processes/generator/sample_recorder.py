"""Records a few samples for the report, spread evenly over the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncrl.config import RunConfig
from asyncrl.processes.generator.generation import HeldSample
from monitoring.samples import SampleLog, SampleRecord, SampleSegment
from rollout.trajectory import Provenance


class SampleRecorder:
    """Writes one sample of every n-th step to `samples.jsonl`, with the history of each token."""

    def __init__(self, directory: Path, tokenizer: Any, config: RunConfig) -> None:
        self._path = directory / "samples.jsonl"
        self._log = SampleLog(self._path)
        self._tokenizer = tokenizer
        self._every = max(1, config.run.steps // max(1, 2 * config.monitoring.report_samples))
        self._newest = -1

    def consider(self, held: HeldSample, *, reward: float, step: int) -> None:
        """Record this sample if it is the first one of a step that is to be recorded."""
        if step % self._every or step <= self._newest:
            return
        self._newest = step
        trajectory, example = held.trajectory, held.prompt.example
        self._log.append(
            SampleRecord(
                step=step,
                prompt=str(example.get("prompt", "")),
                tokens=[str(self._tokenizer.decode([t])) for t in trajectory.tokens.tolist()],
                provenance=[
                    Provenance(value).name.lower()  # type: ignore[misc]
                    for value in trajectory.provenance.tolist()
                ],
                segments=[
                    SampleSegment(s.policy_version, s.start, s.end) for s in trajectory.segments
                ],
                reward=reward,
                answer=str(example.get("answer", "")),
                logprobs=trajectory.behaviour_logprobs.tolist(),
                sample_id=str(trajectory.id),
                finish_reason=trajectory.finish_reason,
            )
        )

    def rewind(self) -> None:
        """The run returned to an earlier step, and the controller rewrote the file."""
        self._log.close()
        self._log = SampleLog(self._path)
        self._newest = -1

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._log.close()
