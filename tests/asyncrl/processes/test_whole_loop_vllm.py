"""What the loop hands to the trainer, on real vLLM with its prefix cache on: few samples.

The statements of `test_whole_loop` (false alarms: 1e-6 each, some 12 here). When updates land
depends on the clock, so a run is not the same twice; drafts and verification are on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from new_weights import give_weights

from benchmarks.exactness_loop import main as loop
from benchmarks.exactness_loop.distributions import Laws
from benchmarks.exactness_loop.harness import Outcome
from engine.protocol import Engine

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*distributed.reduce_op.*:FutureWarning"),
]

SAMPLES = 1500


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def engine(
    runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, Path]]:
    path = tmp_path_factory.mktemp("loop-model")
    loop.policies()[0].save_pretrained(path)
    engine = loop.vllm_engine(str(path), loop.MODES["verify, 1 ahead"])
    try:
        runner.run(engine.start())
        yield engine, path
    finally:
        runner.run(engine.close())


def play(
    name: str, samples: int, runner: asyncio.Runner, engine: tuple[Engine, Path]
) -> tuple[Outcome, loop.Finding]:
    torch.set_num_threads(1)
    mode, models = loop.MODES[name], loop.policies()
    served, path = engine
    # Each run begins with version 0; a version has the same weights in all of them.
    runner.run(give_weights(served, models[0].state_dict().items(), 0))
    setting = loop.setting_of(mode, samples, 0)
    outcome: Outcome = runner.run(loop.loop_of(served, models, setting, path))
    laws = Laws(models, loop.PROMPTS, loop.way())
    finding = loop.find(name, mode, outcome.delivered, laws)
    for what, verdict in finding.verdicts.items():
        print(f"{what}: {verdict}")
    print(f"log-probabilities within {finding.worst_logprob:.2g}, {outcome.cut} samples cut")
    return outcome, finding


def test_whole_trajectories_follow_the_policy_that_trains_on_them(
    runner: asyncio.Runner, engine: tuple[Engine, Path]
) -> None:
    outcome, finding = play("verify, 1 ahead", SAMPLES, runner, engine)
    assert finding.p_value > loop.ALARM
    assert finding.staleness == 0
    assert finding.worst_logprob < loop.TOLERANCE["vllm"]
    assert loop.rewards_fit(outcome.delivered)
    assert outcome.verified > SAMPLES / 2
    assert outcome.rejected > SAMPLES / 4
    assert outcome.cut > 20


@pytest.mark.parametrize("name", ["verify, k = 1", "keep, k = 1", "recompute, k = 1"])
def test_each_token_follows_the_version_that_it_bears(
    name: str, runner: asyncio.Runner, engine: tuple[Engine, Path]
) -> None:
    outcome, finding = play(name, 600, runner, engine)
    assert finding.p_value > loop.ALARM
    assert finding.staleness == 1
    assert finding.worst_logprob < loop.TOLERANCE["vllm"]
    assert loop.rewards_fit(outcome.delivered)
    assert any(len(one.trajectory.segments) > 1 for one in outcome.delivered)
