"""What a run has left behind, read for its report; nothing of it has to be there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from monitoring.config import MonitoringConfig
from monitoring.errors import RecordError, ReportError
from monitoring.metrics_log import read_metrics
from monitoring.occupancy import SlotPiece, read_slots
from monitoring.report.series import finite
from monitoring.samples import SampleRecord, read_samples
from monitoring.spans import Span, read_spans
from wire.records import Measured, StepMetrics, TokenCounts

T = TypeVar("T")


@dataclass(slots=True)
class RunData:
    """One run directory, in memory."""

    name: str
    steps: list[StepMetrics] = field(default_factory=list)
    """The records of metrics.jsonl, one per optimizer step, in order."""
    timelines: dict[str, list[Span]] = field(default_factory=dict)
    """Process name to its spans, in the order in which they are drawn."""
    slots: dict[str, list[SlotPiece]] = field(default_factory=dict)
    """Generator name to what its slots were used for; processes without slots are left out."""
    samples: list[SampleRecord] = field(default_factory=list)
    result: Mapping[str, Any] | None = None
    """result.json; None while the run is not finished."""
    config_text: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """What could not be read, in words for the reader of the report."""

    def column(self, value: Callable[[StepMetrics], Measured]) -> list[float | None]:
        """`[S]` one number of each step; None where it was not measured."""
        return [finite(value(step)) for step in self.steps]

    def step_numbers(self) -> list[float]:
        """`[S]` the indices of the steps."""
        return [float(step.step) for step in self.steps]

    def tokens(self) -> TokenCounts:
        """Token counts of all generators since the run began, as of the last step."""
        return self.steps[-1].tokens if self.steps else TokenCounts()

    def outcome(self, name: str) -> float | None:
        """A number of result.json, None if the run is not finished or it is not there."""
        return finite((self.result or {}).get(name))

    def evaluation_samples(self) -> int | None:
        """How many held-out samples each accuracy is measured on."""
        trials = self.outcome("evaluation_samples")
        return int(trials) if trials is not None and trials >= 1 else None

    def setting(self, path: str, default: Any = None) -> Any:
        """A value of the configuration by its dotted path."""
        value: Any = self.config
        for key in path.split("."):
            if not isinstance(value, Mapping) or key not in value:
                return default
            value = value[key]
        return value

    @property
    def lenient(self) -> bool:
        """Whether samples began with tokens of earlier epochs by the lenient, biased rule."""
        return bool(self.setting("cache.reuse") == "lenient")

    @property
    def shown_samples(self) -> int:
        """Most sample trajectories in the report."""
        default = MonitoringConfig().report_samples
        wanted = self.setting("monitoring.report.samples", default)
        return wanted if isinstance(wanted, int) and wanted >= 0 else default


def load_run(run_dir: Path) -> RunData:
    """Read what there is.

    Raises:
        ReportError: it is not a directory, or holds none of the files of a run.
    """
    if not run_dir.is_dir():
        raise ReportError(f"there is no run directory {run_dir}; `ls {run_dir.parent}` lists runs")
    known = ("config.yaml", "metrics.jsonl", "result.json", "timeline")
    if not any((run_dir / name).exists() for name in known):
        raise ReportError(
            f"{run_dir} is not the directory of a run: none of {', '.join(known)} is in it. "
            "Give the directory that `asyncrl run` made, such as runs/NAME"
        )
    data = RunData(name=run_dir.resolve().name)
    _load_config(run_dir / "config.yaml", data)
    data.result = _attempt(data, lambda: _load_result(run_dir / "result.json"), None)
    data.steps = _attempt(data, lambda: read_metrics(run_dir / "metrics.jsonl"), [])
    data.samples = _attempt(data, lambda: read_samples(run_dir / "samples.jsonl"), [])
    for path in sorted((run_dir / "timeline").glob("*.jsonl"), key=lambda path: _rank(path.stem)):
        spans: list[Span] = _attempt(data, partial(read_spans, path), [])
        if spans:
            data.timelines[path.stem] = spans
            _load_slots(run_dir / "slots" / path.name, data)
    return data


def _load_slots(path: Path, data: RunData) -> None:
    if path.exists():
        pieces: list[SlotPiece] = _attempt(data, partial(read_slots, path), [])
        if pieces:
            data.slots[path.stem] = pieces


def _rank(process: str) -> tuple[int, str, int]:
    """Controller, generators, trainers, the rest; numbers at the end in order of size."""
    stem = process.rstrip("0123456789")
    number = int(process[len(stem) :] or 0)
    order = ("controller", "generator", "trainer")
    place = next((i for i, role in enumerate(order) if stem.startswith(role)), len(order))
    return place, stem, number


def _attempt(data: RunData, load: Callable[[], T], otherwise: T) -> T:
    """Load, or say in the report why not."""
    try:
        return load()
    except (RecordError, OSError) as error:
        data.notes.append(str(error))
        return otherwise


def _load_result(path: Path) -> Mapping[str, Any] | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise RecordError(path, 1, str(error)) from error


def _load_config(path: Path, data: RunData) -> None:
    try:
        data.config_text = path.read_text(encoding="utf-8", errors="replace")
        parsed = yaml.safe_load(data.config_text)
    except FileNotFoundError:
        data.notes.append("config.yaml is missing, so the settings of the run are not shown.")
        return
    except (OSError, yaml.YAMLError) as error:
        data.notes.append(f"config.yaml cannot be read: {error}")
        return
    if isinstance(parsed, Mapping):
        data.config = parsed
    name = data.setting("run.name")
    if isinstance(name, str) and name:
        data.name = name
