"""Plays the turns of trained samples again: is each reward that of its tokens?"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncrl.config.run_config import RunConfig
from asyncrl.environments.protocol import (
    BadAnswerError,
    StepResult,
    checked_reset,
    checked_step,
)
from asyncrl.environments.registry import load_factory
from asyncrl.environments.translation import Translation
from asyncrl.environments.workers.messages import Failed, Open, Opened, Setup, Step, Stepped
from asyncrl.environments.workers.worker import Session
from asyncrl.generator.turns.conversation import Episode, Turn
from asyncrl.generator.turns.environment_setup import translation_of
from asyncrl.generator.turns.environment_turns import answered
from asyncrl.monitoring.records.trained_samples import TrainedSample
from asyncrl.rollout.trajectory import IntArray
from asyncrl.tasks.prompts import Task

_TIMEOUT = 60.0
_CLOSE_TO = 1e-5
"""Rewards are float32 in the trainer."""


class _Ended(Exception):  # noqa: N818 - says what happens
    """The environment has failed, so the reward is 0."""


@dataclass(slots=True)
class Finding:
    """What a sample should have been rewarded with."""

    reward: float = 0.0
    failed: bool = False
    """The environment fails at one of its turns."""
    mismatch: str = ""
    """The tokens are not those of this environment's answers."""

    def is_of(self, sample: TrainedSample) -> bool:
        """Whether the sample has what it should."""
        near = abs(self.reward - sample.reward) <= _CLOSE_TO * max(1.0, abs(self.reward))
        return near and not self.mismatch


class Auditor:
    """Plays each turn of a sample in a fresh environment, whose answers must be what follows.

    Nothing of the run is used but the tokens: no pool, no verification, no going back. The
    environment must not need its seed, as that is not recorded.
    """

    def __init__(self, config: RunConfig, task: Task) -> None:
        if config.environment.name is None or config.rewards.functions or config.sampling.stop:
            raise ValueError("an environment's rewards are recomputed, without stop texts")
        self._config = config
        tokenizer = task.tokenizer
        self._translation: Translation = translation_of(
            config,
            tokenizer,
            lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
            task.stop_tokens,
        )
        self._stops = np.array(task.stop_tokens, np.int32)
        self._rows: Mapping[str, dict[str, Any]] = {
            one.prompt_id: one.example for one in (*task.train, *task.evaluation)
        }
        environment = config.environment
        self._factory = load_factory(str(environment.name), dict(environment.args))

    async def wrong(self, samples: Iterable[TrainedSample]) -> list[tuple[TrainedSample, Finding]]:
        """The samples whose reward is not that of their tokens."""
        found = [(one, await self.examine(one)) for one in samples]
        return [(one, finding) for one, finding in found if not finding.is_of(one)]

    async def examine(self, sample: TrainedSample) -> Finding:
        setup = Setup("", {}, "", _TIMEOUT, _TIMEOUT)
        session, finding = Session(self._factory, setup), Finding()
        try:
            await self._play(session, sample, finding)
        except (_Ended, BadAnswerError):
            finding.reward, finding.failed = 0.0, True
        finally:
            await session.close()
        return finding

    async def _play(self, session: Session, sample: TrainedSample, finding: Finding) -> None:
        row = self._rows[sample.prompt_id]
        tokens = np.array(sample.response_tokens, np.int32)
        opened = await session.answer(Open(0, 0, row, 0))
        if not isinstance(opened, Opened):
            raise _Ended
        episode = self._begun(opened, row, sample, finding)
        turns = _Turns(tokens, self._stops)
        while (action := turns.next()) is not None:
            turn = await self._step(session, episode, action)
            episode.turns.append(turn)
            finding.reward += self._config.environment.reward_weight * turn.reward
            is_last = turn.done or len(episode.turns) >= self._config.environment.max_turns
            expected = turn.observed[:0] if is_last else turn.observed
            if not turns.take(expected, may_end=not turn.done):
                finding.mismatch = f"after turn {len(episode.turns)}"
                return

    def _begun(
        self, opened: Opened, row: dict[str, Any], sample: TrainedSample, finding: Finding
    ) -> Episode:
        first = checked_reset(opened.first)
        episode = Episode(0, row_prompt=np.array(sample.prompt_tokens, np.int32))
        episode.traits = opened.traits
        episode.conversation = self._translation.conversation(first, row)
        if first is not None or opened.traits.tools:
            episode.prompt = self._translation.prompt(episode.conversation, opened.traits.tools)
            if not np.array_equal(episode.prompt, episode.row_prompt):
                finding.mismatch = "in the prompt"
        return episode

    async def _step(self, session: Session, episode: Episode, tokens: IntArray) -> Turn:
        place = len(episode.turns)
        said = self._translation.action(tokens, episode.tools_before(place), place)
        answer = await session.answer(Step(0, 0, said))
        if isinstance(answer, Failed) or not isinstance(answer, Stepped):
            raise _Ended
        result: StepResult = checked_step(answer.result)
        turn = Turn(tokens, said.message, result.done, result.reward)
        return answered(turn, result, episode, self._translation)


class _Turns:
    """The turns of a response, one after the other; each ends with a stop token."""

    def __init__(self, tokens: IntArray, stops: IntArray) -> None:
        self._tokens = tokens
        self._ends = np.flatnonzero(np.isin(tokens, stops))
        self._place = 0

    def next(self) -> IntArray | None:
        """The next turn; None at the end, or if it was cut off before its end."""
        ends = self._ends[self._ends >= self._place]
        if not len(ends):
            return None
        begin, self._place = self._place, int(ends[0]) + 1
        return self._tokens[begin : self._place]

    def take(self, answer: IntArray, *, may_end: bool) -> bool:
        """Whether these tokens follow. The response may end instead: there was no room."""
        end = self._place + len(answer)
        if may_end and self._place == len(self._tokens):
            return True
        is_same = np.array_equal(self._tokens[self._place : end], answer)
        self._place = end
        return is_same and (len(answer) > 0 or end == len(self._tokens))
