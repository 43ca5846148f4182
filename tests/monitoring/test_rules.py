"""Each alert is raised by a fault and by nothing else, as Prometheus itself evaluates the rules."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from needed_programs import needs, path_of

from asyncrl.config.run_config import RunConfig
from asyncrl.initialise.write import write_monitoring
from asyncrl.monitoring.dashboards.panels import ROWS
from asyncrl.monitoring.metrics.discovery import Target, target_groups
from asyncrl.monitoring.metrics.metrics import all_specs
from asyncrl.monitoring.rules.__main__ import faster

RULES = Path(__file__).parents[2] / "monitoring" / "rules" / "asyncrl.yaml"
needs_promtool = needs("promtool")

# Series as promtool takes them, a value a minute: "0+1x90" is 0, 1, 2, ..., 90.
BEFORE, AFTER = 90, 45
"""Minutes before and after a fault."""
JUDGED_AT = "2h12m"
AT_ONCE = 17
"""Runs of one test: promtool takes 10,000 values into one expression."""


def steady(value: float) -> str:
    return f"{value}+0x{BEFORE + AFTER}"


def growing(step: float) -> str:
    return f"0+{step}x{BEFORE + AFTER}"


def then(before: float, after: float, *, grows: tuple[float, float] = (0, 0)) -> str:
    """Another value from the fault on, or the same value that grows at another speed."""
    return f"{before}+{grows[0]}x{BEFORE} {after}+{grows[1]}x{AFTER}"


def stopped(step: float) -> str:
    """A counter or time that no longer grows."""
    return f"0+{step}x{BEFORE} {step * BEFORE}+0x{AFTER}"


def series(process: str, name: str, **labels: str) -> str:
    """A series of one of the run's processes."""
    every = {"job": "asyncrl", "run": "first", "instance": process}
    if name != "up":
        every["process"] = process
    pairs = (f'{key}="{value}"' for key, value in (every | labels).items())
    return f"{name}{{{', '.join(pairs)}}}"


UP = [series(name, "up") for name in ("controller", "trainer", "generator-0")]
READY = series("controller", "asyncrl_generators", state="ready")
VERSION = series("controller", "asyncrl_policy_version")
LAST_STEP = series("controller", "asyncrl_last_step_timestamp_seconds")
STEPS = series("controller", "asyncrl_steps_total")
MEDIAN = series("controller", "asyncrl_step_median_seconds")
DEATHS = series("controller", "asyncrl_process_failures_total", role="generator")
TRAINING = series("trainer", "asyncrl_phase_seconds", kind="training")
WAITING_PHASE = series("trainer", "asyncrl_phase_seconds", kind="waiting")
SAVING = series("trainer", "asyncrl_phase_seconds", kind="saving")
SAVING_MEDIAN = series("trainer", "asyncrl_phase_median_seconds", kind="saving")
GENERATOR_IDLE = series("generator-0", "asyncrl_idle_ratio", cause="new weights")
PAUSED = series("generator-0", "asyncrl_idle_ratio", cause="resume")
TRAINER_IDLE = series("trainer", "asyncrl_idle_ratio", cause="last group")
WRONG = series("controller", "asyncrl_wrong_policy_total", cause="kv")
MISMATCH = series("trainer", "asyncrl_logprob_mismatch_nats")
REJECTED = series("generator-0", "asyncrl_rejected_tokens_total")
JUDGED = series("generator-0", "asyncrl_noise_floor_judged_tokens_total")
ROUNDED = series("generator-0", "asyncrl_noise_floor_rejected_tokens_total")
ZERO_VARIANCE = series("trainer", "asyncrl_zero_variance_groups_ratio")
TRUNCATED = series("trainer", "asyncrl_truncated_samples_ratio")
REWARD_FAILURES = series(
    "generator-0", "asyncrl_reward_failures_total", function="score", reason="timeout"
)
ENVIRONMENT_FAILURES = series(
    "generator-0", "asyncrl_reward_failures_total", function="environment", reason="raised"
)
ENVIRONMENT_SLOTS = series("generator-0", "asyncrl_slot_seconds_total", kind="environment")
STARTED_OVER = series("generator-0", "asyncrl_environment_started_over_samples_total")
FAILED = series("controller", "asyncrl_samples_total", outcome="failed")
KV = series("generator-0", "asyncrl_engine_kv_used_ratio")
DUE_WAIT = series("generator-0", "asyncrl_due_wait_seconds")
UNSAVED = series("trainer", "asyncrl_unsaved_steps")
NOT_SAVED = series("trainer", "asyncrl_checkpoints_failed_total", cause="disk_full")
FREE = series("controller", "asyncrl_run_disk_free_bytes")
UNLOGGED = series("trainer", "asyncrl_unlogged_samples_total")
REFUSED = series("trainer", "asyncrl_frames_refused_total", reason="unauthenticated")

