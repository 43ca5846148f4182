"""Writes every trained sample to RUN/samples/, on a separate thread; chooses some to be shown.

The records of a step are passed to the thread after its optimizer step, and a checkpoint waits
until they are written. A resuming trainer drops the records of later steps before it trains them
again, so the log holds each trained sample exactly once, whenever a process was killed. A log that
cannot be written does not end a run: lost records are counted and the error is logged.
"""

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.config.run_section import RunSection
from asyncrl.monitoring.metrics.metrics import TrainerMetrics
from asyncrl.monitoring.records.samples import SampleSegment
from asyncrl.monitoring.records.trained_samples import SampleFiles, TrainedSample, truncate
from asyncrl.rollout.trajectory import BoolArray, IntArray, Provenance, Trajectory
from asyncrl.trainer.base.errors import Superseded
from asyncrl.trainer.checkpoint.trainer_lease import UNFENCED, TrainerLease
from asyncrl.trainer_process.delivery_check import WholeGroup
from asyncrl.wire.messages.from_trainer import ShownSample

logger = logging.getLogger("asyncrl.trainer")

WRITE_SECONDS = 60.0
SHOWN_CHARACTERS = 600
"""Longest text of a sample that is sent to be shown."""


def drop_repeated(folder: Path, step: int) -> None:
    """Drop the records of `step` and later steps, which are trained again; log a disk failure."""
    try:
        truncate(folder, before_step=step)
    except OSError as error:
        text = (
            "the samples of step %d and later steps could not be dropped from %s: %s. They are "
            "trained again and will be logged twice. Training continues"
        )
        logger.error(text, step, folder, error)


class TrainedSampleLog:
    """Writes the samples of finished steps. At most one step's records wait at a time.

    `settings` are `run.log_samples` and its companions; this is `rank` of `ranks`, which share the
    limit; `labels` name the parts of a reward; `fence` stops a replaced trainer from writing.
    """

    def __init__(
        self,
        folder: Path,
        tokenizer: Any,
        settings: RunSection,
        metrics: TrainerMetrics,
        fence: TrainerLease = UNFENCED,
        rank: int = 0,
        ranks: int = 1,
        labels: Sequence[str] = (),
    ) -> None:
        limit = (settings.log_samples_mb << 20) // ranks
        self._files = SampleFiles(folder, limit_bytes=limit, rank=rank)
        self._folder = folder
        self._tokenizer = tokenizer
        self._labels = labels
        self._with_tokens = settings.log_sample_tokens
        self._metrics = metrics
        self._fence = fence
        self._thread = ThreadPoolExecutor(1, "sample-log")
        self._writing: asyncio.Future[None] | None = None
        self._patience = WRITE_SECONDS

    async def record(self, step: int, groups: Sequence[WholeGroup]) -> None:
        """Queue the samples of a finished step; wait for those of the previous step."""
        if await self.written():
            loop = asyncio.get_running_loop()
            self._writing = loop.run_in_executor(self._thread, self._write, step, groups)
        else:
            self._lose(step, groups, f"no answer from the disk within {WRITE_SECONDS:.0f} s")

    async def written(self) -> bool:
        """Wait until all records are written or lost; return False if that takes too long."""
        if self._writing is None:
            return True
        done, _ = await asyncio.wait({self._writing}, timeout=self._patience)
        self._patience = WRITE_SECONDS if done else 0.0  # a hanging disk is waited for once
        return bool(done)

    async def close(self) -> None:
        """Write queued records and close the file."""
        if await self.written():
            self._files.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _write(self, step: int, groups: Sequence[WholeGroup]) -> None:
        for group in groups:
            try:
                self._fence.check()
                self._files.append(self._records(step, group))
            except (OSError, Superseded) as error:
                self._lose(step, [group], str(error))

    def _lose(self, step: int, groups: Sequence[WholeGroup], why: str) -> None:
        count = sum(len(group.trajectories) for group in groups)
        self._metrics.unlogged_samples.inc(count)
        text = "%d samples of step %d were not written to %s: %s. Training continues"
        logger.error(text, count, step, self._folder, why)

    def _records(self, step: int, group: WholeGroup) -> list[TrainedSample]:
        records = []
        for trajectory, reward, generator, terms in zip(
            group.trajectories, group.rewards.tolist(), group.generators, group.terms, strict=True
        ):
            sources = np.bincount(trajectory.provenance, minlength=len(Provenance))
            records.append(
                TrainedSample(
                    step=step,
                    group=group.group,
                    sample=trajectory.id.sample,
                    prompt_id=trajectory.prompt_id,
                    prompt=_text(self._tokenizer, trajectory.prompt_tokens, special=True),
                    response=_text(self._tokenizer, trajectory.tokens, special=False),
                    reward=reward,
                    finish_reason=trajectory.finish_reason,
                    generator=generator,
                    prompt_length=len(trajectory.prompt_tokens),
                    response_length=len(trajectory.tokens),
                    segments=[
                        SampleSegment(s.policy_version, s.start, s.end) for s in trajectory.segments
                    ],
                    sampled=int(sources[Provenance.SAMPLED]),
                    drafted=int(sources[Provenance.DRAFTED]),
                    verified=int(sources[Provenance.VERIFIED]),
                    observed=int(sources[Provenance.OBSERVED]),
                    observed_at=_ranges(~trajectory.trained),
                    contexts=list(trajectory.contexts),
                    rewards=dict(zip(self._labels, terms, strict=False)),
                    **(_tokens(trajectory) if self._with_tokens else {}),
                )
            )
        return records


class ShownSamples:
    """Chooses samples of each step for the terminal, `count` of them if there are as many."""

    def __init__(self, tokenizer: Any, count: int) -> None:
        self._tokenizer = tokenizer
        self._count = count

    def of(self, step: int, groups: Sequence[WholeGroup]) -> tuple[ShownSample, ...]:
        """Choose by number, from as many groups as possible: those that come first are short."""
        ordered = sorted(groups, key=lambda one: one.group)
        size = len(ordered[0].trajectories) if ordered else 0  # all groups' size
        places = [(group, (step + turn) % size) for turn in range(size) for group in ordered]
        return tuple(self._shown(group, place) for group, place in places[: self._count])

    def _shown(self, group: WholeGroup, place: int) -> ShownSample:
        trajectory = group.trajectories[place]
        return ShownSample(
            prompt=_shortened(_text(self._tokenizer, trajectory.prompt_tokens, special=True)),
            response=_shortened(_text(self._tokenizer, trajectory.tokens, special=False)),
            reward=float(group.rewards[place]),
            terms=group.terms[place],
            tokens=trajectory.trained_count,
            finish_reason=trajectory.finish_reason,
        )


def _shortened(text: str) -> str:
    half = SHOWN_CHARACTERS // 2
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:half]} [...] {text[-half:]}"


def _text(tokenizer: Any, tokens: IntArray, *, special: bool) -> str:
    text = tokenizer.decode(tokens.tolist(), skip_special_tokens=not special)
    return str(text).encode("utf-8", "replace").decode("utf-8")  # no lone surrogates


def _ranges(mask: BoolArray) -> list[tuple[int, int]]:
    """`[start, end)` of each run of true values."""
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def _tokens(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "prompt_tokens": trajectory.prompt_tokens.tolist(),
        "response_tokens": trajectory.tokens.tolist(),
        "provenance": "".join(map(str, trajectory.provenance.tolist())),
        "behaviour_logprobs": trajectory.behaviour_logprobs.tolist(),
    }
