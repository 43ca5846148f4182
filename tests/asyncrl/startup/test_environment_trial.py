"""A mistake in an environment is found in its first reset, before any process of the run starts."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.config.run_config import load_config
from asyncrl.environments.workers.pool import EnvironmentFailed
from asyncrl.errors import RewardError
from asyncrl.generator.turns import environment_setup
from asyncrl.startup import environment_trial
from asyncrl.startup.environment_trial import try_environment
from asyncrl.tasks.model import builtin_tokenizer
from asyncrl.tasks.prompts import Prompt, Task

SOURCE = """
import functools, pathlib, subprocess, time

class Good:
    replay = "deterministic"
    def reset(self, row, seed): return None
    def step(self, action): return ("1", False)

class OldReset(Good):
    def reset(self, row): return None

class OldStep(Good):
    def step(self): return None

class NoStep:
    def reset(self, row, seed): return None

class Raises(Good):
    def reset(self, row, seed): return [][seed]

class Long(Good):
    def reset(self, row, seed): return "1" * 200

class Forgetful(Good):
    replay = None

class Wrapped(Good):
    @functools.wraps(Good.step)
    def step(self, *args): return super().step(*args)
    step.__wrapped__ = lambda self, action, more: None  # takes more than what wraps it

class Tidy(Good):
    def reset(self, row, seed):
        self.place = pathlib.Path(row["place"])
        self.child = subprocess.Popen(["sleep", "600"])
        self.place.write_text(str(self.child.pid))
        if "fails" in row["prompt"]:
            raise OSError("no room")
    def close(self):
        self.place.with_suffix(".closed").touch()

class Slow(Tidy):
    def reset(self, row, seed):
        super().reset(row, seed)
        time.sleep(600)
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(SOURCE)
    return tmp_path / "mine.py"


def tried(source: Path, name: str, *more: str, prompt: str = "1+1=") -> list[str]:
    settings = [f"environment.name={source}:{name}", "engine.max_model_len=128"]
    config = load_config(None, [*settings, "sampling.max_tokens=32", *more])
    row = {"prompt": prompt, "place": str(source.with_name("child"))}
    tokenizer: Any = builtin_tokenizer()
    loaded = Prompt("add-1", np.array([1, 2], np.int32), prompt, row)
    return try_environment(config, Task([loaded], [], (0,), tokenizer))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("OldReset", r"cannot be called as reset\(row, seed\): too many .* signature is \(row\)$"),
        ("OldStep", r"cannot be called as step\(action\): .* its signature is \(\)$"),
        ("NoStep", r"it has no method step\(action\)$"),
        ("Raises", r"^environment .*mine.py:Raises' of example 'add-1': reset: Traceback"),
        ("Long", r"the prompt has 20\d tokens; with sampling.max_tokens \(32\) .*max_model_len"),
    ],
)
def test_what_fails_in_reset_is_refused(source: Path, name: str, said: str) -> None:
    with pytest.raises(EnvironmentFailed, match=said) as refused:
        tried(source, name)
    assert refused.value.exit_code == 2
    assert "asyncrl/environments" not in str(refused.value), "a traceback of asyncrl's own"


def test_what_the_run_is_about_to_do_says_how_it_goes_back(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(source.parent)  # a long path would be all that the line has room for
    source = Path(source.name)
    name = f"{source}:Good"
    (line,) = tried(source, "Good", "environment.max_turns=1")
    said = f"{name}: at most 1 a sample, with 32 tokens in all; goes back by replay (deterministic)"
    assert line.startswith(f"turns      {said}")
    line, warning, few = tried(
        source, "Forgetful", "scheduler.on_update=verify", "environment.sessions=2"
    )
    assert "; cannot go back" in line
    assert "starts over when it is due" in warning
    assert "lets 2 samples of a generator run at once" in few
    once = ("scheduler.on_update=keep", "scheduler.max_off_policy_steps=0", "run.repeatable=true")
    assert len(tried(source, "Wrapped", *once)) == 1
    _, warning = tried(source, "Forgetful", *once)
    assert warning.startswith("warning: run.repeatable: true holds only if environment ")


def is_gone(source: Path) -> bool:
    """Whether the process that the environment had started, if it came to that, has ended."""
    try:
        os.kill(int(source.with_name("child").read_text()), 0)
    except (ProcessLookupError, FileNotFoundError, ValueError):
        return True
    return False


@pytest.mark.parametrize("prompt", ["1+1=", "it fails"])
def test_what_was_made_is_closed_and_leaves_no_process(source: Path, prompt: str) -> None:
    with contextlib.nullcontext() if prompt == "1+1=" else pytest.raises(EnvironmentFailed):
        tried(source, "Tidy", prompt=prompt)
    assert source.with_name("child.closed").exists()
    assert is_gone(source)


def test_a_run_is_not_refused_for_a_reset_that_takes_long(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment_trial, "_TRIAL_SECONDS", 1.0)
    monkeypatch.setattr(environment_setup, "CLOSE_SECONDS", 0.1)
    line, warning = tried(source, "Slow")
    assert "; not tried" in line
    assert warning.endswith("takes more than 1 s; the run does not wait for it")
    assert is_gone(source)


def test_on_other_machines_nothing_is_tried(source: Path) -> None:
    ray = ("launcher.kind=ray", "scheduler.on_update=keep")
    assert "; not tried" in tried(source, "Raises", *ray)[0]


def test_failures_that_count_as_0_are_only_said(source: Path) -> None:
    line, warning = tried(source, "Raises", "rewards.on_error=zero")
    assert "; not tried" in line
    assert warning.startswith("warning: environment")
    assert "IndexError" in warning


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gymnasiun:CartPole-v1", r"path/to/file.py:Class\. Did you mean 'gymnasium'\?$"),
        ("verifier:mine", r"module is named 'verifier'\. Did you mean 'verifiers'\?$"),
        ("nowhere_at_all:mine", r"no module 'nowhere_at_all'; it must be importable .*[^?]$"),
    ],
)
def test_an_adapter_that_is_misspelled_is_named(source: Path, name: str, said: str) -> None:
    with pytest.raises(RewardError, match=said):
        tried(source, "Good", f"environment.name={name}")
