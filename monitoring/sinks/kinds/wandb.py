"""Weights & Biases."""

import secrets
from collections.abc import Mapping
from typing import Any

from asyncrl.monitoring.records.samples import SampleRecord
from asyncrl.monitoring.sinks.config import SinkConfig
from asyncrl.monitoring.sinks.sink import COLUMNS, Sink, SinkRun, row_of, with_new

MAX_ROWS = 200


class WandbSink(Sink):
    """Logs with `step` as the axis, since W&B's counter cannot go back; later values supersede."""

    def __init__(self, config: SinkConfig, run: SinkRun) -> None:
        import wandb

        self._wandb: Any = wandb
        self.run_id = run.run_id or secrets.token_hex(4)
        run.folder.mkdir(parents=True, exist_ok=True)
        self._run: Any = wandb.init(
            project=config.project or "asyncrl",
            entity=config.entity,
            name=run.name,
            id=self.run_id,
            resume="allow",
            dir=str(run.folder),
            mode="offline" if config.offline else "online",
            config=dict(run.settings),
            settings=wandb.Settings(
                console="off", disable_git=True, save_code=False, x_disable_stats=True
            ),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._rows: dict[str, list[list[Any]]] = {}

    def log(self, step: int, time: float, numbers: Mapping[str, float]) -> None:
        """Log the numbers of a step."""
        self._run.log({"step": step, "time": time, **numbers})

    def table(self, name: str, samples: list[SampleRecord]) -> None:
        """Log a table of the newest samples."""
        rows = with_new(self._rows.get(name, []), map(row_of, samples))[-MAX_ROWS:]
        table = self._wandb.Table(columns=list(COLUMNS), data=rows)
        self._run.log({"step": samples[-1].step, name: table})
        self._rows[name] = rows

    def close(self) -> None:
        """End the run; online, wait for the upload."""
        self._run.finish()
