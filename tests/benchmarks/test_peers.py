"""benchmarks.peers without TRL and without real runs: arithmetic, equal arguments, measurement."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.config.run_config import load_config
from asyncrl.tasks.model import ensure_builtin_model
from benchmarks.peers import contestants as peers_contestants
from benchmarks.peers import main as peers
from benchmarks.peers.contestants import (
    CONFIG,
    EPOCHS,
    EXAMPLE,
    SYNC,
    TRL,
    VERIFY,
    WORKLOADS,
    Contestant,
    Training,
    TrlMissingError,
    Workload,
    contestants,
    ensure_trl,
)
from benchmarks.peers.findings import TARGETS
from benchmarks.peers.measured_run import RunError, memory_of, run_measured
from benchmarks.peers.shared_data import (
    StepLog,
    prompts_by_step,
    read_steps,
    reward_of,
    task_of,
)
from benchmarks.peers.trl_train import NotComparableError, grpo_arguments
from benchmarks.tiny_models import SMOKE_START


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda one: one.name)
def test_trl_trains_what_the_configuration_says(workload: Workload) -> None:
    """Every setting that determines what is learned reaches TRL."""
    config = load_config(CONFIG, workload.config(Path("model"), seed=3))
    samples = config.scheduler.groups_per_step * config.scheduler.group_size
    given = grpo_arguments(config, micro_batch=samples // 2)
    assert given["per_device_train_batch_size"] * given["gradient_accumulation_steps"] == samples
    expected = {
        "max_steps": workload.steps,
        "seed": 3,
        "num_generations": config.scheduler.group_size,
        "max_completion_length": config.sampling.max_tokens,
        "temperature": config.sampling.temperature,
        "learning_rate": config.trainer.learning_rate,
        "adam_beta1": config.trainer.betas[0],
        "adam_beta2": config.trainer.betas[1],
        "weight_decay": config.trainer.weight_decay,
        "max_grad_norm": config.trainer.max_grad_norm,
        "beta": config.trainer.kl_coefficient,
        "epsilon": config.trainer.clip_ratio_low,
        "epsilon_high": config.trainer.clip_ratio_high,
        "loss_type": "dapo",
        "scale_rewards": "none",
        "num_iterations": 1,
        "mask_truncated_completions": False,
        "bf16": False,
        "gradient_checkpointing": config.trainer.gradient_checkpointing,
    }
    assert {name: given[name] for name in expected} == expected


def test_all_contestants_get_the_same_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.peers.contestants.ensure_trl", lambda: Path("python"))
    settings = EXAMPLE.config(Path("model"), seed=1)
    for contestant in contestants():
        command = contestant.start(settings, tmp_path, 1).command
        given = {command[i + 1] for i, part in enumerate(command) if part == "--set"}
        assert set(settings) <= given, contestant.name
        allowed = ("scheduler.on_update", "scheduler.max_off_policy", "run.", "launcher.", "engine")
        assert all(extra.startswith(allowed) for extra in given - set(settings)), contestant.name


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("trainer.algorithm=reinforce", "only grpo"),
        ("trainer.warmup_steps=2", "learning rate"),
        ('sampling.stop=["x"]', "stop strings"),
        ("scheduler.group_size=7", "no multiple of 128"),
    ],
)
def test_what_trl_computes_differently_is_refused(setting: str, message: str) -> None:
    config = load_config(CONFIG, (setting,))
    with pytest.raises(NotComparableError, match=message):
        grpo_arguments(config, micro_batch=128)


def test_prompts_come_in_the_order_of_a_real_run(tmp_path: Path) -> None:
    """The order is keyed by the initial weights, as the controller does it."""
    from transformers import AutoModelForCausalLM

    from asyncrl.tasks.sample_requests import SampleRequests
    from asyncrl.trainer.learner import Learner

    model = ensure_builtin_model(tmp_path, None, SMOKE_START)
    config = load_config(CONFIG, (f"model.path={model}", "run.steps=3", "task.train_size=20"))
    task = task_of(config)
    learner = Learner(config.trainer, str(model), group_size=8, seed=0)
    requests = SampleRequests(task, config.run.seed)
    requests.starts_from(learner.initial_weights)
    found = list(prompts_by_step(config, task, AutoModelForCausalLM.from_pretrained(model)))
    groups = config.scheduler.groups_per_step
    assert [[p.prompt_id for p in step] for step in found] == [
        [task.train[requests.prompt_index(step * groups + at)].prompt_id for at in range(groups)]
        for step in range(3)
    ]


def test_rewards_are_the_runs(tmp_path: Path) -> None:
    model = ensure_builtin_model(tmp_path, None, SMOKE_START)
    terms = "[{name: arithmetic, weight: 2.0}, {name: format, weight: 0.5, args: {pattern: '.*'}}]"
    config = load_config(CONFIG, (f"model.path={model}", f"rewards.functions={terms}"))
    prompt = task_of(config).train[0]
    reward = reward_of(config)
    assert reward(prompt, f"1+1+0=02:{prompt.example['answer']}<end>") == 2.5
    assert reward(prompt, "1+1+0=02:0<end>") == 0.5


def test_a_log_of_steps_is_read_as_written(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "steps.jsonl")
    log.begin()
    log.add(0.25, 7)
    log.add(0.5, 8)
    first, second = read_steps(tmp_path / "steps.jsonl")
    assert (first.reward, first.tokens, second.reward) == (0.25, 7, 0.5)
    assert 0 <= first.seconds <= second.seconds


def test_memory_and_time_of_a_command_include_its_children(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("benchmarks.peers.measured_run.SAMPLE_SECONDS", 0.05)
    child = "x = bytearray(b'1') * 80_000_000; import time; time.sleep(0.6)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    usage = run_measured([sys.executable, "-c", parent], {}, 60.0)
    assert 80_000_000 < usage.peak_bytes < 300_000_000
    assert 0.01 < usage.cpu_seconds < usage.wall_seconds * 3
    assert usage.others_share >= 0


def test_a_busy_process_of_somebody_else_disturbs_a_run() -> None:
    busy = [sys.executable, "-c", "while True: pass"]
    other = subprocess.Popen(busy)
    try:
        usage = run_measured([sys.executable, "-c", "import time; time.sleep(1.5)"], {}, 60.0)
    finally:
        other.kill()
        other.wait()
    assert usage.disturbed


def test_shared_pages_count_once() -> None:
    one = memory_of(os.getpid())
    assert one > 1_000_000
    assert memory_of(2**30) == 0  # no such process


def test_a_failing_command_is_quoted() -> None:
    with pytest.raises(RunError, match="exit code 3") as caught:
        run_measured([sys.executable, "-c", "print('the reason'); raise SystemExit(3)"], {}, 60.0)
    assert "the reason" in str(caught.value)
    with pytest.raises(RunError, match="more than"):
        run_measured([sys.executable, "-c", "import time; time.sleep(60)"], {}, 0.3)


@pytest.mark.parametrize("package", ["asyncrl-no-such-package==1.0"])
def test_trl_that_cannot_be_installed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    """With a real pip that has no index."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(TrlMissingError, match=r"No matching distribution .*--contestants"):
        ensure_trl(tmp_path, (package,))
    assert not list(tmp_path.iterdir())


