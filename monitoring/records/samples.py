"""`samples.jsonl`: a few trajectories of a run, for people to read."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

from asyncrl.monitoring.records.jsonl import RetryingJsonlWriter, read_jsonl

TokenProvenance = Literal["sampled", "drafted", "verified", "observed"]
"""Origin of a token: a name of `asyncrl.rollout.trajectory.Provenance` in lower case."""


class SampleSegment(msgspec.Struct, frozen=True):
    """Tokens `[start, end)` follow the distribution of one policy version."""

    policy_version: int
    start: int
    end: int


class SampleRecord(msgspec.Struct, frozen=True):
    """One trajectory with its text; L is the number of response tokens."""

    step: int
    """The optimizer step that trained on it; for an evaluation, the policy version."""
    prompt: str
    tokens: list[str]
    """`[L]` text of each response token."""
    provenance: list[TokenProvenance]
    segments: list[SampleSegment]
    """Ascending; they cover `[0, L)`."""
    reward: float | None
    answer: str | None = None
    logprobs: list[float | None] | None = None
    """`[L]` behaviour log-probabilities; None where not finite."""
    sample_id: str = ""
    finish_reason: str = ""
    contexts: list[int] = []
    """Tokens at which the model's context begins anew: nothing before them is read after them."""
    rewards: dict[str, float | None] = {}
    """Unweighted terms of the reward: the result of each reward function, and the environment's
    part. None where one does not apply; empty if one of them failed, which counts as 0."""
    evaluation: str = ""
    """The held-out set of a sample that was drawn for an evaluation, of the policy after `step`
    steps; empty if it was trained on."""

    def __post_init__(self) -> None:
        n = len(self.tokens)
        if len(self.provenance) != n or (self.logprobs is not None and len(self.logprobs) != n):
            raise ValueError(
                f"sample {self.sample_id or self.step}: {n} tokens, {len(self.provenance)} "
                "provenances"
                + ("" if self.logprobs is None else f", {len(self.logprobs)} log-probabilities")
            )

    def count(self, provenance: TokenProvenance) -> int:
        """Count the tokens of this provenance."""
        return self.provenance.count(provenance)

    @property
    def turns(self) -> int:
        """Number of the policy's turns: runs of tokens without an environment's."""
        own = [one != "observed" for one in self.provenance]
        return sum(one and not before for one, before in zip(own, [False, *own], strict=False))

    def version_at(self, position: int) -> int | None:
        """Policy version of the token at `position`; None outside all segments."""
        for segment in self.segments:
            if segment.start <= position < segment.end:
                return segment.policy_version
        return None


class SampleLog(RetryingJsonlWriter[SampleRecord]):
    """Appends trajectories to `path`."""

    def append(self, *records: SampleRecord) -> None:
        """Write the records; lone surrogates, which UTF-8 cannot encode, become question marks."""
        super().append(*map(_writable, records))


def _writable(record: SampleRecord) -> SampleRecord:
    def clean(text: str) -> str:
        return text.encode("utf-8", "replace").decode("utf-8")

    return msgspec.structs.replace(
        record,
        prompt=clean(record.prompt),
        tokens=[clean(token) for token in record.tokens],
        answer=None if record.answer is None else clean(record.answer),
    )


def read_samples(path: Path) -> list[SampleRecord]:
    """Read all records in the order of the file; empty without it. Raises RecordError."""
    try:
        return read_jsonl(path, SampleRecord)
    except FileNotFoundError:
        return []


def trained_on(records: Iterable[SampleRecord]) -> list[SampleRecord]:
    """Select records that are not of an evaluation."""
    return [one for one in records if not one.evaluation]


def choose_samples(records: Iterable[SampleRecord], max_samples: int) -> list[SampleRecord]:
    """Choose up to `max_samples` records, evenly spread over the run, first and last included."""
    everything = sorted(records, key=lambda record: record.step)
    if max_samples <= 0:
        return []
    if len(everything) <= max_samples:
        return everything
    if max_samples == 1:
        return [everything[-1]]
    last = len(everything) - 1
    return [everything[round(i * last / (max_samples - 1))] for i in range(max_samples)]
