"""What the status, the terminal, Prometheus and the result say of evaluations."""

from __future__ import annotations

import io
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from asyncrl.config.run_config import RunConfig
from asyncrl.controller.progress import Progress
from asyncrl.evaluation.results import EvaluationResults, before_of
from asyncrl.evaluation.round import EvaluationPlan, EvaluationRound, PlannedSet
from asyncrl.monitoring.config import MonitoringConfig
from asyncrl.monitoring.metrics.metrics import ControllerMetrics, new_registry
from asyncrl.monitoring.records.metrics_log import MetricsLog
from asyncrl.monitoring.terminal.live import LiveView
from asyncrl.monitoring.terminal.status_text import status_lines
from asyncrl.steering.status_stream import status_reply
from asyncrl.tasks.evaluation_config import EvaluationConfig
from asyncrl.wire.records.evaluations import EvaluationRecord, SetEvaluation


def test_evaluations_are_shown_everywhere(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    registry, said = new_registry(), io.StringIO()
    progress = Progress(
        RunConfig(),
        view=LiveView(MonitoringConfig(live="plain"), 9, "run", Console(file=said, width=80)),
        log=MetricsLog(tmp_path / "metrics.jsonl"),
        metrics=ControllerMetrics.register(registry, "controller"),
        earlier=[],
    )
    again = before_of(0.75, 100)
    progress.evaluated(again, is_known=True)
    assert "before training (measured at the start): 0.750" in said.getvalue()
    results = progress.evaluations = EvaluationResults(tmp_path, EvaluationConfig(every=2))
    for step, accuracy, when in ((0, 0.25, "before"), (2, 0.75, "during"), (4, 0.5, "during")):
        one = SetEvaluation(
            prompts=8,
            samples=32,
            accuracy=accuracy,
            accuracy_error=0.01,
            reward=0.6,
            pass_at={1: 0.5, 4: 0.9},
        )
        sets = {"held_out": one, "hard": one}
        record = EvaluationRecord(step=step, time=1.0, when=when, sets=sets, held_seconds=0.5)  # type: ignore[arg-type]
        results.add(record)
        progress.evaluated(record, is_best=step == 2)
    plan = EvaluationPlan((PlannedSet("held_out", 2, 4),))
    current = EvaluationRound(7, plan, EvaluationConfig(), version=6)
    trainer = SimpleNamespace(report=None)
    fleet: Any = SimpleNamespace(
        everyone=list, every_generator=[], ranks=[trainer], trainer=trainer, all_ready=True
    )
    status = status_reply(RunConfig(), fleet, progress.view(fleet, current)).status
    assert (status["accuracy_before"], status["accuracy"]) == (0.25, 0.5)
    assert (status["accuracy_step"], status["evaluating"]) == (4, "step 6, 0/8")
    assert (status["best_accuracy"], status["best_step"]) == (0.75, 2)
    assert status["accuracies"] == {"held_out": 0.5, "hard": 0.5}
    assert not status["phase"].startswith("evaluating")
    [line] = [one for one in status_lines(status) if "accuracy of step" in one]
    assert line == (
        "accuracy of step 4 0.500, held-out reward 0.600, best 0.750 at step 2, "
        "evaluating step 6, 0/8"
    )
    lacking = SetEvaluation(prompts=8, samples=20, unscored=12, accuracy=None)
    failed = EvaluationRecord(
        step=6, time=1.0, when="during", sets={"held_out": lacking, "hard": one}
    )
    results.add(failed)
    progress.evaluated(failed)
    status = status_reply(RunConfig(), fleet, progress.view(fleet, None)).status
    assert (status["accuracy"], status["best_step"]) == (None, 2)
    assert status["accuracies"] == {"held_out": None, "hard": 0.5}
    [line] = [text for text in status_lines(status) if "incomplete" in text]
    assert line == (
        "evaluation of step 6 is incomplete: 12 of 32 samples have no reward, best 0.750 at step 2"
    )
    progress.evaluation_given_up()
    values = {
        (sample.name, *sample.labels.values()): sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if "evaluation" in sample.name
    }
    of = "controller"
    assert values["asyncrl_evaluation_step", of] == 6
    found = {key[0] + "/" + "/".join(sorted(key[1:])): value for key, value in values.items()}
    assert math.isnan(found["asyncrl_evaluation_accuracy_ratio/controller/during"])
    assert math.isnan(found["asyncrl_evaluation_set_accuracy_ratio/controller/held_out"])
    assert found["asyncrl_evaluations_total/controller/incomplete"] == 1
    assert found["asyncrl_evaluation_set_accuracy_ratio/controller/hard"] == 0.5
    assert found["asyncrl_evaluations_total/complete/controller"] == 4
    assert found["asyncrl_evaluations_total/controller/given_up"] == 1
    text = " ".join(said.getvalue().split())
    assert "of step 2: 0.750 (0.579 to 0.867 at 95%; 32 samples, drawn as in training)" in text
    assert "mean reward 0.600, pass@4 0.900" in text
    assert "the best so far; it held new weights back for 0.5 s" in text
    result = progress.result(None, None, total_seconds=1.0)
    assert (result.best_step, result.best_accuracy) == (2, 0.75)
