"""MLflow, by its tracking client (the package `mlflow-skinny` suffices)."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any

from monitoring.samples import SampleRecord
from monitoring.sinks.config import SinkConfig
from monitoring.sinks.sink import COLUMNS, SinkRun, row_of, with_new

log = logging.getLogger(__name__)

_BATCH = 500
"""Metrics in one call; a server takes 1,000."""
_PARAMETERS = 100
"""Parameters in one call."""
_VALUE = 500
"""Characters of a parameter's value."""


class MlflowSink:
    """One run of an experiment; a resumed run continues it."""

    def __init__(self, config: SinkConfig, run: SinkRun) -> None:
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        run.folder.mkdir(parents=True, exist_ok=True)
        uri = config.uri or f"sqlite:///{run.folder.resolve() / 'mlflow.db'}"
        self._client: Any = MlflowClient(tracking_uri=uri)
        self._folder = run.folder
        if run.run_id:
            self.run_id = run.run_id
            self._client.update_run(self.run_id, status="RUNNING")
        else:
            name = config.project or "asyncrl"
            experiment = self._client.get_experiment_by_name(name)
            where = None if config.uri else (run.folder.resolve() / "artifacts").as_uri()
            number = (
                self._client.create_experiment(name, artifact_location=where)
                if experiment is None
                else experiment.experiment_id
            )
            self.run_id = str(self._client.create_run(number, run_name=run.name).info.run_id)
            self._log_settings([Param(*one) for one in _parameters("", run.settings)])
        self._newest: dict[str, tuple[int, list[list[Any]]]] = {}
        """Step and rows of the newest file of each table."""

    def _log_settings(self, settings: list[Any]) -> None:
        """Parameters; a run without them is better than one that is made anew at each try."""
        for start in range(0, len(settings), _PARAMETERS):
            try:
                self._client.log_batch(self.run_id, params=settings[start : start + _PARAMETERS])
            except Exception as error:  # noqa: BLE001 - of a client that is not ours
                log.warning("MLflow has not taken %d settings: %s", len(settings) - start, error)
                return

    def log(self, step: int, time: float, numbers: Mapping[str, float]) -> None:
        """Log the numbers of a step."""
        from mlflow.entities import Metric

        at = int(time * 1000)
        metrics = [Metric(clean(name), value, at, step) for name, value in numbers.items()]
        for start in range(0, len(metrics), _BATCH):
            self._client.log_batch(self.run_id, metrics=metrics[start : start + _BATCH])

    def went_back(self, step: int) -> None:
        """MLflow keeps all values of a step, in the order of their times."""

    def table(self, name: str, samples: list[SampleRecord]) -> None:
        """Log a file of the samples of each step, in the form of `mlflow.log_table`.

        Samples of one evaluation may come in several calls; the file then has all of them.
        """
        by_step: dict[int, list[list[Any]]] = {}
        for one in samples:
            by_step.setdefault(one.step, []).append(row_of(one))
        for step, new in by_step.items():
            before, rows = self._newest.get(name, (step, []))
            rows = with_new(rows if before == step else [], new)
            table = json.dumps({"columns": list(COLUMNS), "data": rows})
            self._client.log_text(self.run_id, table, f"{name}/step-{step:06d}.json")
            self._newest[name] = step, rows

    def flush(self) -> None:
        """Every call is complete when it returns."""

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self.run_id)


def _parameters(outer: str, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _parameters(f"{outer}{key}.", value)
        else:
            yield clean(f"{outer}{key}"), str(value)[:_VALUE]


def clean(name: str) -> str:
    """A name that MLflow takes: it refuses a whole call for one `#`."""
    return re.sub(r"[^\w.\-:/ ]", "_", name)
