"""MLflow, by its tracking client (the package `mlflow-skinny` suffices)."""

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from asyncrl.monitoring.records.samples import SampleRecord
from asyncrl.monitoring.sinks.config import SinkConfig
from asyncrl.monitoring.sinks.sink import COLUMNS, Sink, SinkRun, row_of, with_new

log = logging.getLogger(__name__)

_BATCH = 500
"""Metrics in one call; a server takes 1,000."""
_PARAMETERS = 100
_VALUE = 500
_NAME = 240
"""Length limit of a name; a server takes 250."""


class MlflowSink(Sink):
    """One run of an experiment, continued when resumed: MLflow keeps all values of a step."""

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
            if experiment is None:
                number = self._client.create_experiment(name, artifact_location=where)
            else:
                number = experiment.experiment_id
            self.run_id = str(self._client.create_run(number, run_name=run.name).info.run_id)
            settings = dict(_parameters("", run.settings))
            names = taken_names(settings)
            self._log_settings([Param(names[name], value) for name, value in settings.items()])
        self._newest: dict[str, tuple[int, list[list[Any]]]] = {}

    def _log_settings(self, settings: list[Any]) -> None:
        """Log parameters; failing without them would create a new run at each retry."""
        for start in range(0, len(settings), _PARAMETERS):
            try:
                self._client.log_batch(self.run_id, params=settings[start : start + _PARAMETERS])
            except Exception as error:  # noqa: BLE001 - of a client that is not ours
                log.warning("MLflow refused %d settings: %s", len(settings) - start, error)
                return

    def log(self, step: int, time: float, numbers: Mapping[str, float]) -> None:
        """Log the numbers of a step."""
        from mlflow.entities import Metric

        at = int(time * 1000)
        names = taken_names(numbers)
        metrics = [Metric(names[name], value, at, step) for name, value in numbers.items()]
        for start in range(0, len(metrics), _BATCH):
            self._client.log_batch(self.run_id, metrics=metrics[start : start + _BATCH])

    def table(self, name: str, samples: list[SampleRecord]) -> None:
        """Log a step's samples as a file like `mlflow.log_table`'s, with those of earlier calls."""
        by_step: dict[int, list[list[Any]]] = {}
        for one in samples:
            by_step.setdefault(one.step, []).append(row_of(one))
        for step, new in by_step.items():
            before, rows = self._newest.get(name, (step, []))
            rows = with_new(rows if before == step else [], new)
            table = json.dumps({"columns": list(COLUMNS), "data": rows})
            self._client.log_text(self.run_id, table, f"{name}/step-{step:06d}.json")
            self._newest[name] = step, rows

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self.run_id)


def _parameters(outer: str, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _parameters(f"{outer}{key}.", value)
        else:
            yield f"{outer}{key}", str(value)[:_VALUE]


def taken_names(names: Iterable[str]) -> dict[str, str]:
    """Map names to unique ones that MLflow takes; one bad name would fail a whole call."""
    found: dict[str, str] = {}
    used: set[str] = set()
    for name in sorted(names, key=lambda one: (_clean(one) != one, one)):
        taken = _clean(name)
        while taken in used:
            taken += "_"
        used.add(taken)
        found[name] = taken
    return found


def _clean(name: str) -> str:
    parts = re.sub(r"[^\w.\-:/ ]", "_", name).split("/")
    return "/".join("_" if part in ("", ".", "..") else part for part in parts)[:_NAME].rstrip("/")
