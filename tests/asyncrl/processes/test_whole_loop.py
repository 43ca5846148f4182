"""What the loop delivers to the trainer on the torch engine, against enumerated distributions.

Scheduler, generator process, engine and cache are real and run in one event loop. The trainer
alternates between two fixed policies and publishes in the middle of rollouts. See
`benchmarks.exactness_loop.main` for the statements and `benchmarks.exactness_loop.harness` for the
loop.

A statement fails below p = 1e-6. With some 50 p-values here a correct loop would fail one run in
20,000 if seeds were random. They are fixed, and drafts do not depend on the clock. Wrong loops must
have a p-value below 1e-6 too (1e-4 for the smallest bias).
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.exactness_loop import engines, statements
from benchmarks.exactness_loop.distributions import ResponseDistributions, ResponseSpace
from benchmarks.exactness_loop.modes import DRIFT, MODES, PROMPTS, SPACE, make_policies, settings_of
from benchmarks.exactness_loop.outcome import Delivered, Outcome
from benchmarks.exactness_loop.statements import ALARM, TOLERANCE, Finding
from engine.torch.core import DecodeCore
from engine.torch.engine import TorchEngine
from rollout.trajectory import KeptTokens, Trajectory
from wire.unfinished import UnfinishedSample

pytestmark = pytest.mark.slow

SAMPLES = 4000


@cache
def known(
    drift: float = DRIFT, space: ResponseSpace = SPACE
) -> tuple[list[Any], ResponseDistributions]:
    policies = make_policies(drift)
    return policies, ResponseDistributions(policies, PROMPTS, space)


@cache
def played(name: str) -> Outcome:
    return play(name)


def play(name: str, samples: int = SAMPLES) -> Outcome:
    torch.set_num_threads(1)
    mode = MODES[name]
    settings = settings_of(mode, samples, seed=0)
    return asyncio.run(engines.run(["torch"], mode, settings, known(mode.drift)[0]))


def check(name: str, delivered: list[Delivered]) -> Finding:
    mode = MODES[name]
    finding = statements.check(mode, delivered, known(mode.drift, mode.space)[1])
    for what, verdict in finding.verdicts.items():
        print(f"{name}, {what}: {verdict}")
    return finding


def test_the_policies_differ_enough_for_mistakes_to_show() -> None:
    distributions = known()[1]
    prompts = range(len(PROMPTS))
    assert all(0.1 < distributions.policy_distance(prompt) < 0.3 for prompt in prompts)


@pytest.mark.parametrize("name", ["verify, 1 ahead", "verify, 3 ahead", "learning rate 0"])
def test_whole_trajectories_follow_the_policy_that_trains_on_them(name: str) -> None:
    outcome = played(name)
    finding = check(name, outcome.delivered)
    assert finding.p_value > ALARM
    assert finding.staleness == 0
    assert finding.worst_logprob < TOLERANCE["torch"]
    assert statements.rewards_match(outcome.delivered)
    # Otherwise the assertions above show nothing.
    assert outcome.verified > SAMPLES
    assert outcome.cut > 100
    learning = MODES[name].drift > 0
    assert (outcome.rejected > SAMPLES / 2) == learning
    assert not learning or outcome.accepted > SAMPLES


def test_stop_strings_end_samples_in_the_loop_as_in_the_enumeration() -> None:
    """Generated ahead, interrupted, resumed within a string and verified; without it, detected."""
    outcome = play("verify, stop strings", SAMPLES // 2)
    finding = check("verify, stop strings", outcome.delivered)
    assert finding.p_value > ALARM
    assert finding.worst_logprob < TOLERANCE["torch"]
    assert outcome.verified > SAMPLES / 2
    assert outcome.cut > 80
    tokens = [one.trajectory.tokens for one in outcome.delivered]
    stopped = [one for one in tokens if one[-1] != SPACE.stop and len(one) < SPACE.max_tokens]
    assert len(stopped) > len(tokens) / 5
    plain = statements.check_responses(outcome.delivered, known()[1])
    assert plain["lengths within each step"].p_value < ALARM


def test_tokens_of_policies_that_are_gone_are_never_trained_on_unverified(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Trainers are lost, and the policies of their versions are other ones the second time.

    If held samples are not relabelled, their tokens pass for tokens of the policy that has the
    version now.
    """
    name = "verify, trainers lost"
    outcome = played(name)
    finding = check(name, outcome.delivered)
    assert outcome.rewinds > 5
    assert finding.p_value > ALARM
    assert finding.staleness == 0
    assert finding.worst_logprob < TOLERANCE["torch"]
    assert statements.rewards_match(outcome.delivered)
    ids = [one.trajectory.id for one in outcome.delivered]
    assert len(set(ids)) == len(ids) == SAMPLES // 144 * 144 + 144, "each sample once"
    monkeypatch.setattr(Trajectory, "without_versions_after", lambda self, _: self)
    wrong = check(name, play(name, SAMPLES).delivered)
    assert wrong.p_value < ALARM


