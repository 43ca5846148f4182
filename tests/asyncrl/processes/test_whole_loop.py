"""What the loop hands to the trainer, on the torch engine, against enumerated laws.

Scheduler, generator process, writer, engine and cache are real and run in one event loop; the
trainer alternates between two fixed policies and publishes in the middle of rollouts. See
`benchmarks.exactness_loop` for the statements and `exactness_loop_house` for the loop.

A statement fails below p = 1e-6; with some 30 p-values here a correct loop would fail one run in
30,000 if seeds were random. They are fixed, and which draft is made does not depend on the clock.
What must be wrong must have a p-value below that too (1e-4 for the smallest of the biases).
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.exactness_loop import main as loop
from benchmarks.exactness_loop.distributions import Laws, judge
from benchmarks.exactness_loop.harness import Delivered, Outcome
from engine.torch.core import DecodeCore
from engine.torch.engine import TorchEngine

SAMPLES = 4000


@cache
def known(learning: bool) -> tuple[list[Any], Laws]:
    models = loop.policies(learning)
    return models, Laws(models, loop.PROMPTS, loop.way())


@cache
def played(name: str) -> Outcome:
    return play(name)


def play(name: str, samples: int = SAMPLES, **changes: Any) -> Outcome:
    torch.set_num_threads(1)
    mode = loop.MODES[name]
    setting = loop.setting_of(mode, samples, 0, **changes)
    return asyncio.run(loop.run("torch", mode, setting, known(mode.learning)[0]))


def find(name: str, delivered: list[Delivered]) -> loop.Finding:
    mode = loop.MODES[name]
    finding = loop.find(name, mode, delivered, known(mode.learning)[1])
    for what, verdict in finding.verdicts.items():
        print(f"{name}, {what}: {verdict}")
    return finding


def test_the_policies_are_far_enough_apart_for_mistakes_to_show() -> None:
    laws = known(True)[1]
    assert all(0.1 < laws.per_token(prompt) < 0.3 for prompt in range(len(loop.PROMPTS)))


@pytest.mark.parametrize("name", ["verify, 1 ahead", "verify, 3 ahead", "learning rate 0"])
def test_whole_trajectories_follow_the_policy_that_trains_on_them(name: str) -> None:
    outcome = played(name)
    finding = find(name, outcome.delivered)
    assert finding.p_value > loop.ALARM
    assert finding.staleness == 0
    assert finding.worst_logprob < loop.TOLERANCE["torch"]
    assert loop.rewards_fit(outcome.delivered)
    # Otherwise this has shown nothing.
    assert outcome.verified > SAMPLES
    assert outcome.cut > 100
    learning = loop.MODES[name].learning
    assert (outcome.rejected > SAMPLES / 2) == learning
    assert not learning or outcome.accepted > SAMPLES


@pytest.mark.parametrize("name", ["verify, k = 1", "keep, k = 1", "recompute, k = 1"])
def test_each_token_follows_the_version_that_it_bears(name: str) -> None:
    outcome = played(name)
    finding = find(name, outcome.delivered)
    assert finding.p_value > loop.ALARM
    assert finding.staleness == 1
    assert finding.worst_logprob < loop.TOLERANCE["torch"]
    assert loop.rewards_fit(outcome.delivered)
    assert (outcome.verified > SAMPLES / 4) == (name == "verify, k = 1")
    mixed = sum(len(one.trajectory.segments) > 1 for one in outcome.delivered)
    assert mixed > SAMPLES / 20


# What must be seen to be wrong


def test_unverified_work_is_seen() -> None:
    """`keep` with k = 1 delivers tokens of the version before, as it says."""
    delivered = played("keep, k = 1").delivered
    verdicts = loop.whole_statement(delivered, known(True)[1])
    print(*map(str, verdicts.values()), sep="\n")
    assert max(verdicts[f"texts of policy {which}"].p_value for which in "AB") < loop.ALARM
    assert verdicts["lengths within each step"].p_value < loop.ALARM


def test_selection_by_completion_is_seen() -> None:
    """The half of each group that was finished first: short answers."""
    outcome = played("verify, 1 ahead")
    groups: dict[int, list[Delivered]] = {}
    for one in outcome.delivered:
        groups.setdefault(one.trajectory.id.group, []).append(one)
    early: list[Delivered] = []
    for group in groups.values():
        group.sort(key=lambda one: outcome.finished[one.trajectory.id])
        early += group[: len(group) // 2]
    verdict = loop.whole_statement(early, known(True)[1])["mean length"]
    print(verdict)
    assert verdict.p_value < loop.ALARM
    assert verdict.tv < 0


def test_a_missing_residual_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    generate = TorchEngine.generate

    def lenient(self: TorchEngine, request: Any) -> Any:
        if request.kept is not None:
            request = replace(request, kept=replace(request.kept, lenience=1.0))
        return generate(self, request)

    monkeypatch.setattr(TorchEngine, "generate", lenient)
    finding = find("verify, 1 ahead", play("verify, 1 ahead", 2000).delivered)
    assert finding.p_value < loop.ALARM


def test_a_cut_that_depends_on_what_comes_behind_it_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An interruption that loses what was drawn and not reported: stop tokens are never lost.

    It shortens the responses by a tenth of a token, so it takes more samples to see.
    """
    interrupt = DecodeCore.interrupt

    def forgetful(self: DecodeCore, name: str) -> Any:
        if name in self._rows:
            self._rows.unsent[self._rows.row_of(name)] = 0
        return interrupt(self, name)

    monkeypatch.setattr(DecodeCore, "interrupt", forgetful)
    finding = find("learning rate 0", play("learning rate 0", 12_000).delivered)
    assert finding.verdicts["mean length"].p_value < 1e-4
    assert finding.verdicts["mean length"].tv < 0


def test_the_statistic_itself() -> None:
    """Exact draws pass, at about the promised rate; a shift of 0.02 in 20,000 does not."""
    chance = np.random.default_rng(1)
    law = {"a": 0.5, "b": 0.3, "c": 0.2, "never": 0.0}
    p_values = [
        judge(
            [(0, str(x)) for x in chance.choice(["a", "b", "c"], 500, p=[0.5, 0.3, 0.2])], {0: law}
        ).p_value
        for _ in range(400)
    ]
    assert abs(np.mean([p < 0.1 for p in p_values]) - 0.1) < 0.07
    wrong = [(0, str(x)) for x in chance.choice(["a", "b", "c"], 20_000, p=[0.52, 0.28, 0.2])]
    assert judge(wrong, {0: law}).p_value < loop.ALARM
    assert judge([(0, "never")], {0: law}).p_value == 0.0
