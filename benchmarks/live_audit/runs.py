"""The runs that are audited, and what happens to them."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.chaos.live_run import LiveRun, Setup
from benchmarks.chaos.victims import VICTIMS

_ROOT = Path(__file__).resolve().parent.parent.parent
_GAMES = _ROOT / "benchmarks/live_audit/games.py"
_INJECTED = Path(__file__).resolve().parent / "injected"
MUTANT = "ASYNCRL_AUDIT_MUTANT"
"""Environment variable: what is to be wrong in the run's processes (`injected.sitecustomize`)."""
SECONDS = 1500.0
"""Longest wait for a start, some steps or an end."""

_COMMON = (
    "run.log_samples=jsonl",
    "run.log_sample_tokens=true",
    "trainer.checkpoint_every=1",
    "trainer.keep_checkpoints=1000000",
    "evaluation.prompts=32",
    "evaluation.every=5",
    "monitoring.metrics=false",
    "task.train_size=64",
)
_LEARNING = ("trainer.learning_rate=5.0e-4",)
"""Higher than the examples': versions that differ reject tokens."""
_WARM = ("sampling.temperature=1.3",)
_GUESSING = ("sampling.temperature=1.2", "task.evaluation_size=64", *_LEARNING)


@dataclass(frozen=True)
class Scenario:
    about: str
    config: str = "examples/arithmetic.yaml"
    settings: tuple[str, ...] = ()
    steps: int = 24
    """Optimizer steps of the quick audit."""
    kills: tuple[str, ...] = ()
    """Processes (`benchmarks.chaos.victims`) that are killed, evenly over the run."""


SCENARIOS = {
    "arithmetic": Scenario("one turn, learning fast", settings=(*_WARM, *_LEARNING)),
    "fixed": Scenario(
        "one turn, a policy that stays as it is, all samples of it compared with plain sampling",
        settings=(*_WARM, "trainer.learning_rate=1.0e-30"),
    ),
    "tails": Scenario(
        "lists of 3 tokens, top-k and top-p, at most 24 tokens",
        settings=(
            *_LEARNING, "sampling.temperature=1.5", "engine.top_k_logprobs=3", "sampling.top_k=40",
            "sampling.top_p=0.98", "sampling.max_tokens=24",
        ),
    ),
    "guessing": Scenario("turns, replayed", "examples/guessing.yaml", _GUESSING),
    "recorded": Scenario(
        "turns with hints that lie by chance, recorded", "examples/guessing.yaml",
        (*_GUESSING, f"environment.name={_GAMES}:Recorded", "environment.args={}"),
    ),
    "restoring": Scenario(
        "the same, restored", "examples/guessing.yaml",
        (*_GUESSING, f"environment.name={_GAMES}:Restoring", "environment.args={}"),
    ),
    "starts over": Scenario(
        "the same, starting over", "examples/guessing.yaml",
        (*_GUESSING, f"environment.name={_GAMES}:StartsOver", "environment.args={}"),
    ),
    "contexts": Scenario(
        "each turn a conversation", "examples/guessing.yaml",
        (*_GUESSING, f"environment.name={_GAMES}:Conversations", "environment.args={}"),
    ),
    "killed": Scenario(
        "two generators; generators and a trainer are killed",
        settings=(*_WARM, *_LEARNING, "launcher.generators=2", "launcher.max_restarts=20"),
        kills=("generator", "generator", "trainer", "generator"),
    ),
    "resumed": Scenario(
        "the whole run is killed and resumed", settings=(*_WARM, *_LEARNING),
        kills=("controller", "controller"),
    ),
    "killed turns": Scenario(
        "turns; generators and the whole run are killed", "examples/guessing.yaml",
        (*_GUESSING, f"environment.name={_GAMES}:Recorded", "environment.args={}",
         "launcher.max_restarts=20"),
        kills=("generator", "controller", "generator"),
    ),
}  # fmt: skip


def settings_of(name: str, engine: str, seed: int) -> tuple[str, ...]:
    own = SCENARIOS[name].settings
    return (*_COMMON, *own, f"engine.kind={engine}", f"run.seed={seed}")


def carry_out(
    name: str,
    folder: Path,
    *,
    engine: str = "torch",
    steps: int | None = None,
    seed: int = 0,
    settings: tuple[str, ...] = (),
    mutant: str | None = None,
) -> Path:
    """A run from its start to its end; its folder. Raises ChaosError."""
    scenario = SCENARIOS[name]
    if mutant is not None:
        settings += ("run.on_wrong_policy=warn",)  # a run finds some of them itself, and ends
    steps = steps or scenario.steps
    setup = Setup(
        _ROOT / scenario.config,
        folder,
        (*settings_of(name, engine, seed), *settings),
        timeout_seconds=SECONDS,
    )
    run = LiveRun(setup, f"{name.replace(' ', '-')}-{engine}-{mutant or 'right'}", steps)
    moments = random.Random(seed)
    with _injected(mutant):
        try:
            run.start()
            for number, kind in enumerate(scenario.kills):
                after = steps * (number + 1) // (len(scenario.kills) + 1)
                run.until(lambda after=after: _trained(run) >= after, f"step {after}")  # type: ignore[misc]
                victim = VICTIMS[kind]
                run.until(lambda victim=victim: victim.is_possible(run), f"a {kind}")  # type: ignore[misc]
                victim.strike(run, moments)
                if victim.ends_the_run:
                    run.start("--resume")
            if code := run.end(in_order=False):
                raise run.error(f"ended with exit code {code}")
        finally:
            run.abandon()
    return run.path


def _trained(run: LiveRun) -> int:
    try:
        return len(run.records())
    except OSError:
        return 0


@contextlib.contextmanager
def _injected(mutant: str | None) -> Iterator[None]:
    """Have the processes that are started meanwhile load `injected/sitecustomize.py`."""
    if mutant is None:
        yield
        return
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = f"{_INJECTED}{os.pathsep}{before}"
    os.environ[MUTANT] = mutant
    try:
        yield
    finally:
        os.environ["PYTHONPATH"] = before
        del os.environ[MUTANT]
