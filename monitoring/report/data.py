"""Reads the files of a run for its report. Any of them may be missing."""

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from asyncrl.monitoring.config import MonitoringConfig
from asyncrl.monitoring.errors import RecordError, ReportError
from asyncrl.monitoring.metrics.occupancy import SlotPiece, read_slots
from asyncrl.monitoring.records.jsonl import read_jsonl
from asyncrl.monitoring.records.metrics_log import read_evaluations, read_metrics
from asyncrl.monitoring.records.samples import SampleRecord, read_samples, trained_on, with_recent
from asyncrl.monitoring.records.spans import Span, read_spans
from asyncrl.monitoring.report.series import finite
from asyncrl.monitoring.terminal.evaluation_text import course
from asyncrl.wire.messages.control import OrderRecord
from asyncrl.wire.records.evaluations import EvaluationRecord, newest_of
from asyncrl.wire.records.step import (
    Measured,
    OnPolicySteps,
    RunResult,
    StepMetrics,
    TokenCounts,
    is_on_policy,
)

T = TypeVar("T")
RECENT_SAMPLES = 4
"""Samples of the last steps in a report, beside those that are spread over the run."""


class BeginningState(msgspec.Struct, frozen=True):
    """The part of run.json that the report reads."""

    accuracy_before: float | None = None
    evaluation_samples: int = 0


@dataclass(slots=True)
class RunData:
    """The contents of one run directory."""

    name: str
    steps: list[StepMetrics] = field(default_factory=list)
    """Records of metrics.jsonl, in order."""
    timelines: dict[str, list[Span]] = field(default_factory=dict)
    """Process to its spans, in the order in which the processes are drawn."""
    slots: dict[str, list[SlotPiece]] = field(default_factory=dict)
    """Generator to the use of its slots, where recorded."""
    samples: list[SampleRecord] = field(default_factory=list)
    """Samples that were trained on, in order."""
    orders: list[OrderRecord] = field(default_factory=list)
    evaluations: list[EvaluationRecord] = field(default_factory=list)
    result: RunResult | None = None
    begun: BeginningState = field(default_factory=BeginningState)
    """Known from run.json before there is a result."""
    config_text: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """Sentences for the reader about what could not be read."""

    def column(self, value: Callable[[StepMetrics], Measured]) -> list[float | None]:
        """`[S]` one number of each step; None where it was not measured."""
        return [finite(value(step)) for step in self.steps]

    def step_numbers(self) -> list[float]:
        """`[S]` the indices of the steps."""
        return [float(step.step) for step in self.steps]

    def tokens(self) -> TokenCounts:
        """Token counts of all generators since the run began, as far as recorded."""
        if self.result is not None:
            return self.result.tokens
        return self.steps[-1].tokens if self.steps else TokenCounts()

    @property
    def steps_done(self) -> int:
        """Number of optimizer steps, as far as recorded."""
        if self.result is not None:
            return self.result.steps
        return self.steps[-1].step + 1 if self.steps else 0

    def on_policy_steps(self) -> OnPolicySteps:
        """Count the steps by whether they were exactly on-policy."""
        return OnPolicySteps.of(Counter(map(is_on_policy, self.steps)), self.steps_done)

    def accuracies(self) -> tuple[float | None, float | None]:
        """Held-out accuracy before and after training, 0 to 1, if measured."""
        if self.result is None:
            return self.begun.accuracy_before, None
        return self.result.accuracy_before, self.result.accuracy_after

    @property
    def newest_evaluation(self) -> EvaluationRecord | None:
        """The evaluation of the newest trained step that has an accuracy."""
        return newest_of(self.evaluations)

    def course(self) -> str:
        """Held-out accuracy so far: `0.410 → 0.523 (step 40)`."""
        before, after = self.accuracies()
        return course(before, after, self.newest_evaluation)

    def trials(self) -> tuple[float, float] | None:
        """Independent samples behind the accuracies before and after training, if known."""
        drawn = float(self.evaluation_samples)
        return (self._trials("before", drawn), self._trials("after", drawn)) if drawn else None

    def _trials(self, when: str, drawn: float) -> float:
        for record in reversed(self.evaluations):
            one = record.main
            if record.when == when and one is not None and one.accuracy is not None:
                return one.trials
        return drawn

    @property
    def evaluation_samples(self) -> int:
        """Held-out samples behind each accuracy; 0 if unknown."""
        return (self.begun if self.result is None else self.result).evaluation_samples

    @property
    def held_out(self) -> str:
        """Text on the number of held-out samples behind the accuracies, which must be known."""
        main = next((one.main for one in self.evaluations if one.main is not None), None)
        several = main is not None and main.samples > main.prompts
        prompts = f" of {main.prompts:,} prompts" if main is not None and several else ""
        return f"{self.evaluation_samples:,} held-out samples{prompts}"

    def setting(self, path: str, default: Any = None) -> Any:
        """The setting at a dotted path, such as `run.steps`."""
        value: Any = self.config
        for key in path.split("."):
            if not isinstance(value, Mapping) or key not in value:
                return default
            value = value[key]
        return value

    @property
    def lenient(self) -> bool:
        """True if samples began with tokens of earlier epochs, kept by the lenient, biased rule."""
        return bool(self.setting("cache.reuse") == "lenient")

    @property
    def max_samples(self) -> int:
        """Most sample trajectories in the report."""
        default = MonitoringConfig().report_samples
        chosen = self.setting("monitoring.report_samples", default)
        return chosen if isinstance(chosen, int) and chosen >= 0 else default


