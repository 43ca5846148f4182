"""Rounds while a run trains: what is asked of generators when, and what ends a round."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from running_training import G, Run

from asyncrl.config.run_config import RunConfig
from asyncrl.evaluation.during import EvaluationDuringTraining, lead_of, next_version
from asyncrl.wire.messages import from_generator as fg
from asyncrl.wire.messages import to_generator as tg
from asyncrl.wire.records.evaluations import EvaluationRecord


class Rounds:
    """A run with two held-out prompts whose policies are evaluated every third step."""

    def __init__(self, path: Path, **settings: Any) -> None:
        self.run = Run(path, steps=20, on_update=settings.pop("on_update", "verify"))
        self.results: list[EvaluationRecord] = []
        self.given_up: list[int] = []
        values = self.run.config.model_dump(mode="json")
        values["evaluation"] |= {"every": 3, "prompts": 2, **settings}
        self.config = RunConfig.model_validate(values)
        self.during = EvaluationDuringTraining(
            self.config,
            self.run.requests,
            self.run.fleet,
            say=self.run.progress.say,
            result=self.results.append,
            given_up=self.given_up.append,
        )
        self.run.evaluation.during = self.during
        self.worker = self.run.fleet.generators()[0]

    async def published(self, version: int) -> list[tg.Evaluate]:
        await self.during.published(version)
        return [one for _, one in self.run.hub.take() if isinstance(one, tg.Evaluate)]

    async def returns(self, asked: tg.Evaluate, oldest: int, newest: int, reward: float) -> None:
        message = fg.EvaluationSample(G, asked.round, asked.index, reward, oldest, newest, 7, 0.25)
        await self.run.hear(G, message)


def play(path: Path, scenario: Any, **settings: Any) -> None:
    asyncio.run(scenario(Rounds(path, **settings)))


def test_which_version_comes_next() -> None:
    every = {"every": 10, "steps": 35}
    assert next_version(published=0, known=0, **every) == 10, "0 is evaluated before training"
    assert next_version(published=10, known=9, **every) == 10
    assert next_version(published=10, known=10, **every) == 20
    assert next_version(published=31, known=30, **every) is None, "the last is after training"
    assert next_version(published=0, known=0, every=5, steps=5) is None


def test_it_leads_as_far_as_training_runs_ahead() -> None:
    def config(**scheduler: Any) -> RunConfig:
        return RunConfig.model_validate({"scheduler": {"groups_per_step": 4, **scheduler}})

    assert lead_of(config()) == 2
    assert lead_of(config(max_runahead_groups=5)) == 2
    assert lead_of(config(on_update="keep", max_off_policy_steps=3)) == 0


def test_a_round_is_begun_ahead_and_ends_with_its_last_sample(tmp_path: Path) -> None:
    async def scenario(rounds: Rounds) -> None:
        assert await rounds.published(0) == []
        asked = await rounds.published(1)  # two versions before version 3
        assert [(one.index, one.fixed.policy_version, one.fixed.ahead) for one in asked] == [
            (0, 3, True),
            (1, 3, True),
        ]
        assert len({one.seed for one in asked} | {one.fixed.verify_seed for one in asked}) == 4
        assert await rounds.published(2) == [], "one round at a time"
        assert rounds.during.current.describe() == "step 3, 0/2"
        await rounds.returns(asked[1], 3, 3, 1.0)
        await rounds.returns(asked[1], 3, 3, 0.0)  # a copy changes nothing
        assert rounds.results == []
        await rounds.published(3)
        await rounds.returns(asked[0], 3, 3, 0.0)
        [record] = rounds.results
        assert (record.step, record.when, record.held_seconds) == (3, "during", 0.25)
        assert (record.main.accuracy, record.main.samples, record.main.tokens) == (0.5, 2, 7.0)
        again = await rounds.published(4)
        assert {one.fixed.policy_version for one in again} == {6}
        assert {one.seed for one in again}.isdisjoint(one.seed for one in asked)

    play(tmp_path, scenario)


def test_without_verification_it_begins_with_its_version(tmp_path: Path) -> None:
    async def scenario(rounds: Rounds) -> None:
        assert await rounds.published(2) == []
        assert [one.fixed.ahead for one in await rounds.published(3)] == [False, False]

    play(tmp_path, scenario, on_update="keep")


def test_a_sample_of_another_version_is_never_counted(tmp_path: Path) -> None:
    async def scenario(rounds: Rounds) -> None:
        asked = await rounds.published(1)
        await rounds.returns(asked[0], 2, 3, 1.0)
        assert (rounds.results, rounds.given_up) == ([], [3])
        assert "versions 2 to 3, which is a defect" in rounds.run.progress.said[-1]

    play(tmp_path, scenario)


def test_a_missed_round_is_given_up_everywhere_and_the_next_one_comes(tmp_path: Path) -> None:
    async def scenario(rounds: Rounds) -> None:
        asked = await rounds.published(1)
        sent = await rounds.run.hear(G, fg.EvaluationMissed(G, asked[0].round, "g took too long"))
        assert (G, tg.AbandonEvaluation(asked[0].round)) in sent
        assert rounds.given_up == [3]
        assert "the evaluation of step 3 is given up: g took too long" in rounds.run.progress.said
        await rounds.run.hear(G, fg.EvaluationMissed(G, asked[0].round, "late"))
        assert rounds.given_up == [3]
        assert await rounds.published(3) == []
        assert {one.fixed.policy_version for one in await rounds.published(4)} == {6}

    play(tmp_path, scenario)


def test_samples_of_a_lost_generator_go_to_one_that_can_have_the_version(tmp_path: Path) -> None:
    async def scenario(rounds: Rounds) -> None:
        await rounds.published(1)
        await rounds.during.lost(rounds.worker)
        assert rounds.given_up == [3], "there is no other"
        asked = await rounds.published(4)
        rounds.worker.policy_version = 7  # it has gone past version 6
        await rounds.during.lost(rounds.worker)
        assert rounds.given_up == [3, 6]
        assert [one.fixed.policy_version for one in asked] == [6, 6]

    play(tmp_path, scenario)


def test_a_lost_trainer_ends_the_round_and_it_is_begun_again(tmp_path: Path) -> None:
    async def scenario(rounds: Rounds) -> None:
        first = await rounds.published(1)
        rounds.during.rewound(0)
        assert "step 3 starts again at that step" in rounds.run.progress.said[-1]
        await rounds.returns(first[0], 3, 3, 1.0)
        assert rounds.during.current is None
        rounds.run.fleet.lineage = 1
        again = await rounds.published(1)
        assert [one.fixed.policy_version for one in again] == [3, 3]
        assert {one.seed for one in again}.isdisjoint(one.seed for one in first)
        rounds.during.end()
        assert "has no result: the run ended with 0 of 2" in rounds.run.progress.said[-1]

    play(tmp_path, scenario)


def test_a_resumed_run_repeats_what_it_can_and_says_what_it_cannot(tmp_path: Path) -> None:
    async def scenario(rounds: Rounds) -> None:
        await rounds.during.begin(6, evaluated=3)
        asked = [one for _, one in rounds.run.hub.take() if isinstance(one, tg.Evaluate)]
        assert [(one.fixed.policy_version, one.fixed.ahead) for one in asked] == [(6, False)] * 2
        other = Rounds(tmp_path / "other")
        await other.during.begin(7, evaluated=3)
        assert "step 6 has no result: the run continues at step 7" in other.run.progress.said[-1]
        settled = Rounds(tmp_path / "settled")
        await settled.during.begin(7, evaluated=6)
        assert settled.run.progress.said == []

    play(tmp_path, scenario)