def test_an_environment_shares_this_interpreters_packages_and_is_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = peers_contestants._run, []

    def run(command: list[str]) -> str:
        calls.append(command)
        skip = "pip" in command or "version('trl')" in command[-1]
        return "" if skip else real(command)

    monkeypatch.setattr(peers_contestants, "_run", run)
    python = ensure_trl(tmp_path)
    code = "import sys; from importlib.util import find_spec as find; print(sys.prefix)"
    code += "; print(find('torch').origin)"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    prefix, torch_file = done.stdout.splitlines()
    assert prefix == str(python.parent.parent)
    assert not torch_file.startswith(prefix)
    before = len(calls)
    assert ensure_trl(tmp_path) == python
    assert len(calls) == before


def test_a_contestant_that_fails_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole command with stand-ins for the trainings."""

    def writes(steps: int) -> Contestant:
        def start(_: tuple[str, ...], folder: Path, __: int) -> Training:
            log = folder / "steps.jsonl"
            line = json.dumps({"seconds": 1.0, "reward": 0.95, "tokens": 10})
            code = f"open({str(log)!r}, 'w').write(({line!r} + chr(10)) * {steps})"
            return Training([sys.executable, "-c", code], {}, lambda: read_steps(log))

        return Contestant(VERIFY if steps == 6 else SYNC, 1, start)

    def refuses(*_: object) -> Training:
        raise TrlMissingError("no index")

    monkeypatch.setattr(
        peers, "contestants", lambda: (Contestant(TRL, 2, refuses), writes(5), writes(6))
    )
    monkeypatch.setattr(peers, "make_model", lambda *_: tmp_path)
    found = tmp_path / "found.json"
    arguments = ["--quick", "--workloads", "example", "--steps", "6", "--json", str(found)]
    assert peers.main(arguments) == 1
    written = json.loads(found.read_text())
    assert written["raw"]["missing"] == {
        "example, TRL": "no index",
        "example, sync": "it trained 5 steps instead of 6",
    }
    assert [run["contestant"] for run in written["raw"]["runs"]] == [VERIFY]
    assert written["raw"]["runs"][0]["seconds_to_accuracy"] == 1.0
    assert "TRL is MISSING: no index" in capsys.readouterr().out


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        peers.main(["--contestants", "TRL,verl"])
    assert "'verl' is not one of TRL" in capsys.readouterr().err


def test_quick_runs_two_epochs_too() -> None:
    for epochs in (EPOCHS, EPOCHS.shortened()):
        config = load_config(CONFIG, epochs.config(Path("model"), seed=0))
        trained = config.run.steps * config.scheduler.groups_per_step
        assert trained == 2 * (config.task.train_size or 0)


def test_every_target_has_a_workload() -> None:
    assert set(TARGETS) == {f"peers_{workload.name}" for workload in WORKLOADS}
