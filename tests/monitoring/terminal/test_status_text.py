"""The text of `asyncrl status`."""

from __future__ import annotations

from asyncrl.monitoring.terminal.run_view import RunView
from asyncrl.monitoring.terminal.status_text import status_lines
from asyncrl.wire.records.step import EnvironmentCounts, GroupTotals, StepMetrics, TokenCounts

ABOUT = {"run": "mine", "steps": 30, "engine": "torch"}


def test_a_run_in_training_in_a_few_lines() -> None:
    view = RunView(
        phase="training",
        step=7,
        tokens=TokenCounts(generated=100, drafted=70, accepted=35),
        groups=GroupTotals(trained=1063, failed=1),
        groups_in_flight=18,
        groups_delivered=2,
        samples_running=34,
        samples_held=12,
        samples_queued=3,
        eta_seconds=125,
        accuracy_before=0.125,
        waiting_for="step 7 waits for 1 sample",
    )
    last = {"reward_mean": 0.4118, "staleness_mean": 0.0, "staleness_max": 0}
    last["exactly_on_policy"] = True
    processes = {
        "trainer": {"state": "ready", "policy_version": 7, "metrics_port": 9101},
        "generator-0": {"state": "starting", "policy_version": -1, "metrics_port": None},
    }
    assert status_lines({**ABOUT, **view.as_status(), **last, "processes": processes}) == [
        "mine: training, 7 of 30 steps, torch engine, 2 min 05 s left",
        "waiting: step 7 waits for 1 sample",
        "reward 0.412, accuracy before training 0.125",
        "staleness 0.00 on average, 0 at most, exactly on-policy so far",
        "35% of tokens drafted, 50% of drafts accepted",
        "groups: 1,063 trained on, 1 failed, 18 in flight, 2 delivered",
        "samples: 34 running, 12 held, 3 queued",
        "  trainer: ready, policy version 7, metrics on port 9101",
        "  generator-0: starting",
    ]


def test_what_is_not_known_yet_is_left_out() -> None:
    assert status_lines({**ABOUT, **RunView().as_status(), "processes": {}}) == [
        "mine: starting, 0 of 30 steps, torch engine",
        "groups: 0 trained on, 0 failed",
    ]
    view = RunView(phase="evaluating 1/4", evaluating="1/4", samples_queued=0)
    assert status_lines({**ABOUT, **view.as_status(), "processes": {}})[1:] == [
        "groups: 0 trained on, 0 failed",
    ]


def test_environments_and_failed_rewards_are_shown() -> None:
    failed = {"environment": {"died": 2, "timeout": 1}}
    counts = EnvironmentCounts(turns=1200, seconds=6.0, started_over=3)
    last = StepMetrics(step=7, time=0.0, environments=counts, reward_failures=failed)
    view = RunView(phase="training", last=last, samples_running=9, samples_in_environments=7)
    lines = status_lines({**ABOUT, **view.as_status()})
    assert "samples: 9 running, 7 of them wait for environments" in lines
    assert "environments: 1,200 turns answered, 5.0 ms each, 3 samples started over" in lines
    assert "rewards: 3 failed and counted as 0 (environment: 2 died, 1 timeout)" in lines
