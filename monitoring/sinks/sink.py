"""The interface of a sink, and the description of the run that it receives."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.monitoring.records.samples import SampleRecord

COLUMNS = ("step", "sample", "prompt", "response", "reward", "answer", "finish_reason")


@dataclass(frozen=True, slots=True)
class SinkRun:
    """Description of the run for a sink that is opened."""

    name: str
    folder: Path
    """RUN/sinks/KIND."""
    run_id: str
    """Id of the sink's run to continue; empty for a new one."""
    next_step: int
    """First step that it receives."""
    settings: Mapping[str, Any]


class Sink:
    """Receives numbers and samples. Any call may raise or hang. By default calls do nothing."""

    run_id: str

    def log(self, step: int, time: float, numbers: Mapping[str, float]) -> None:
        """Log the numbers of a step; `time` is Unix seconds."""

    def went_back(self, step: int) -> None:
        """The run repeats steps from this one on: later values supersede what was logged."""

    def table(self, name: str, samples: list[SampleRecord]) -> None:
        """Log samples as this table; each belongs to its step."""

    def flush(self) -> None:
        """Send what is buffered."""

    def close(self) -> None:
        """End the sink's run."""


def table_of(sample: SampleRecord) -> str:
    """Name of a sample's table: `samples`, or `evaluation/held_out/samples`."""
    return f"evaluation/{sample.evaluation}/samples" if sample.evaluation else "samples"


def row_of(sample: SampleRecord) -> list[Any]:
    """A sample's row of the table, by `COLUMNS`."""
    texts = [sample.step, sample.sample_id, sample.prompt, "".join(sample.tokens)]
    return [*texts, sample.reward, sample.answer, sample.finish_reason]


def with_new(rows: list[list[Any]], new: Iterable[list[Any]]) -> list[list[Any]]:
    """Append new rows that are not present yet: a failed call is repeated."""
    return [*rows, *(one for one in new if one not in rows)]
