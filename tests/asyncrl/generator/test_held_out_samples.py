"""Held-out samples of a generator that trains follow the policy of their version exactly.

Generator process, engine and cache are real; the policies are small enough to enumerate. Samples
are begun under another policy, cut, verified and finished while newer weights wait.
`false_alarms` says which p-value fails.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from false_alarms import Claims, is_caught, lacking
from suite_outcome import not_judged
from whole_loop.engines import slow_down, torch_engine
from whole_loop.member import EngineClock, FakeLine, generator_process
from whole_loop.modes import (
    MODES,
    PROMPTS,
    SPACE,
    ResponseDistributions,
    make_policies,
    settings_of,
)
from whole_loop.statements import Verdict, compare

from asyncrl.generator.evaluation import Evaluation
from asyncrl.rollout.trajectory import Provenance, Trajectory
from asyncrl.tasks.sample_requests import sample_seed
from asyncrl.wire.messages import from_generator as fg
from asyncrl.wire.messages import to_generator as tg
from asyncrl.wire.weights.writer import WeightPublisher

pytestmark = [pytest.mark.slow, pytest.mark.statistics]

CLAIMS = Claims(__file__)

ROUNDS, SAMPLES = 12, 64
MODE = MODES["verify, far apart"]


class Reports:
    """What the controller hears, and the trajectories behind it."""

    def __init__(self) -> None:
        self.samples: list[fg.EvaluationSample] = []
        self.trajectories: list[Trajectory] = []
        self.changed = asyncio.Event()

    def hear(self, message: Any) -> None:
        assert not isinstance(message, fg.EvaluationMissed), message.reason
        if isinstance(message, fg.EvaluationSample):
            self.samples.append(message)
            self.changed.set()

    async def until(self, count: int) -> None:
        async with asyncio.timeout(120):
            while len(self.samples) < count:
                self.changed.clear()
                await self.changed.wait()


def request(round_number: int, index: int, version: int) -> tg.Evaluate:
    prompt = index % len(PROMPTS)
    tokens = np.array(PROMPTS[prompt], "<i4").tobytes()
    payload = tg.PromptPayload(f"p{prompt}", tokens, {"prompt": ""})
    seed = sample_seed(0, "held out", round_number, index)
    fixed = tg.FixedVersion(version, True, 1000.0, sample_seed(seed, "verify"))
    return tg.Evaluate(round_number, index, payload, seed, fixed)


async def play(policies: list[Any], reports: Reports) -> None:
    """Rounds of samples; every second one has newer weights waiting."""
    rng = np.random.default_rng(5)
    with tempfile.TemporaryDirectory() as path, WeightPublisher(Path(path), "held") as publisher:
        policies[0].save_pretrained(path)
        engine = torch_engine(path, MODE)
        await engine.start()
        slow_down(engine, 8)
        clock = EngineClock([engine], 0.0003)
        control = FakeLine(reports.hear)
        sampling = settings_of(MODE, SAMPLES, 0).sampling
        process, _, _ = generator_process("g", engine, sampling, control, FakeLine(lambda _: None))
        serving = asyncio.create_task(process.run(metrics_port=None))
        version = 0

        def install(newer: int) -> None:
            weights = policies[newer % 2].state_dict().items()
            control.inbox.put_nowait(tg.InstallWeights(publisher.publish(weights, newer)))

        try:
            for number in range(ROUNDS):
                for index in range(SAMPLES):
                    control.inbox.put_nowait(request(number, index, version + 1))
                while not engine.stats().running:  # noqa: ASYNC110 - the engine has no event
                    await asyncio.sleep(0)
                await clock.until(clock.now + int(rng.integers(0, 6)))
                version += 1
                install(version)
                if number % 2:
                    await clock.until(clock.now + 1)
                    version += 1
                    install(version)
                await reports.until((number + 1) * SAMPLES)
        finally:
            control.inbox.put_nowait(tg.Shutdown())
            async with asyncio.timeout(60):
                await serving
            await engine.close()


def texts_follow(
    reports: Reports, distributions: ResponseDistributions, *, other: bool = False
) -> Verdict:
    """Compare all texts with the policies of their versions, or with the respective other ones."""
    drawn = []
    for message, trajectory in zip(reports.samples, reports.trajectories, strict=True):
        policy = (message.policy_version + other) % 2
        key = policy, message.index % len(PROMPTS)
        drawn.append((key, tuple(map(int, trajectory.tokens))))
    keys = {key for key, _ in drawn}
    expected = {key: distributions.responses(*key) for key in keys}
    return compare(drawn, expected, pool=lambda text: (len(text), text[:2]))


def test_held_out_samples_follow_the_policy_of_their_version(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    policies, reports = make_policies(MODE.drift), Reports()
    report = Evaluation._report

    async def note(self: Evaluation, command: tg.Evaluate, held: Any) -> None:
        await report(self, command, held)
        reports.trajectories.append(held.trajectory)

    monkeypatch.setattr(Evaluation, "_report", note)
    asyncio.run(play(policies, reports))
    verdict = texts_follow(reports, ResponseDistributions(policies, PROMPTS, SPACE))
    print(verdict)
    assert CLAIMS.fit(verdict.p_value)
    versions = {(one.policy_version, one.newest_version) for one in reports.samples}
    assert all(oldest == newest for oldest, newest in versions)
    assert {oldest % 2 for oldest, _ in versions} == {0, 1}
    # Otherwise the assertions above show nothing.
    wrong = texts_follow(reports, ResponseDistributions(policies, PROMPTS, SPACE), other=True)
    assert is_caught(wrong.p_value)
    provenance = np.concatenate([one.provenance for one in reports.trajectories])
    verified = int((provenance == Provenance.VERIFIED).sum())
    waits = sum(one.held_seconds > 0 for one in reports.samples)
    assert verified
    assert waits, "newer weights have waited"
    if why := lacking(verified=(verified, ROUNDS * SAMPLES / 4)):
        not_judged(request.node, why)