def mix_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token of a file gets the probabilities of others."""
    kept = UnfinishedSample.kept

    def mixed_up(self: UnfinishedSample) -> KeptTokens:
        tokens = kept(self)
        return replace(tokens, topk_logprobs=np.roll(tokens.topk_logprobs, 1, axis=1))

    monkeypatch.setattr(UnfinishedSample, "kept", mixed_up)


def test_run_ahead_that_a_resumed_run_continues_is_exactly_on_policy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Runs are killed after they have trained other policies than the next run will.

    Each next run has a new engine and scheduler, and reads the run-ahead from the disk. All samples
    are judged, and once more those that were restored, since which ones are does not depend on
    their tokens. If the probabilities that restored tokens were drawn with are mixed up, that is
    detected.
    """
    name, samples = "verify, run resumed", 1440
    outcome = play(name, samples)
    restored = [one for one in outcome.delivered if one.trajectory.id in outcome.restored]
    assert outcome.resumed == 4
    assert len(restored) > samples / 6
    assert outcome.rejected > samples
    ids = [one.trajectory.id for one in outcome.delivered]
    assert len(set(ids)) == len(ids) == samples, "each sample once"
    for some in (outcome.delivered, restored):
        finding = check(name, some)
        assert finding.p_value > ALARM
        assert finding.staleness == 0
        assert finding.worst_logprob < TOLERANCE["torch"]
        assert statements.rewards_match(some)
    mix_up(monkeypatch)
    wrong = play(name, 2 * samples)
    restored = [one for one in wrong.delivered if one.trajectory.id in wrong.restored]
    assert check(name, restored).p_value < ALARM


def test_samples_that_move_from_one_generator_to_another_are_exactly_on_policy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After each version one of two generators leaves, and another one joins.

    Samples that have moved are judged by themselves too: which ones move does not depend on their
    tokens. If the probabilities that moved tokens were drawn with are mixed up, that is detected.
    """
    name, samples = "verify, generators leave", 1440
    outcome = play(name, samples)
    moved = [one for one in outcome.delivered if one.trajectory.id in outcome.handed_over]
    assert len(moved) > samples / 4
    assert outcome.rejected > samples
    ids = [one.trajectory.id for one in outcome.delivered]
    assert len(set(ids)) == len(ids) == samples, "each sample once"
    for some in (outcome.delivered, moved):
        finding = check(name, some)
        assert finding.p_value > ALARM
        assert finding.staleness == 0
        assert finding.worst_logprob < TOLERANCE["torch"]
        assert statements.rewards_match(some)
    mix_up(monkeypatch)
    wrong = play(name, samples)
    moved = [one for one in wrong.delivered if one.trajectory.id in wrong.handed_over]
    assert check(name, moved).p_value < ALARM


@pytest.mark.parametrize("name", ["verify, k = 1", "keep, k = 1", "recompute, k = 1"])
def test_each_token_follows_the_version_that_it_carries(name: str) -> None:
    outcome = played(name)
    finding = check(name, outcome.delivered)
    assert finding.p_value > ALARM
    assert finding.staleness == 1
    assert finding.worst_logprob < TOLERANCE["torch"]
    assert statements.rewards_match(outcome.delivered)
    assert (outcome.verified > SAMPLES / 4) == (name == "verify, k = 1")
    mixed = sum(len(one.trajectory.segments) > 1 for one in outcome.delivered)
    assert mixed > SAMPLES / 20


# Wrong loops must be detected


def test_unverified_samples_are_detected() -> None:
    """`keep` with k = 1 delivers tokens of the previous version, as documented."""
    delivered = played("keep, k = 1").delivered
    verdicts = statements.check_responses(delivered, known()[1])
    print(*map(str, verdicts.values()), sep="\n")
    assert max(verdicts[f"texts of policy {which}"].p_value for which in "AB") < ALARM
    assert verdicts["lengths within each step"].p_value < ALARM


def test_selection_by_completion_is_detected() -> None:
    """Take the half of each group that was finished first: short responses."""
    outcome = played("verify, 1 ahead")
    groups: dict[int, list[Delivered]] = {}
    for one in outcome.delivered:
        groups.setdefault(one.trajectory.id.group, []).append(one)
    early: list[Delivered] = []
    for group in groups.values():
        group.sort(key=lambda one: outcome.finished[one.trajectory.id])
        early += group[: len(group) // 2]
    verdict = statements.check_responses(early, known()[1])["mean length"]
    print(verdict)
    assert verdict.p_value < ALARM
    assert verdict.tv < 0


def test_a_missing_residual_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    generate = TorchEngine.generate

    def lenient(self: TorchEngine, request: Any) -> Any:
        if request.kept is not None:
            request = replace(request, kept=replace(request.kept, lenience=1.0))
        return generate(self, request)

    monkeypatch.setattr(TorchEngine, "generate", lenient)
    finding = check("verify, 1 ahead", play("verify, 1 ahead", 2000).delivered)
    assert finding.p_value < ALARM


def test_a_cut_that_depends_on_the_tokens_after_it_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lose the tokens that were drawn and not reported. Stop tokens are never among them.

    Such an engine reports nothing when weights are installed, right before samples are
    interrupted. This shortens responses by a fifth of a token. Slower steps in fewer slots let many
    be in generation whenever new weights arrive.
    """
    name = "learning rate 0"
    often_cut = replace(MODES[name], slots=48, turns_per_step=16, install_delay=1)
    monkeypatch.setitem(MODES, name, often_cut)
    interrupt = DecodeCore.interrupt

    def forgetful(self: DecodeCore, name: str) -> Any:
        if name in self._rows:
            self._unreported.count[self._rows.row_of(name)] = 0
        return interrupt(self, name)

    monkeypatch.setattr(DecodeCore, "interrupt", forgetful)
    monkeypatch.setattr(DecodeCore, "flush", lambda _: [])
    finding = check(name, play(name, 8000).delivered)
    assert finding.verdicts["mean length"].p_value < 1e-4
    assert finding.verdicts["mean length"].tv < 0