def load_run(run_dir: Path) -> RunData:
    """Read the files that exist; `notes` names unreadable ones. Raises ReportError if not a run."""
    if not run_dir.is_dir():
        raise ReportError(f"{run_dir} does not exist; `ls {run_dir.parent}` lists the runs")
    known = ("config.yaml", "metrics.jsonl", "result.json", "timeline")
    if not any((run_dir / name).exists() for name in known):
        raise ReportError(
            f"{run_dir} is not the directory of a run: it contains none of {', '.join(known)}; "
            "give a directory that `asyncrl run` has created, such as runs/NAME"
        )
    data = RunData(name=run_dir.resolve().name)
    load_config(run_dir / "config.yaml", data)
    load_state(run_dir / "run.json", data)

    def read(name: str, load: Callable[[Path], T], otherwise: T) -> T:
        try:
            return load(run_dir / name)
        except FileNotFoundError:
            return otherwise
        except (RecordError, OSError) as error:
            data.notes.append(str(error))
            return otherwise

    data.result = read("result.json", _load_result, None)
    data.steps = read("metrics.jsonl", read_metrics, [])
    data.evaluations = read("evaluations.jsonl", read_evaluations, [])
    data.samples = read("samples.jsonl", read_samples, [])
    data.samples = with_recent(run_dir, trained_on(data.samples), RECENT_SAMPLES)
    data.orders = read("orders.jsonl", partial(read_jsonl, kind=OrderRecord), [])
    for path in sorted((run_dir / "timeline").glob("*.jsonl"), key=lambda path: rank_of(path.stem)):
        if spans := read(f"timeline/{path.name}", read_spans, list[Span]()):
            data.timelines[path.stem] = spans
            if pieces := read(f"slots/{path.name}", read_slots, list[SlotPiece]()):
                data.slots[path.stem] = pieces
    return data


def load_state(path: Path, data: RunData) -> None:
    """Read run.json into `data`. If it is damaged, the accuracy before training is missing."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        data.begun = msgspec.json.decode(path.read_bytes(), type=BeginningState)


def rank_of(process: str) -> tuple[int, str, int]:
    """Sort key of a process: controller, generators, trainers, the rest; then by its number."""
    stem = process.rstrip("0123456789")
    number = int(process[len(stem) :] or 0)
    order = ("controller", "generator", "trainer")
    place = next((i for i, role in enumerate(order) if stem.startswith(role)), len(order))
    return place, stem, number


def _load_result(path: Path) -> RunResult | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunResult)
    except msgspec.DecodeError as error:
        raise RecordError(path, 1, str(error)) from error


_parsed = lru_cache(maxsize=4)(yaml.safe_load)
"""Takes most of the time of a report; a page shows many of one run."""


def load_config(path: Path, data: RunData) -> None:
    """Read config.yaml into `data`; errors become notes."""
    try:
        data.config_text = path.read_text(encoding="utf-8", errors="replace")
        parsed = _parsed(data.config_text)
    except FileNotFoundError:
        data.notes.append("config.yaml is missing, so the run's settings are not shown.")
        return
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:
        data.notes.append(f"config.yaml cannot be read: {error}")
        return
    if isinstance(parsed, Mapping):
        data.config = parsed
    name = data.setting("run.name")
    if isinstance(name, str) and name:
        data.name = name