HEALTHY = {one: steady(1) for one in UP} | {
    READY: steady(1),
    STEPS: growing(1),
    VERSION: growing(1),
    series("controller", "asyncrl_planned_steps"): steady(10_000),
    LAST_STEP: growing(60),
    MEDIAN: steady(60),
    DEATHS: then(0, 1),
    TRAINING: steady(4),
    SAVING: steady(0),
    WAITING_PHASE: steady(0),
    series("trainer", "asyncrl_phase_median_seconds", kind="waiting"): steady(2),
    series("trainer", "asyncrl_phase_median_seconds", kind="training"): steady(5),
    SAVING_MEDIAN: steady(20),
    GENERATOR_IDLE: steady(0.4),
    PAUSED: steady(0),
    TRAINER_IDLE: steady(0.7),
    WRONG: steady(0),
    MISMATCH: steady(0.005),
    REJECTED: growing(1_000),
    series("generator-0", "asyncrl_verified_tokens_total"): growing(15_000),
    JUDGED: growing(3_000),
    ROUNDED: growing(3),
    ZERO_VARIANCE: steady(0.3),
    TRUNCATED: steady(0.1),
    series("generator-0", "asyncrl_reward_seconds_count"): growing(200),
    REWARD_FAILURES: growing(0.1),
    series("generator-0", "asyncrl_finished_samples_total", reason="stop"): growing(200),
    ENVIRONMENT_FAILURES: growing(0.1),
    series("generator-0", "asyncrl_engine_slots"): steady(64),
    ENVIRONMENT_SLOTS: growing(0.2 * 64 * 60),
    STARTED_OVER: growing(20),
    FAILED: steady(0),
    KV: steady(0.97),
    series("generator-0", "asyncrl_engine_waiting_requests"): steady(40),
    DUE_WAIT: f"0 2 0 0.5 3 0 0 0 9 0+0x{BEFORE + AFTER - 9}",
    UNSAVED: steady(40),
    series("trainer", "asyncrl_checkpoint_interval_steps"): steady(50),
    NOT_SAVED: steady(0),
    FREE: f"{int(5e11)}-{int(1e7)}x{BEFORE + AFTER}",
    series("controller", "asyncrl_run_disk_size_bytes"): steady(1e12),
    UNLOGGED: steady(0),
    REFUSED: steady(0),
}
"""A run that does well: a step a minute, one process lost, a disk that slowly fills, run-ahead
that fills the KV space and waits for more of it."""

