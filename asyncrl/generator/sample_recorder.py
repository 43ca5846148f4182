"""Records a few samples for the report, spread evenly over the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncrl.config.run_config import RunConfig
from asyncrl.generator.sample_state import HeldSample
from asyncrl.monitoring.records.samples import SampleLog, SampleRecord, SampleSegment
from asyncrl.rewards.calls import Reward
from asyncrl.rollout.trajectory import Provenance, SampleId


class SampleRecorder:
    """Writes one sample of every n-th step to `samples.jsonl`, with the history of each token.

    The sample is chosen by its number, so every generator of a run knows it, and its text has no
    influence: the first to be delivered would more often be a short one. A step whose chosen sample
    is in a group that failed has no record. Of an evaluation the controller chooses, likewise.
    """

    def __init__(self, directory: Path, tokenizer: Any, config: RunConfig) -> None:
        self._path = directory / "samples.jsonl"
        self._log = SampleLog(self._path)
        self._tokenizer = tokenizer
        self._is_on = config.monitoring.report_samples > 0
        self._every = max(1, config.run.steps // max(1, 2 * config.monitoring.report_samples))
        self._groups_per_step = config.scheduler.groups_per_step
        self._group_size = config.scheduler.group_size
        self._labels = config.reward_labels

    def consider(self, held: HeldSample, *, reward: Reward, step: int) -> None:
        """Record this sample if it is the chosen one of a step that is to be recorded."""
        if step % self._every == 0 and self._is_chosen(held.trajectory.id, step):
            self._record(held, reward, step)

    def evaluated(self, held: HeldSample, *, reward: Reward, shown_of: str) -> None:
        """Record a sample of an evaluation, of this set."""
        if self._is_on:
            self._record(held, reward, held.trajectory.oldest_version, shown_of)

    def _record(self, held: HeldSample, reward: Reward, step: int, evaluation: str = "") -> None:
        trajectory, example = held.trajectory, held.prompt.example
        answer = example.get("answer")
        prompt = str(example.get("prompt", ""))
        if held.episode is not None and len(held.episode.prompt):  # the environment's
            prompt = str(self._tokenizer.decode(held.episode.prompt.tolist()))
        self._log.append(
            SampleRecord(
                step=step,
                prompt=prompt,
                tokens=[str(self._tokenizer.decode([t])) for t in trajectory.tokens.tolist()],
                provenance=[
                    Provenance(value).name.lower()  # type: ignore[misc]
                    for value in trajectory.provenance.tolist()
                ],
                contexts=list(trajectory.contexts),
                segments=[
                    SampleSegment(s.policy_version, s.start, s.end) for s in trajectory.segments
                ],
                reward=reward.value,
                rewards=dict(zip(self._labels, reward.terms, strict=False)),
                answer=None if answer is None else str(answer),
                logprobs=trajectory.behaviour_logprobs.tolist(),
                sample_id=str(trajectory.id),
                finish_reason=trajectory.finish_reason,
                evaluation=evaluation,
            )
        )

    def _is_chosen(self, sample: SampleId, step: int) -> bool:
        """Whether a sample is recorded of this step: another place in group and step each time.

        With dynamic sampling a step has other groups, so none or several may have this place.
        """
        record = step // self._every
        place = record % self._groups_per_step
        is_in_place = sample.group % self._groups_per_step == place
        return is_in_place and sample.sample == record % self._group_size

    def rewind(self) -> None:
        """The run returned to an earlier step, and the controller rewrote the file."""
        self._log.close()
        self._log = SampleLog(self._path)

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._log.close()
