import re
import subprocess

import pytest
from each_one import each_one
from needed_programs import needs, path_of
from prometheus_client import generate_latest
from step_records import full_step

from asyncrl.monitoring.metrics.metrics import (
    ROLES,
    ControllerMetrics,
    GeneratorMetrics,
    ProcessMetrics,
    TrainerMetrics,
    all_specs,
    new_registry,
)
from asyncrl.monitoring.records.spans import Span
from asyncrl.wire.records.step import LearnerMetrics, LearningMetrics, MismatchMetrics


def exposition(role, process="p-0"):
    registry = new_registry()
    metrics = role.register(registry, process)
    return metrics, lambda: generate_latest(registry).decode()


def test_names_follow_the_conventions():
    other = r"_(ms|millis|minutes|percent|kb|mb|count|sum|bucket)(_|$)"
    with each_one() as checking:
        for _, spec in all_specs():
            with checking(spec.name):
                assert re.fullmatch(r"asyncrl_[a-z][a-z0-9_]*", spec.name)
                assert spec.help.endswith(".")
                assert (spec.kind == "counter") == spec.name.endswith("_total")
                assert not re.search(other, spec.name)
                if spec.kind == "histogram":
                    assert spec.name.endswith(("_seconds", "_bytes", "_tokens"))


def test_a_name_means_one_thing_everywhere():
    seen = {}
    for _, spec in all_specs():
        assert seen.setdefault(spec.name, spec) == spec


@pytest.mark.parametrize("role", ROLES)
def test_every_series_names_its_process(role):
    _, text = exposition(role, 'odd"name')
    lines = [line for line in text().splitlines() if line.startswith("asyncrl_")]
    assert lines
    assert all('process="odd\\"name"' in line for line in lines)
    assert "_created" not in text()


@pytest.mark.parametrize("role", ROLES)
@needs("promtool")
def test_promtool_finds_nothing_to_complain_about(role):
    metrics, text = exposition(role)
    if isinstance(metrics, ProcessMetrics):
        metrics.observe_span(Span("waiting", 0, 1, {"for": "weights"}))
    ours = "\n".join(line for line in text().splitlines() if "asyncrl_" in line)
    done = subprocess.run(
        [str(path_of("promtool")), "check", "metrics"],
        input=ours + "\n",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_total_follows_a_counter_kept_elsewhere_and_its_restart():
    metrics, text = exposition(GeneratorMetrics)
    for total in (10, 10, 25, 5):
        metrics.generated_tokens.follow(total)
    assert 'asyncrl_generated_tokens_total{process="p-0"} 30.0' in text()


def test_label_values_exist_from_the_start_and_others_are_refused():
    metrics, text = exposition(GeneratorMetrics)
    assert 'asyncrl_finished_samples_total{process="p-0",reason="length"} 0.0' in text()
    metrics.samples_finished.of("length").inc(2)
    assert 'reason="length"} 2.0' in text()
    with pytest.raises(ValueError, match="only stop, length, abort"):
        metrics.samples_finished.of("lenght")


def test_two_labels_make_a_series_of_each_pair():
    metrics, text = exposition(GeneratorMetrics)
    metrics.rewards_failed.of("score", "raised").follow(3)
    metrics.rewards_failed.of("score", "timeout").follow(1)
    shown = text()
    name = "asyncrl_reward_failures_total"
    assert f'{name}{{function="score",process="p-0",reason="raised"}} 3.0' in shown
    assert f'{name}{{function="score",process="p-0",reason="timeout"}} 1.0' in shown


def test_a_step_sets_gauges_and_leaves_what_was_not_measured():
    metrics, text = exposition(TrainerMetrics)
    metrics.publish(
        LearnerMetrics(
            learning=LearningMetrics(loss=0.25, entropy=0.5),
            mismatch=MismatchMetrics(kl=0.125, fresh_abs_mean=1e-6),
            algorithm={"clip_ratio": 0.75, "other": None},
        )
    )
    metrics.publish(LearnerMetrics(learning=LearningMetrics(loss=0.75)))
    shown = text()
    assert 'asyncrl_loss{process="p-0"} 0.75' in shown
    assert 'asyncrl_policy_entropy_nats{process="p-0"} 0.5' in shown
    assert 'asyncrl_behaviour_kl_nats{process="p-0"} 0.125' in shown
    assert 'asyncrl_logprob_mismatch_nats{process="p-0"} 1e-06' in shown
    assert 'asyncrl_algorithm_signal{process="p-0",signal="clip_ratio"} 0.75' in shown
    assert '"other"' not in shown


@pytest.mark.parametrize("role", [ControllerMetrics, TrainerMetrics])
def test_a_step_with_every_number_sets_every_gauge_of_a_step(role):
    metrics, text = exposition(role)
    metrics.publish(full_step())
    values = dict(re.findall(r'^(\w+)\{process="p-0"\} (\S+)$', text(), re.MULTILINE))
    of_a_step = [spec for each, spec in all_specs() if each is role and spec.value is not None]
    assert len(of_a_step) > 5
    for spec in of_a_step:
        assert float(values[spec.name]) == spec.value(full_step()) > 0


def test_spans_become_busy_and_idle_seconds():
    metrics, text = exposition(ControllerMetrics)
    metrics.observe_span(Span("training", 1.0, 3.0))
    metrics.observe_span(Span("waiting", 3.0, 4.5, {"for": "weights"}))
    assert 'asyncrl_activity_seconds_total{kind="training",process="p-0"} 2.0' in text()
    assert 'asyncrl_idle_seconds_total{cause="weights",process="p-0"} 1.5' in text()