FAULTS: dict[str, tuple[dict[str, str], set[str]]] = {
    "healthy": ({}, set()),
    "synchronous training": ({GENERATOR_IDLE: steady(0.55)}, set()),
    "paused by its user": (
        {
            PAUSED: then(0, 0.99),
            LAST_STEP: stopped(60),
            WAITING_PHASE: then(2, 0, grows=(0, 60)),
            TRAINER_IDLE: then(0.7, 1),
        },
        set(),
    ),
    "resumed after a pause": (  # steps take six minutes, and the pause took 36
        {
            PAUSED: f"0+0x{BEFORE} 0.99+0x35 0+0x{AFTER - 37}",
            MEDIAN: steady(360),
            LAST_STEP: stopped(60),
            WAITING_PHASE: then(2, 0, grows=(0, 60)),
        },
        set(),
    ),
    "a checkpoint that takes long, as it always does": (
        {
            SAVING: then(0, 0, grows=(0, 60)),
            SAVING_MEDIAN: steady(1000),
            LAST_STEP: stopped(60),
            WAITING_PHASE: then(2, 0, grows=(0, 60)),
        },
        set(),
    ),
    "final evaluation": (
        {
            VERSION: steady(10_000),
            LAST_STEP: stopped(60),
            WAITING_PHASE: then(2, 0, grows=(0, 60)),
            TRAINER_IDLE: then(0.7, 1),
        },
        set(),
    ),
    "no metrics before the first step": (
        {STEPS: steady(0), READY: steady(0), LAST_STEP: steady(0), MEDIAN: steady(0)},
        set(),
    ),
    "killed trainer": ({UP[1]: then(1, 0)}, {"ProcessDown"}),
    "no generator left": ({READY: then(1, 0)}, {"NoGeneratorReady"}),
    "hanging step": ({LAST_STEP: stopped(60)}, {"StepOverdue"}),
    "hanging disk": ({SAVING: then(0, 200)}, {"PhaseOverdue"}),
    "trainer slowed down tenfold": ({TRAINING: then(4, 80)}, {"PhaseOverdue"}),
    "generator without work": ({GENERATOR_IDLE: then(0.2, 0.8)}, {"GeneratorIdle"}),
    "trainer without work": ({TRAINER_IDLE: then(0.5, 0.95)}, {"TrainerIdle"}),
    "processes that die": ({DEATHS: then(0, 0, grows=(0, 0.2))}, {"ProcessesRestart"}),
    "stale KV": ({WRONG: then(0, 1)}, {"WrongPolicy"}),
    "engine with other kernels": ({MISMATCH: then(0.005, 0.2)}, {"LogprobMismatch"}),
    "policy that runs away": (
        {REJECTED: f"0+1000x{BEFORE} {1000 * BEFORE}+20000x{AFTER}"},
        {"RejectedShareJumped"},
    ),
    "bfloat16 on long answers": ({ROUNDED: growing(150)}, {"NoiseFloorHigh"}),
    "reward that is always 0": ({ZERO_VARIANCE: then(0.3, 1)}, {"NothingToLearn"}),
    "answers without an end": ({TRUNCATED: then(0.1, 0.9)}, {"AnswersTruncated"}),
    "reward that times out": (
        {REWARD_FAILURES: then(0, 0, grows=(0, 20))},
        {"RewardErrors"},
    ),
    "environment that raises": (
        {ENVIRONMENT_FAILURES: then(0, 0, grows=(0, 20))},
        {"EnvironmentErrors"},
    ),
    "slow environment": (
        {
            ENVIRONMENT_SLOTS: f"0+{0.2 * 64 * 60}x{BEFORE} "
            f"{0.2 * 64 * 60 * BEFORE}+{0.8 * 64 * 60}x{AFTER}"
        },
        {"EnvironmentsSlow"},
    ),
    "environment that cannot go back": ({STARTED_OVER: growing(120)}, {"SamplesStartOver"}),
    "groups given up": ({FAILED: then(0, 0, grows=(0, 1))}, {"GroupsFail"}),
    "KV space full": ({DUE_WAIT: then(0, 25)}, {"KvFull"}),
    "checkpoints that never succeed": ({UNSAVED: then(40, 151)}, {"CheckpointOverdue"}),
    "a checkpoint that failed": (
        {NOT_SAVED: then(0, 0, grows=(0, 0.1))},
        {"CheckpointFailed"},
    ),
    "disk full": ({FREE: steady(3e10)}, {"DiskFull"}),
    "disk that fills up": (
        {FREE: f"{int(2.9e11)}+0x{BEFORE} {int(2.9e11)}-{int(3e9)}x{AFTER}"},
        {"DiskFull"},
    ),
    "sample log on a full disk": (
        {UNLOGGED: then(0, 0, grows=(0, 8))},
        {"SampleLogIncomplete"},
    ),
    "scanner on the data port": ({REFUSED: then(0, 0, grows=(0, 1))}, {"StrangersRefused"}),
}
"""By fault: the series that it changes, and the alerts that it raises: these and no others."""


