"""What the loop delivers to the trainer on the torch engine, against enumerated distributions.

Scheduler, generator process, engine and cache are real and run in one event loop. The trainer
alternates between two fixed policies and publishes in the middle of rollouts. See `whole_loop` for
the statements and `whole_loop.harness` for the loop, `loop_claims` for how samples are judged and
`false_alarms` for the p-value that fails.

Seeds are fixed and drafts do not depend on the clock, but which samples an update finds in
generation does. So tests draw until there are enough of those (`draw_until`, `assert_caught`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from false_alarms import Claims, assert_caught, draw_until, is_caught, lacking
from loop_claims import assert_exact, distributions_of, far_apart, found, policies_of
from suite_outcome import not_judged
from whole_loop import engines, statements
from whole_loop.modes import PROMPTS, SPACE, Mode, settings_of
from whole_loop.outcome import Delivered, Outcome

from asyncrl.engine.torch.core import DecodeCore
from asyncrl.engine.torch.engine import TorchEngine
from asyncrl.rollout.trajectory import KeptTokens, Trajectory
from asyncrl.wire.messages.unfinished_samples import UnfinishedSample

pytestmark = [pytest.mark.slow, pytest.mark.statistics]

CLAIMS = Claims(__file__)
SAMPLES = 1440
"""Of a part: ten steps."""
PARTS = 2
"""That a right loop is judged by, at most."""


def play(mode: Mode, part: int, samples: int = SAMPLES) -> Outcome:
    torch.set_num_threads(1)
    settings = settings_of(mode, samples, seed=part)
    return asyncio.run(engines.run(["torch"], mode, settings, policies_of(mode.drift)))


@cache
def played(name: str, part: int) -> Outcome:
    """One part of a mode, which all tests of the mode share."""
    return play(far_apart(name), part)


def total(parts: Sequence[Outcome], what: str) -> int:
    return sum(getattr(one, what) for one in parts)


def some_of(parts: Sequence[Outcome], which: str) -> list[Delivered]:
    """The samples that were `restored` or `handed_over`."""
    return [
        one
        for outcome in parts
        for one in outcome.delivered
        if one.trajectory.id in getattr(outcome, which)
    ]


def parts_with(item: pytest.Item, name: str, which: str, least: int, *, most: int) -> list[Outcome]:
    """Draw parts of a mode until so many samples were `restored` or `handed_over`.

    Which ones are does not depend on their tokens, so neither does the number of parts: they may be
    judged together too.
    """

    def lacks(parts: Sequence[Outcome]) -> str:
        return lacking(**{which: (len(some_of(parts, which)), least)})

    parts = draw_until(item, partial(played, name), lacks, most=most)
    assert some_of(parts, which)
    assert total(parts, "rejected")
    if why := lacking(rejected=(total(parts, "rejected"), SAMPLES)):
        not_judged(item, why)
    return parts


def assert_each_once(outcome: Outcome, samples: int = SAMPLES) -> None:
    ids = [one.trajectory.id for one in outcome.delivered]
    assert len(set(ids)) == len(ids) == samples


def worst_of(mode: Mode, cases: Callable[[Outcome], int]) -> Any:
    """Judge wrong loops by the worst p-value of everything that they delivered."""

    def judge(parts: list[Outcome]) -> tuple[float, int]:
        delivered = [one for outcome in parts for one in outcome.delivered]
        return found(mode, delivered).p_value, sum(map(cases, parts))

    return judge


def worst_of_some(mode: Mode, which: str) -> Any:
    """The same, by the samples that were `restored` or `handed_over`."""

    def judge(parts: list[Outcome]) -> tuple[float, int]:
        some = some_of(parts, which)
        return (found(mode, some).p_value if some else 1.0), len(some)

    return judge


def test_the_policies_differ_enough_for_mistakes_to_show() -> None:
    distributions = distributions_of(far_apart("verify, 1 ahead"))
    apart = [distributions.policy_distance(prompt) for prompt in range(len(PROMPTS))]
    assert min(apart) > 0.15, apart


@pytest.mark.parametrize("name", ["verify, 1 ahead", "verify, auto", "learning rate 0"])
def test_whole_trajectories_follow_the_policy_that_trains_on_them(
    request: pytest.FixtureRequest, name: str
) -> None:
    mode = far_apart(name)

    wanted = {"verified": SAMPLES, "cut": 36}
    if mode.drift:
        wanted |= {"rejected": SAMPLES // 2, "accepted": SAMPLES // 2}

    def lacks(parts: Sequence[Outcome]) -> str:
        return lacking(**{what: (total(parts, what), least) for what, least in wanted.items()})

    for outcome in draw_until(request.node, partial(played, name), lacks, most=PARTS):
        assert_exact(CLAIMS, mode, outcome.delivered)
        assert all(getattr(outcome, what) for what in wanted)
        assert mode.drift or outcome.rejected < SAMPLES / 2


def test_stop_strings_end_samples_in_the_loop_as_in_the_enumeration(
    request: pytest.FixtureRequest,
) -> None:
    """Generated ahead, interrupted, resumed within a string and verified; without it, detected."""
    name = "verify, stop strings"

    def lacks(parts: Sequence[Outcome]) -> str:
        return lacking(
            verified=(total(parts, "verified"), SAMPLES / 2), cut=(total(parts, "cut"), 40)
        )

    for outcome in draw_until(request.node, partial(played, name), lacks, most=PARTS):
        assert_exact(CLAIMS, far_apart(name), outcome.delivered)
        tokens = [one.trajectory.tokens for one in outcome.delivered]
        stopped = [one for one in tokens if one[-1] != SPACE.stop and len(one) < SPACE.max_tokens]
        assert len(stopped) > len(tokens) / 5
        assert outcome.verified
        assert outcome.cut
        plain = distributions_of(far_apart("verify, 1 ahead"))
        verdicts = statements.check_responses(outcome.delivered, plain)
        assert is_caught(verdicts["lengths within each step"].p_value)


def test_tokens_of_policies_that_are_gone_are_never_trained_on_unverified(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainers are lost, and the policies of their versions are other ones the second time.

    If held samples are not relabelled, their tokens pass for tokens of the policy that has the
    version now.
    """
    name = "verify, trainers lost"
    mode = far_apart(name)
    outcome = played(name, 0)
    assert outcome.rewinds >= 4
    assert_each_once(outcome)
    assert_exact(CLAIMS, mode, outcome.delivered)
    monkeypatch.setattr(Trajectory, "without_versions_after", lambda self, _: self)
    judge = worst_of(mode, lambda outcome: outcome.rewinds)
    assert_caught(request.node, lambda part: play(mode, part, 576), judge, enough=12, most=8)


