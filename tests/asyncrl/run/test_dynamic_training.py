"""Dynamic sampling at the controller: which groups the trainer is told to train on.

Inbox, training, scheduler and command executor are real. A fake generator and fake ranks of a
trainer say what they would say, in an order that hypothesis chooses.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from fake_processes import weights
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from running_training import G, Run

from asyncrl.rollout.trajectory import SampleId
from asyncrl.wire.messages import from_generator as fg
from asyncrl.wire.messages import from_trainer as ft
from asyncrl.wire.messages import to_generator as tg
from asyncrl.wire.messages import to_trainer as tt
from asyncrl.wire.records.step import LearnerMetrics
from asyncrl.wire.transport.refusals import Reason

STEPS, PER_STEP, SIZE = 4, 2, 2


def rewards_of(group: int, seed: int) -> list[float]:
    """Half of the groups carry signal."""
    rng = random.Random(f"{seed} {group}")
    first = float(rng.random() < 0.5)
    return [first, 1 - first] if rng.random() < 0.5 else [first, first]


def next_groups_with_signal(seed: int) -> list[tuple[int, ...]]:
    """Of each step, in data order."""
    carry = (group for group in itertools.count() if len(set(rewards_of(group, seed))) > 1)
    return [tuple(itertools.islice(carry, PER_STEP)) for _ in range(STEPS)]


class Others:
    """A generator and a trainer; `todo` is what they may say next, in any order."""

    def __init__(self, run: Run, ranks: int, seed: int) -> None:
        self.run, self.ranks, self.seed = run, ranks, seed
        self.version = self.trained = 0
        self.contents: dict[SampleId, tuple[int, bytes]] = {}
        """Oldest version and digest of what was reported last."""
        self.todo: list[tuple[str, Any]] = []
        self.dealt: dict[tuple[int, int], set[int]] = defaultdict(set)
        """Groups that each (step, rank) was told to expect."""
        self.plans: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        self._count = itertools.count()

    def hear(self, sent: list[tuple[str, Any]]) -> None:
        for name, message in sent:
            match message:
                case tg.Generate():
                    self.todo.append(("finish", message.sample))
                case tg.Verify():
                    self._verify(message)
                case tg.InstallWeights():
                    self.todo.append(("install", message))
                case tg.Discard():
                    gone = set(message.samples)
                    self.todo = [one for one in self.todo if one[1] not in gone]
                case tg.Deliver():
                    self.todo += [("deliver", sample) for sample in message.samples]
                case tt.Expect():
                    rank = [one.name for one in self.run.fleet.ranks].index(name)
                    self.dealt[message.step, rank] |= {one.sample.group for one in message.samples}
                case tt.StepPlan():
                    self.plans[message.step].append(message.groups)
                    if len(self.plans[message.step]) == self.ranks:
                        self.todo.append(("train", message.step))

    def _verify(self, message: tg.Verify) -> None:
        for sample in message.samples:
            if ("finish", sample) not in self.todo:
                self.todo = [one for one in self.todo if one != ("reward", sample)]
                self.todo.append(("finish", sample))

    def say(self, kind: str, about: Any) -> list[tuple[str, Any]]:
        """What is said; the version of weights that are being installed is the newest one."""
        if kind == "finish":
            digest = next(self._count).to_bytes(16, "big")
            self.contents[about] = self.version, digest
            self.todo.append(("reward", about))
            length = 1 + (7 * about.group + about.sample) % 9
            return [(G, fg.SampleFinished(G, about, length, self.version, "stop", digest))]
        if kind == "reward":
            _, digest = self.contents[about]
            reward = rewards_of(about.group, self.seed)[about.sample]
            return [(G, fg.SampleRewarded(G, about, reward, digest))]
        if kind == "deliver":
            return [(G, fg.SampleDelivered(G, about))]
        if kind == "install":
            self.version = about.manifest.policy_version
            for one in about.verify:
                self._verify(one)
            return [(G, fg.WeightsInstalled(G, self.version))]
        groups = tuple(sorted(itertools.chain(*self.plans[about])))
        self.trained += 1
        times: Any = None  # nothing here reads them
        learned = LearnerMetrics()
        return [
            ("trainer", ft.StepFinished(about, groups, weights(about + 1), learned, times)),
        ]


async def train(path: Path, mode: dict[str, Any], ranks: int, seed: int, draw: Any) -> Others:
    run = Run(
        path, steps=STEPS, ranks=ranks, slots=9, group_size=SIZE, groups_per_step=PER_STEP,
        dynamic_sampling={"enabled": True, "max_batches": 50}, **mode,
    )  # fmt: skip
    refused: list[Reason] = []
    run.hub.refusals.count = refused.append  # type: ignore[method-assign]
    run.progress.first_groups = lambda _step: {}
    training = await run.begin()
    others = Others(run, ranks, seed)
    others.hear(run.hub.take())
    while not run.training.is_complete:
        later = [one for one in others.todo if one[0] == "train" and one[1] > others.trained]
        now = [one for one in others.todo if one not in later]
        assert now, "the run waits for nobody"
        kind, about = one = now[draw(len(now))]
        others.todo.remove(one)
        for name, message in others.say(kind, about):
            others.hear(await run.hear(name, message))
    assert not refused
    training.cancel()
    return others


MODES = [
    {"on_update": "keep", "max_off_policy_steps": 0},
    {"on_update": "keep", "max_off_policy_steps": 2},
    {"on_update": "verify"},
]


@pytest.mark.parametrize("mode", MODES, ids=["sync", "keep", "verify"])
@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 1000), ranks=st.integers(1, 3), order=st.randoms(use_true_random=False))
def test_whatever_is_finished_first_a_step_has_the_next_groups_with_signal(
    tmp_path_factory: pytest.TempPathFactory,
    mode: dict[str, Any],
    seed: int,
    ranks: int,
    order: Any,
) -> None:
    path = tmp_path_factory.mktemp("run")
    others = asyncio.run(train(path, mode, ranks, seed, order.randrange))
    plans = [tuple(sorted(itertools.chain(*others.plans[step]))) for step in range(STEPS)]
    assert plans == next_groups_with_signal(seed)
    for (step, rank), groups in others.dealt.items():
        assert groups == set(others.plans[step][rank]), "a rank has what it is told to train on"


def test_a_reward_of_other_contents_or_of_another_generator_does_not_count(tmp_path: Path) -> None:
    async def check() -> None:
        run = Run(tmp_path, on_update="keep", dynamic_sampling={"enabled": True})
        run.progress.first_groups = lambda _step: {}
        training = await run.begin()
        run.hub.take()
        samples = (SampleId(0, 0), SampleId(0, 1))
        for sample in samples:
            await run.hear(G, fg.SampleFinished(G, sample, 5, 0, "stop", b"a" * 16))
            await run.hear(G, fg.SampleFinished(G, sample, 6, 0, "stop", b"b" * 16))
        for sample, reward in zip(samples, (0.0, 1.0), strict=True):
            assert await run.hear(G, fg.SampleRewarded(G, sample, reward, b"a" * 16)) == []
        await run.hear(G, fg.SampleRewarded(G, samples[0], 0.0, b"b" * 16))
        sent = await run.hear(G, fg.SampleRewarded(G, samples[1], 1.0, b"b" * 16))
        assert (G, tg.Deliver(0, samples)) in sent
        training.cancel()

    asyncio.run(check())