def promtool(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(path_of("promtool")), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def alerts() -> dict[str, dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    return {rule["alert"]: rule for rule in rules if "alert" in rule}


def _judged(faults: list[str]) -> dict[str, Any]:
    """A test of promtool: a run for each of these faults."""
    return {
        "name": ", ".join(faults),
        "interval": "1m",
        "input_series": [
            {"series": one.replace('run="first"', f'run="{fault}"'), "values": values}
            for fault in faults
            for one, values in (HEALTHY | FAULTS[fault][0]).items()
        ],
        "promql_expr_test": [
            {
                "expr": 'count by (run, alertname) (ALERTS{alertstate="firing"})',
                "eval_time": JUDGED_AT,
                "exp_samples": [
                    {"labels": f'{{alertname="Asyncrl{one}", run="{fault}"}}', "value": 1}
                    for fault in faults
                    for one in sorted(FAULTS[fault][1])
                ],
            }
        ],
    }


@needs_promtool
def test_each_fault_raises_its_alert_and_no_other(tmp_path: Path) -> None:
    """Some at once, each in a run of its own: nor does a fault raise an alert of another run."""
    names = list(FAULTS)
    tests = [_judged(names[first : first + AT_ONCE]) for first in range(0, len(names), AT_ONCE)]
    file = tmp_path / "test.yaml"
    file.write_text(
        yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "3m", "tests": tests})
    )
    done = promtool("test", "rules", file)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_fault_that_raises_it() -> None:
    raised = {f"Asyncrl{one}" for _, names in FAULTS.values() for one in names}
    assert raised == set(alerts())
    unknown = {one for changed, _ in FAULTS.values() for one in changed} - set(HEALTHY)
    assert not unknown, "a fault changes a series that a healthy run does not have"


@needs_promtool
def test_promtool_accepts_the_configuration_that_init_writes_and_its_rules(tmp_path: Path) -> None:
    write_monitoring(tmp_path)
    (tmp_path / "runs").mkdir()
    groups = target_groups("first", "127.0.0.1", {"controller": Target(9100)})
    (tmp_path / "runs" / "prometheus-first.json").write_text(json.dumps(groups))
    done = promtool("check", "config", tmp_path / "monitoring" / "prometheus.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 rule files found" in done.stdout
    for word in ("WARNING", "FAILED"):
        assert word not in done.stdout, "it finds neither the rules nor the runs"


def test_rules_use_declared_metrics() -> None:
    text = RULES.read_text()
    declared = {spec.name for _, spec in all_specs()}
    used = set(re.findall(r"(?<![:\w])asyncrl_\w+", text))
    known = declared | {f"{name}_count" for name in declared}
    assert used - known == set()
    recorded = set(re.findall(r"record: (\S+)", text))
    assert set(re.findall(r"run:asyncrl_\w+:\w+", text)) == recorded


def test_an_alert_says_what_is_wrong_and_what_to_do() -> None:
    for name, alert in alerts().items():
        assert alert["labels"]["severity"] in ("critical", "warning", "info"), name
        assert alert["annotations"]["summary"].endswith("."), name
        assert not alert["annotations"]["when"].endswith("."), name  # docs/metrics.md adds it
        action = alert["annotations"]["action"]
        assert len(action) > 40, name
        assert action.endswith("."), name


def test_actions_name_settings_that_exist() -> None:
    """Those of the dashboard, too."""
    advice = [panel.if_wrong for _, panels in ROWS for panel in panels]
    text = " ".join([RULES.read_text(), *advice])
    sections = RunConfig.model_fields
    settings = set(re.findall(rf"\b({'|'.join(sections)})\.(?!log\b|md\b)([a-z_]*[a-z])", text))
    assert len(settings) > 5
    for section, key in settings:
        fields = sections[section].annotation.model_fields  # type: ignore[union-attr]
        assert key in fields, f"{section}.{key}"


@needs_promtool
def test_rules_with_shorter_times_are_the_same_rules(tmp_path: Path) -> None:
    """What one sees within minutes is what users see within hours."""
    text = RULES.read_text()
    quick = faster(text, 60)
    lasting = re.compile(r"(?:for: |\[|offset )(\d+)(ms|[smhd])")
    units = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}
    before, after = ([int(n) * units[u] for n, u in lasting.findall(one)] for one in (text, quick))
    assert len(before) > 30
    assert after == pytest.approx([one / 60 for one in before])
    seconds = re.compile(r"_seconds > ([\d.]+)\n")
    assert [float(one) for one in seconds.findall(quick)] == pytest.approx(
        [float(one) / 60 for one in seconds.findall(text)], rel=1e-4
    )
    assert quick.count(" > 6 * asyncrl_step_median_seconds") == 1, "a multiple is no time"
    assert "4 * 60)" in quick
    file = tmp_path / "rules.yaml"
    file.write_text(quick)
    done = promtool("check", "rules", file)
    assert done.returncode == 0, done.stdout + done.stderr
    with pytest.raises(ValueError, match="a number above 0"):
        faster(text, 0)
