"""An algorithm of a user's own reaches every reader of a step without another file changing."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np
import pytest
from prometheus_client import generate_latest
from rich.console import Console

from asyncrl.config.run_config import RunConfig
from asyncrl.controller.progress import Progress
from asyncrl.monitoring.config import MonitoringConfig
from asyncrl.monitoring.metrics.metrics import ControllerMetrics, TrainerMetrics, new_registry
from asyncrl.monitoring.records.metrics_log import MetricsLog, read_metrics
from asyncrl.monitoring.report.write import write_report
from asyncrl.monitoring.terminal.live import LiveView
from asyncrl.rollout.trajectory import Trajectory
from asyncrl.trainer.algorithms.base import LossSums, Signal, TokenBatch
from asyncrl.trainer.algorithms.grpo import Grpo
from asyncrl.trainer.base import algorithm_registry as registry
from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.trainer.base.errors import TrainerError
from asyncrl.trainer.learner import Learner
from asyncrl.wire.messages.from_trainer import StepFinished
from asyncrl.wire.records.step import TrainerTimes
from asyncrl.wire.weights.layout import WeightManifest


class Probe(Grpo):
    """GRPO that also reports how sure the policy is of what it drew."""

    signals: ClassVar[Mapping[str, Signal]] = {
        **Grpo.signals,
        "mean_logprob": Signal("log-probability of a token, nats"),
    }

    def loss(self, batch: TokenBatch) -> LossSums:
        own = Grpo.loss(self, batch)
        return LossSums(own.loss, {**own.sums, "mean_logprob": batch.logprobs.detach().sum()})


class Forgetful(Probe):
    """Declares a signal and does not report it."""

    def loss(self, batch: TokenBatch) -> LossSums:
        return Grpo.loss(self, batch)


@pytest.fixture
def learner_of(
    model_path: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Learner]:
    monkeypatch.setattr(registry, "_PROVIDED", {})
    registry.provide("own_algorithms:Probe", Probe)
    registry.provide("own_algorithms:Forgetful", Forgetful)

    def learner(algorithm: str) -> Learner:
        config = TrainerConfig(algorithm=algorithm, device="cpu", learning_rate=1e-3)
        return Learner(config, model_path("qwen3"), group_size=4, seed=1)

    return learner


def test_a_new_signal_reaches_metrics_jsonl_prometheus_and_the_report(
    learner_of: Callable[[str], Learner], group_of: Callable[..., list[Trajectory]], tmp_path: Path
) -> None:
    learner = learner_of("own_algorithms:Probe")
    learner.add_group(group_of(0, np.random.default_rng(0)), np.arange(4, dtype=np.float32))
    metrics = learner.step()
    value = metrics.algorithm["mean_logprob"]
    assert value is not None
    assert -20 < value < -1

    exported = new_registry()
    TrainerMetrics.register(exported, "trainer").publish(metrics)
    text = generate_latest(exported).decode()
    assert f'asyncrl_algorithm_signal{{process="trainer",signal="mean_logprob"}} {value}' in text
    for name, measured in (
        ("asyncrl_logprob_mismatch_nats", metrics.mismatch.fresh_abs_mean),
        ("asyncrl_behaviour_kl_nats", metrics.mismatch.kl),
    ):
        assert measured is not None
        assert f'{name}{{process="trainer"}} {measured}' in text

    manifest = WeightManifest(policy_version=1, path="/nowhere", nbytes=0, tensors=())
    sent = StepFinished(0, (0,), manifest, metrics, TrainerTimes())
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=StepFinished)
    quiet = MonitoringConfig(live="off")
    log = MetricsLog(tmp_path / "metrics.jsonl")
    progress = Progress(
        RunConfig.model_validate({"model": {"path": "x"}}),
        view=LiveView(quiet, 1, "run", Console(file=io.StringIO())),
        log=log,
        metrics=ControllerMetrics.register(new_registry(), "controller"),
        earlier=[],
    )
    progress.step_finished(received)
    log.close()
    (step,) = read_metrics(tmp_path / "metrics.jsonl")
    assert step.algorithm == metrics.algorithm
    assert step.mismatch == metrics.mismatch
    assert "Mean logprob" in write_report(tmp_path).read_text()


def test_a_loss_that_leaves_out_a_declared_signal_is_refused(
    learner_of: Callable[[str], Learner], group_of: Callable[..., list[Trajectory]]
) -> None:
    group = group_of(0, np.random.default_rng(0))
    with pytest.raises(TrainerError, match="mean_logprob"):
        learner_of("own_algorithms:Forgetful").add_group(group, np.arange(4, dtype=np.float32))
