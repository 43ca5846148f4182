"""The records of a run's files that a sink has not had, and its memory of them.

A resumed run drops records of steps that it repeats: files shrink, and the newest time counts.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from asyncrl.monitoring.records.jsonl import undamaged
from asyncrl.monitoring.records.samples import SampleRecord
from asyncrl.wire.records.evaluations import EvaluationRecord
from asyncrl.wire.records.step import StepMetrics
from asyncrl.wire.transport.atomic_files import write_atomically

_OUT_OF_ORDER = 16
"""Steps by which trained-on samples may come after those of a later one."""

T = TypeVar("T")
R = TypeVar("R", StepMetrics, EvaluationRecord)


class SinkState(msgspec.Struct, kw_only=True):
    """Records that a sink has had: the contents of RUN/sinks/KIND.json."""

    run_id: str = ""
    """Id of the sink's run, which a resumed run continues."""
    step_time: float = 0.0
    step: int = -1
    evaluation: int = -1
    evaluation_time: float = 0.0
    sample_step: int = -1
    trained: list[tuple[int, str]] = []
    """Step and id of trained-on samples in the last steps before it."""
    shown_step: int = -1
    shown: list[str] = []
    failures: int = 0

    def has_trained(self, sample: SampleRecord) -> bool:
        """Return True if the sink has had a trained-on sample."""
        if sample.step <= self.sample_step - _OUT_OF_ORDER:
            return True
        return (sample.step, sample.sample_id) in self.trained

    def had(self, record: StepMetrics | EvaluationRecord | SampleRecord) -> None:
        """Note a record that the sink has had."""
        if isinstance(record, StepMetrics):
            self.step, self.step_time = record.step, record.time
        elif isinstance(record, EvaluationRecord):
            self.evaluation, self.evaluation_time = record.step, record.time
        elif not record.evaluation:
            self.sample_step = max(self.sample_step, record.step)
            known = [*self.trained, (record.step, record.sample_id)]
            self.trained = [one for one in known if one[0] > self.sample_step - _OUT_OF_ORDER]
        else:
            if record.step > self.shown_step:
                self.shown_step, self.shown = record.step, []
            if record.step == self.shown_step:
                self.shown.append(shown_as(record))

    def forget_from(self, step: int) -> None:
        """Forget the steps from this one on, which the run repeats."""
        self.trained = [one for one in self.trained if one[0] < step]
        self.sample_step = min(self.sample_step, step - 1)


def read_state(path: Path) -> SinkState:
    """Read the state of a sink; an empty one if it is missing or damaged."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=SinkState)
    except (FileNotFoundError, msgspec.DecodeError):
        return SinkState()


@dataclass(slots=True)
class _Tail(Generic[T]):
    """The unread whole lines of a file; a replaced file is read again."""

    path: Path
    kind: type[T]
    offset: int = 0
    identity: tuple[int, int] = (0, 0)

    def new(self) -> tuple[list[T], bool]:
        """Return the new records, and whether they are all of the file."""
        from_start = self.offset == 0
        try:
            with self.path.open("rb") as file:
                about = os.fstat(file.fileno())
                identity = about.st_dev, about.st_ino
                if identity != self.identity or about.st_size < self.offset:
                    self.offset, self.identity, from_start = 0, identity, True
                file.seek(self.offset)
                data = file.read()
        except FileNotFoundError:
            return [], from_start
        whole = data[: data.rfind(b"\n") + 1]
        self.offset += len(whole)
        return list(undamaged(whole, self.kind)), from_start


def _unseen(records: list[R], from_start: bool, step: int, time: float) -> list[R]:
    """Records after the last one the sink has had; later ones if the run dropped that."""
    if not from_start:
        return records
    last = [index for index, one in enumerate(records) if (one.step, one.time) == (step, time)]
    return records[last[-1] + 1 :] if last else [one for one in records if one.time > time]


@dataclass(slots=True)
class News:
    """Records that a sink has not had."""

    steps: list[StepMetrics] = field(default_factory=list)
    evaluations: list[EvaluationRecord] = field(default_factory=list)
    samples: list[SampleRecord] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.steps or self.evaluations or self.samples)


def shown_as(sample: SampleRecord) -> str:
    """Key of an evaluation's sample among others of its version."""
    return f"{sample.evaluation} {sample.sample_id}"


class Follower:
    """Reads the files of a run as they grow. The sender updates `state`."""

    def __init__(self, run: Path, state: SinkState) -> None:
        self.state = state
        self._steps = _Tail(run / "metrics.jsonl", StepMetrics)
        self._evaluations = _Tail(run / "evaluations.jsonl", EvaluationRecord)
        self._samples = _Tail(run / "samples.jsonl", SampleRecord)

    def news(self) -> News:
        """Return what was written since the last call and is new to the sink."""
        state = self.state
        read = self._evaluations.new()  # first, so that the steps before them are there as well
        steps = _unseen(*self._steps.new(), state.step, state.step_time)
        if steps and steps[0].step <= state.step:  # the run went back
            state.forget_from(steps[0].step)
            if state.shown_step > steps[0].step:
                state.shown_step, state.shown = steps[0].step, []
        evaluations = _unseen(*read, state.evaluation, state.evaluation_time)
        samples = [one for one in self._samples.new()[0] if self._is_new(one)]
        return News(steps, evaluations, samples)

    def skip_samples(self) -> None:
        """Leave out the samples that are there now."""
        self._samples.new()

    def _is_new(self, sample: SampleRecord) -> bool:
        """Return True if the sink has not had a sample. Those of one evaluation come one by one."""
        state = self.state
        if not sample.evaluation:
            return not state.has_trained(sample)
        if sample.step == state.shown_step:
            return shown_as(sample) not in state.shown
        return sample.step > state.shown_step

    def save(self, path: Path) -> None:
        """Save the state to its file. Raises OSError."""
        write_atomically(path, msgspec.json.encode(self.state).decode())
