"""What a sink must do, and what it is told of the run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from asyncrl.monitoring.records.samples import SampleRecord

COLUMNS = ("step", "sample", "prompt", "response", "reward", "answer", "finish_reason")
"""Of the table of samples."""


@dataclass(frozen=True, slots=True)
class SinkRun:
    """What a sink is told of the run when it is opened."""

    name: str
    folder: Path
    """RUN/sinks/KIND, where it may keep what it needs."""
    run_id: str
    """Of the sink's run that is continued; empty: a new one begins."""
    next_step: int
    """The first step that it is given."""
    settings: Mapping[str, Any]
    """config.yaml of the run."""


class Sink(Protocol):
    """Where numbers and samples go. Any call may raise or hang."""

    run_id: str
    """Of the sink's run, to continue it later."""

    def log(self, step: int, time: float, numbers: Mapping[str, float]) -> None:
        """Log the numbers of a step; `time` is Unix seconds."""

    def went_back(self, step: int) -> None:
        """The run repeats the steps from this one on: what follows supersedes what was logged."""

    def table(self, name: str, samples: list[SampleRecord]) -> None:
        """Log samples, which belong to the steps that they have, as this table."""

    def flush(self) -> None:
        """Hand over what waits."""

    def close(self) -> None:
        """End the sink's run."""


def table_of(sample: SampleRecord) -> str:
    """The name of a sample's table: `samples`, or `evaluation/held_out/samples`."""
    return f"evaluation/{sample.evaluation}/samples" if sample.evaluation else "samples"


def row_of(sample: SampleRecord) -> list[Any]:
    """A sample's row of the table, by `COLUMNS`."""
    return [
        sample.step,
        sample.sample_id,
        sample.prompt,
        "".join(sample.tokens),
        sample.reward,
        sample.answer,
        sample.finish_reason,
    ]


def with_new(rows: list[list[Any]], new: Iterable[list[Any]]) -> list[list[Any]]:
    """Rows, and those of the new ones that are not among them: a call that failed comes again."""
    return [*rows, *(one for one in new if one not in rows)]