def mix_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token of a file gets the probabilities of others."""
    kept = UnfinishedSample.kept

    def mixed_up(self: UnfinishedSample) -> KeptTokens:
        tokens = kept(self)
        return replace(tokens, topk_logprobs=np.roll(tokens.topk_logprobs, 1, axis=1))

    monkeypatch.setattr(UnfinishedSample, "kept", mixed_up)


def test_run_ahead_that_a_resumed_run_continues_is_exactly_on_policy(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs are killed after they have trained other policies than the next run will.

    Each next run has a new engine and scheduler, and reads the run-ahead from the disk. All samples
    are judged, and once more those that were restored, since which ones are does not depend on
    their tokens. If the probabilities that restored tokens were drawn with are mixed up, that is
    detected.
    """
    name = "verify, run resumed"
    mode = far_apart(name)

    parts = parts_with(request.node, name, "restored", 400, most=4)
    for outcome in parts:
        assert outcome.resumed == 4
        assert_each_once(outcome)
        assert_exact(CLAIMS, mode, outcome.delivered)
    assert_exact(CLAIMS, mode, some_of(parts, "restored"))
    mix_up(monkeypatch)
    judge = worst_of_some(mode, "restored")
    assert_caught(request.node, lambda part: play(mode, part), judge, enough=1000, most=4)


