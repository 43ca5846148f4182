"""The results of a run's evaluations: evaluations.jsonl, and the best step."""

import logging
import math
from collections.abc import Sequence
from pathlib import Path

from asyncrl.monitoring.records.metrics_log import EvaluationsLog, read_evaluations
from asyncrl.tasks.evaluation_config import EvaluationConfig
from asyncrl.trainer.checkpoint.format.files import BestCheckpoint, write_best
from asyncrl.wire.records.evaluations import HELD_OUT, EvaluationRecord, SetEvaluation

logger = logging.getLogger(__name__)


def best_of(records: Sequence[EvaluationRecord], of: str | None) -> EvaluationRecord | None:
    """Return the earliest complete record after step 0 with the highest accuracy, or None.

    The set `of` decides; None: the first of each record.
    """
    known = [one for one in records if one.step and _accuracy(one, of) is not None]
    return max(known, key=lambda one: _accuracy(one, of) or 0.0, default=None)


def _accuracy(record: EvaluationRecord, of: str | None) -> float | None:
    """Return the accuracy of the set `of` (None: the first); None if it is unknown."""
    found = record.main if of is None else record.sets.get(of)
    return None if found is None or not found.samples else found.accuracy


def before_of(value: float, samples: int) -> EvaluationRecord:
    """Return the evaluation before training of a run whose evaluations.jsonl lacks it."""
    error = math.sqrt(value * (1 - value) / samples) if samples and 0 <= value <= 1 else None
    one = SetEvaluation(
        prompts=samples, samples=samples, accuracy=value, accuracy_error=error, reward=value
    )
    return EvaluationRecord(step=0, time=0.0, when="before", sets={HELD_OUT: one})


class EvaluationResults:
    """Keeps the results, and tells the trainer which checkpoints to keep."""

    def __init__(self, run: Path, config: EvaluationConfig) -> None:
        self._path = run / "evaluations.jsonl"
        self._checkpoints = run / "checkpoints"
        self._config = config
        self._log = EvaluationsLog(self._path)
        self._known = 0
        self.records: list[EvaluationRecord] = []
        """Records in order of their steps, without those of steps that were lost."""
        self.reload()

    def configure(self, config: EvaluationConfig) -> None:
        """Change the settings."""
        self._config = config
        self._write_best()

    def add(self, record: EvaluationRecord) -> None:
        """Keep a result."""
        self.records = [one for one in self.records if one.step != record.step]
        self.records.append(record)
        self._log.append(record)
        self.settled(record.step)

    def settled(self, step: int) -> None:
        """Note that the accuracy of this step is known, or will never be."""
        self._known = max(self._known, step)
        self._write_best()

    def reload(self) -> None:
        """Read the file again after a rewind to an earlier step."""
        self._log.close()
        self._log = EvaluationsLog(self._path)
        self.records = read_evaluations(self._path)
        self._known = self.newest_step
        self._write_best()

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._log.close()

    @property
    def newest(self) -> EvaluationRecord | None:
        """The evaluation of the newest step."""
        return max(self.records, key=lambda one: one.step, default=None)

    @property
    def newest_step(self) -> int:
        """The newest step with a result; 0 if there is none."""
        return 0 if self.newest is None else self.newest.step

    @property
    def before(self) -> EvaluationRecord | None:
        """The evaluation before training."""
        return next((one for one in self.records if one.when == "before"), None)

    def began_with(self, accuracy: float, samples: int) -> EvaluationRecord:
        """Return the evaluation before training of a resumed run, from its recorded accuracy."""
        if self.before is None:  # begun by an earlier version of asyncrl, or the file was removed
            self.records.insert(0, before_of(accuracy, samples))
        assert self.before is not None  # noqa: S101 - inserted above
        return self.before

    @property
    def best(self) -> EvaluationRecord | None:
        """The evaluation with the highest accuracy of `evaluation.best_of`."""
        return best_of(self.records, self._config.best_of)

    def value_of(self, record: EvaluationRecord) -> float | None:
        """Return the accuracy that decides which step is the best."""
        return _accuracy(record, self._config.best_of)

    def _write_best(self) -> None:
        """Write the best step. A failing disk does not end the run: the next result tries again."""
        best, every = self.best, self._config.every
        wanted = None
        if self._config.keep_best and every is not None:
            at, value = (None, None) if best is None else (best.step, self.value_of(best))
            of = self._config.best_of or (next(iter(best.sets)) if best is not None else "")
            wanted = BestCheckpoint(every=every, known=self._known, step=at, accuracy=value, of=of)
        try:
            write_best(self._checkpoints, wanted)
        except OSError as error:
            logger.warning("cannot write best.json in %s: %s", self._checkpoints, error)
