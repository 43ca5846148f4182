"""The Prometheus metrics of the run as a whole, exported by the controller; see `metrics`."""

import math
import shutil
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, get_args

from prometheus_client import Gauge, Histogram

from asyncrl.monitoring.metrics.instruments import By, Total, counter, gauge, histogram
from asyncrl.monitoring.metrics.process_metrics import ProcessMetrics
from asyncrl.monitoring.records.spans import ENOUGH
from asyncrl.wire.records.evaluations import EvaluationRecord, accuracy_of
from asyncrl.wire.records.step import Measured, OnPolicySteps, StepMetrics
from asyncrl.wire.records.wrong_policy import Cause

# ruff: noqa: RUF009 - the calls below make dataclass fields; ruff cannot see that through a helper

GENERATOR_STATES = ("starting", "ready", "leaving", "left", "lost")
"""`left`: ordered to leave because the run was scaled down."""
_STEPS = 51


def _step_gauge(name: str, text: str, value: Callable[[StepMetrics], Measured]) -> Any:
    return gauge(name, text, value=value)


def _disk(folder: Path) -> tuple[float, float]:
    """(free, size) of a folder's disk in bytes; NaN if it cannot be read."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return math.nan, math.nan
    return usage.free, usage.total


@dataclass(frozen=True, slots=True)
class ControllerMetrics(ProcessMetrics):
    """The run as a whole, as the controller sees it."""

    run: By[Gauge] = gauge("asyncrl_run_info", "1 for the name of the run.", labels={"run": None})
    started: Gauge = gauge("asyncrl_run_start_time_seconds", "Unix time of the run's start.")
    steps: Total = counter("asyncrl_steps_total", "Optimizer steps finished.")
    steps_planned: Gauge = gauge("asyncrl_planned_steps", "Optimizer steps that the run will do.")
    eta: Gauge = gauge("asyncrl_eta_seconds", "Estimated time until the last step.")
    step_time: Histogram = histogram("asyncrl_step_seconds", "From one finished step to the next.")
    run_ahead: Gauge = _step_gauge(
        "asyncrl_runahead_steps",
        "Steps of run-ahead that the run chose (scheduler.max_runahead_groups: auto).",
        lambda step: step.run_ahead.depth,
    )
    step_ended: Gauge = _step_gauge(
        "asyncrl_last_step_timestamp_seconds",
        "Unix time at which the last step was finished.",
        lambda step: step.time,
    )
    step_median: Gauge = gauge(
        "asyncrl_step_median_seconds", "Median of the last steps' times; 0 until there were five."
    )
    reward_mean: Gauge = _step_gauge(
        "asyncrl_reward_mean",
        "Mean reward of the last step's samples.",
        lambda step: step.learning.reward_mean,
    )
    reward_std: Gauge = _step_gauge(
        "asyncrl_reward_std",
        "Standard deviation of the rewards of the last step's samples.",
        lambda step: step.learning.reward_std,
    )
    reward_terms: By[Gauge] = gauge(
        "asyncrl_reward_term_mean",
        "Mean of what a reward function returned for the last step's samples, without its weight.",
        labels={"function": None},
    )
    staleness_mean: Gauge = _step_gauge(
        "asyncrl_staleness_mean_steps",
        "Mean age of the last step's tokens, in steps between drawing and training.",
        lambda step: step.staleness.mean,
    )
    staleness_max: Gauge = _step_gauge(
        "asyncrl_staleness_max_steps",
        "Age of the last step's oldest token, in steps between drawing and training.",
        lambda step: step.staleness.max,
    )
    on_policy_steps: By[Gauge] = gauge(
        "asyncrl_on_policy_steps",
        "Steps of the run, by whether they were exactly on-policy; those before a resume included.",
        labels={"exactly": OnPolicySteps._fields},
    )
    throughput: Gauge = _step_gauge(
        "asyncrl_generation_tokens_per_second",
        "Response tokens generated per second over the last seconds, all generators together.",
        lambda step: step.tokens_per_second,
    )
    generator_idle: Gauge = _step_gauge(
        "asyncrl_generator_idle_ratio",
        "Share of the last seconds in which generators did nothing, mean over generators.",
        lambda step: step.idle.generator,
    )
    trainer_idle: Gauge = _step_gauge(
        "asyncrl_trainer_idle_ratio",
        "Share of the last step's time in which the trainer waited.",
        lambda step: step.idle.trainer,
    )
    accuracy: By[Gauge] = gauge(
        "asyncrl_evaluation_accuracy_ratio",
        "Share of right samples on held-out prompts; `during`: the newest. NaN if that is "
        "incomplete.",
        labels={"when": ("before", "during", "after")},
    )
    set_accuracy: By[Gauge] = gauge(
        "asyncrl_evaluation_set_accuracy_ratio",
        "Share of right samples on each held-out set, of the newest evaluation. NaN if that is "
        "incomplete.",
        labels={"set": None},
    )
    evaluated_step: Gauge = gauge(
        "asyncrl_evaluation_step", "The step that was evaluated last; its policy version."
    )
    evaluations: By[Total] = counter(
        "asyncrl_evaluations_total",
        "Evaluations, by whether they have a result.",
        labels={"outcome": ("complete", "incomplete", "given_up")},
    )
    samples: By[Gauge] = gauge(
        "asyncrl_samples_in_flight",
        "Samples between their start and training, by where they are.",
        labels={"state": ("running", "held", "queued")},
    )
    samples_ended: By[Total] = counter(
        "asyncrl_samples_total",
        "Samples that left the pipeline: trained on, or of a group that failed.",
        labels={"outcome": ("trained", "failed")},
    )
    groups_without_signal: By[Total] = counter(
        "asyncrl_groups_without_signal_total",
        "Groups that dynamic sampling left out: all of their rewards are 0, or equal otherwise.",
        labels={"rewards": ("zero", "equal")},
    )
    groups_left_over: Total = counter(
        "asyncrl_groups_left_over_total",
        "Times that dynamic sampling had a group begun for a step that did not need it; a later "
        "step takes it.",
    )
    signal_share: Gauge = gauge(
        "asyncrl_signal_share_ratio",
        "Share of the groups that carry signal, as dynamic sampling expects.",
    )
    generators: By[Gauge] = gauge(
        "asyncrl_generators", "Generator processes, by state.", labels={"state": GENERATOR_STATES}
    )
    events: By[Total] = counter(
        "asyncrl_scheduler_events_total",
        "Events given to the scheduler, by type.",
        labels={"event": None},
    )
    event_time: Total = counter(
        "asyncrl_scheduler_seconds_total", "Time spent inside the scheduler's decisions."
    )
    process_failures: By[Total] = counter(
        "asyncrl_process_failures_total",
        "Processes that ended before they were told to, by role.",
        labels={"role": ("generator", "trainer", "relay")},
    )
    disk_free: Gauge = gauge(
        "asyncrl_run_disk_free_bytes", "Free space of the disk that the run's folder is on."
    )
    disk_size: Gauge = gauge(
        "asyncrl_run_disk_size_bytes", "Size of the disk that the run's folder is on."
    )
    wrong_policy: By[Total] = counter(
        "asyncrl_wrong_policy_total",
        "Findings that a generator samples from another policy than the trainer has, by cause.",
        labels={"cause": get_args(Cause)},
    )

    step_seconds: deque[float] = field(
        default_factory=lambda: deque(maxlen=_STEPS), kw_only=True, repr=False
    )
    """Times of the last steps. Not a metric."""

    def watch_disk(self, folder: Path) -> None:
        """Measure the disk of this folder whenever the metrics are read."""
        self.disk_free.set_function(lambda: _disk(folder)[0])
        self.disk_size.set_function(lambda: _disk(folder)[1])

    def count_on_policy(self, counts: OnPolicySteps) -> None:
        """Set the number of exactly on-policy steps of the run."""
        for exactly, steps in counts._asdict().items():
            self.on_policy_steps.of(exactly).set(steps)

    def evaluated(self, record: EvaluationRecord) -> None:
        """Count an evaluation, and set its gauges."""
        self.evaluations.of("complete" if record.is_complete else "incomplete").inc()
        self.accuracy.of(record.when).set(_or_unknown(accuracy_of(record)))
        self.evaluated_step.set(record.step)
        for name, one in record.sets.items():
            self.set_accuracy.of(name).set(_or_unknown(one.accuracy))

    def publish(self, step: StepMetrics) -> None:
        """Set the gauges of a step; one whose value is None keeps its last."""
        self.set_gauges(step)
        self.step_seconds.append(step.step_seconds)
        if len(self.step_seconds) >= ENOUGH:
            self.step_median.set(median(self.step_seconds))
        for function, mean in step.rewards.items():
            if mean is not None:
                self.reward_terms.of(function).set(mean)


def _or_unknown(accuracy: float | None) -> float:
    """Map an unknown accuracy to NaN, so that a gauge does not keep an earlier one."""
    return math.nan if accuracy is None else accuracy