def test_samples_that_move_from_one_generator_to_another_are_exactly_on_policy(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each version one of two generators leaves, and another one joins.

    Samples that have moved are judged by themselves too: which ones move does not depend on their
    tokens. If the probabilities that moved tokens were drawn with are mixed up, that is detected.
    """
    name = "verify, generators leave"
    mode = far_apart(name)

    parts = parts_with(request.node, name, "handed_over", 400, most=2)
    for outcome in parts:
        assert_each_once(outcome)
        assert_exact(CLAIMS, mode, outcome.delivered)
    assert_exact(CLAIMS, mode, some_of(parts, "handed_over"))
    mix_up(monkeypatch)
    judge = worst_of_some(mode, "handed_over")
    assert_caught(request.node, lambda part: play(mode, part, 720), judge, enough=1000, most=4)


@pytest.mark.parametrize("name", ["verify, k = 1", "keep, k = 1", "recompute, k = 1"])
def test_each_token_follows_the_version_that_it_carries(
    request: pytest.FixtureRequest, name: str
) -> None:
    def mixed(outcome: Outcome) -> int:
        return sum(len(one.trajectory.segments) > 1 for one in outcome.delivered)

    def lacks(parts: Sequence[Outcome]) -> str:
        cases = {"mixed": (sum(map(mixed, parts)), SAMPLES / 20)}
        if name == "verify, k = 1":
            cases["verified"] = total(parts, "verified"), SAMPLES / 4
        return lacking(**cases)

    # The faster the machine, the fewer samples an update finds.
    most = 3 * PARTS if name == "verify, k = 1" else PARTS
    for outcome in draw_until(request.node, partial(played, name), lacks, most=most):
        assert_exact(CLAIMS, far_apart(name), outcome.delivered)
        assert mixed(outcome)
        assert outcome.verified if name == "verify, k = 1" else outcome.verified < SAMPLES / 4


# Wrong loops must be detected


def test_unverified_samples_are_detected() -> None:
    """`keep` with k = 1 delivers tokens of the previous version, as documented."""
    delivered = played("keep, k = 1", 0).delivered
    verdicts = statements.check_responses(delivered, distributions_of(far_apart("keep, k = 1")))
    print(*map(str, verdicts.values()), sep="\n")
    for what in ("texts of policy A", "texts of policy B", "lengths within each step"):
        assert is_caught(verdicts[what].p_value), what


def test_selection_by_completion_is_detected() -> None:
    """Take the half of each group that was finished first: short responses.

    As a loop would that leaves out what is not finished when it narrows its run-ahead.
    """
    outcome = played("verify, auto", 0)
    groups: dict[int, list[Delivered]] = {}
    for one in outcome.delivered:
        groups.setdefault(one.trajectory.id.group, []).append(one)
    early: list[Delivered] = []
    for group in groups.values():
        group.sort(key=lambda one: outcome.finished[one.trajectory.id])
        early += group[: len(group) // 2]
    distributions = distributions_of(far_apart("verify, auto"))
    verdict = statements.check_responses(early, distributions)["mean length"]
    print(verdict)
    assert is_caught(verdict.p_value)
    assert verdict.tv < 0


def test_a_missing_residual_is_detected(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = TorchEngine.generate

    def lenient(self: TorchEngine, request: Any) -> Any:
        if request.kept is not None:
            request = replace(request, kept=replace(request.kept, lenience=1.0))
        return generate(self, request)

    monkeypatch.setattr(TorchEngine, "generate", lenient)
    mode = far_apart("verify, 1 ahead")
    judge = worst_of(mode, lambda outcome: outcome.rejected)
    assert_caught(
        request.node, lambda part: play(mode, part, SAMPLES // 2), judge, enough=6000, most=4
    )


def test_a_cut_that_depends_on_the_tokens_after_it_is_detected(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lose the tokens that were drawn and not reported. Stop tokens are never among them.

    Such an engine reports nothing when weights are installed, right before samples are
    interrupted. A slot for each sample of a step, slow steps of the engine, and weights that arrive
    at once let many samples be in generation then. Some 1,400 cases show it below ALARM.
    """
    mode = far_apart(
        "learning rate 0", slots=144, turns_per_step=16, install_delay=0, publish_delays=(0,)
    )
    interrupt = DecodeCore.interrupt

    def forgetful(self: DecodeCore, name: str) -> Any:
        if name in self._rows:
            self._unreported.count[self._rows.row_of(name)] = 0
        return interrupt(self, name)

    monkeypatch.setattr(DecodeCore, "interrupt", forgetful)
    monkeypatch.setattr(DecodeCore, "flush", lambda _: [])

    def judge(parts: list[Outcome]) -> tuple[float, int]:
        delivered = [one for outcome in parts for one in outcome.delivered]
        verdict = found(mode, delivered).verdicts["mean length"]
        return (verdict.p_value if verdict.tv < 0 else 1.0), total(parts, "cut")

    draw = partial(play, mode)
    assert_caught(request.node, draw, judge, enough=3500, most=12)
