"""What the loop delivers to the trainer on real vLLM and on real SGLang, prefix caches on.

The statements of `test_whole_loop` with few samples; the wrong rule that must be detected shows
what they can see. The time of updates depends on the clock, so no two runs are the same. Drafts and
verification are on. See `loop_claims` for how samples are judged and `false_alarms` for the p-value
that fails. The engines are not those of other tests: the policies, whose responses can be
enumerated whole, have a vocabulary of 4 tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from false_alarms import Claims, assert_caught, draw_until, lacking
from loop_claims import assert_exact, far_apart, found, policies_of
from served_sglang import REAL_SGLANG, forked
from served_vllm import REAL_VLLM
from whole_loop import engines
from whole_loop.modes import Mode, settings_of
from whole_loop.outcome import Outcome

from asyncrl.engine.protocol import Engine
from asyncrl.engine.remote.client.engine import RemoteEngine

pytestmark = pytest.mark.statistics

CLAIMS = Claims(__file__)
SAMPLES = 864
"""Of a part: six steps. As many show a missing residual."""
FEW = 288
"""Of a part where a token is judged by its own version; each probability is compared too."""
MOVING = 432
"""Of a part in which runs are killed: six steps."""
PARTS = 3
"""That a right loop is judged by, at most."""
FAR = "verify, far apart"


def small(name: str) -> Mode:
    """A mode with steps of half as many samples."""
    mode = far_apart(name)
    return replace(mode, scheduler=mode.scheduler | {"group_size": 8})


EACH_ENGINE = [
    pytest.param("vllm", marks=REAL_VLLM),
    pytest.param("sglang", marks=REAL_SGLANG),
]


@dataclass
class Running:
    """An engine, its loop, and the folder of its runs."""

    kind: str
    engine: Engine
    runner: asyncio.Runner
    path: Path

    def play(self, mode: Mode, samples: int, part: int, kinds: Sequence[str] = ()) -> Outcome:
        """Run the loop in a mode, on a fleet of these kinds or on this engine alone."""
        torch.set_num_threads(1)
        settings, outcome = settings_of(mode, samples, seed=part), Outcome()
        remote, policies = {self.kind: self.engine}, policies_of(mode.drift)
        while outcome.next_step < settings.steps:
            self.runner.run(
                engines.run_once(
                    kinds or [self.kind], remote, mode, settings, policies, self.path, outcome
                )
            )
        print(
            f"part {part}: {outcome.verified} verified, {outcome.rejected} rejected, "
            f"{outcome.accepted} drafted and accepted, {outcome.cut} cut"
        )
        return outcome


@pytest.fixture(scope="module", params=EACH_ENGINE)
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """One engine of each kind for this module."""
    with asyncio.Runner() as runner:
        path = tmp_path_factory.mktemp("loop-model")
        policies_of(1.0)[0].save_pretrained(path)
        engine = engines.ENGINES[request.param](str(path), far_apart(FAR))
        try:
            with forked():
                runner.run(engine.start())
            yield Running(request.param, engine, runner, path)
        finally:
            runner.run(engine.close())


def test_whole_trajectories_follow_the_policy_that_trains_on_them(
    request: pytest.FixtureRequest, running: Running
) -> None:
    def lacks(parts: Sequence[Outcome]) -> str:
        return lacking(
            verified=(sum(one.verified for one in parts), SAMPLES / 2),
            rejected=(sum(one.rejected for one in parts), SAMPLES / 4),
            accepted=(sum(one.accepted for one in parts), SAMPLES / 4),
            cut=(sum(one.cut for one in parts), 0),
        )

    def draw(part: int) -> Outcome:
        return running.play(far_apart(FAR), SAMPLES, part)

    for outcome in draw_until(request.node, draw, lacks, most=PARTS):
        assert_exact(CLAIMS, far_apart(FAR), outcome.delivered, running.kind)


@pytest.mark.parametrize("name", ["verify, k = 1", "keep, k = 1", "recompute, k = 1"])
def test_each_token_follows_the_version_that_it_carries(
    request: pytest.FixtureRequest, name: str, running: Running
) -> None:
    def lacks(parts: Sequence[Outcome]) -> str:
        mixed = sum(len(one.trajectory.segments) > 1 for part in parts for one in part.delivered)
        # There are few with `verify` if updates come elsewhere.
        return "" if name.startswith("verify") else lacking(of_two_versions=(mixed, 0))

    def draw(part: int) -> Outcome:
        return running.play(small(name), FEW, part)

    for outcome in draw_until(request.node, draw, lacks, most=PARTS):
        assert_exact(CLAIMS, far_apart(name), outcome.delivered, running.kind)


def test_what_one_engine_wrote_ahead_another_one_verifies_and_continues(
    request: pytest.FixtureRequest, running: Running
) -> None:
    """A fleet with the torch engine, which is missing in the second of three runs.

    The runs before were killed; the next one continues their run-ahead from the disk. The policies
    that the killed trainer went on to train are gone.
    """
    name, kinds = "verify, run resumed", ["torch", running.kind]

    def lacks(parts: Sequence[Outcome]) -> str:
        moved = [one.moved for one in parts]
        here = sum(one.generator == running.kind for part in moved for one in part.delivered)
        return lacking(
            verified_here=(here, 0),
            accepted=(sum(part.accepted for part in moved), 0),
            changed=(sum(part.changed for part in moved), 0),
        )

    def draw(part: int) -> Outcome:
        return running.play(small(name), MOVING, part, kinds)

    for outcome in draw_until(request.node, draw, lacks, most=PARTS):
        assert outcome.resumed == 2
        assert_exact(CLAIMS, far_apart(name), outcome.delivered, running.kind)
        ids = {one.trajectory.id for one in outcome.delivered}
        assert len(ids) == len(outcome.delivered) == MOVING, "each sample once"
        assert {one.generator for one in outcome.delivered} == set(kinds)


def test_a_missing_residual_is_detected(
    request: pytest.FixtureRequest, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = RemoteEngine.generate

    def lenient(self: RemoteEngine, request: Any) -> Any:
        if request.kept is not None:
            request = replace(request, kept=replace(request.kept, lenience=1.0))
        return generate(self, request)

    monkeypatch.setattr(RemoteEngine, "generate", lenient)

    def judge(parts: list[Outcome]) -> tuple[float, int]:
        delivered = [one for outcome in parts for one in outcome.delivered]
        finding = found(far_apart(FAR), delivered)
        return finding.p_value, sum(outcome.rejected for outcome in parts)

    def draw(part: int) -> Outcome:
        return running.play(small(FAR), FEW, part)

    assert_caught(request.node, draw, judge, enough=4000, most=12)
