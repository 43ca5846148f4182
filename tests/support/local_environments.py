"""Environments in this process, behind the pool's own interface: no worker, real session calls.

`episodes_of(Environment)` gives what `SampleGenerator` takes; texts are token ids ("7 8").
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import KeysView, Sequence
from typing import Any, Literal

import numpy as np

from asyncrl.environments.config import EnvironmentConfig
from asyncrl.environments.translation import Translation
from asyncrl.environments.workers.lane import ProcessEnd, SessionLost
from asyncrl.environments.workers.messages import Answer, Call, Failed, Open, Setup
from asyncrl.environments.workers.pool import EnvironmentPool
from asyncrl.environments.workers.worker import Session
from asyncrl.generator.turns.environment_turns import Episodes
from asyncrl.rewards.config import RewardConfig
from asyncrl.rollout.trajectory import IntArray


class LocalLane:
    """In the place of an `EnvironmentLane`; `lose` does what the end of a process does."""

    ready, error = True, None

    def __init__(self, environment: type) -> None:
        self._environment = environment
        self._setup = Setup("local", {}, "", 60.0, 60.0)
        self._open: dict[int, Session] = {}
        self._lost = asyncio.Event()
        self._suspects = 1
        self._end = ProcessEnd("runs")
        self._ends: dict[int, ProcessEnd] = {}
        self.closed: list[int] = []
        self.alone: list[bool] = []
        """Of each call, whether it was to run alone."""

    @property
    def sessions(self) -> KeysView[int]:
        return self._open.keys()

    async def call(self, call: Call, seconds: float, *, alone: bool) -> Answer:
        del seconds
        self.alone.append(alone)
        if isinstance(call, Open):
            self._open[call.session] = Session(self._environment, self._setup)
        if call.session not in self._open:
            raise SessionLost("was replaced", self._end)
        lost = asyncio.create_task(self._lost.wait())
        answer = asyncio.create_task(self._open[call.session].answer(call))
        try:
            await asyncio.wait({lost, answer}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            answer.cancel()
            raise
        finally:
            lost.cancel()
        if not answer.done():
            answer.cancel()
            raise SessionLost("was ended by SIGKILL", self._end, suspects=self._suspects)
        failed = answer.result()
        if isinstance(failed, Failed) and not failed.continues:
            del self._open[call.session]
        return failed

    def lose(self, suspects: int = 1) -> None:
        """The process ends with all sessions, while it serves so many calls."""
        self._suspects = suspects
        self._end = ProcessEnd("was ended by SIGKILL", explained=suspects == 1)
        self._ends |= dict.fromkeys(self._open, self._end)
        self._open.clear()
        self._lost.set()
        self._lost = asyncio.Event()

    def end_of(self, session: int) -> ProcessEnd | None:
        return self._ends.get(session)

    def close_session(self, session: int) -> None:
        self._ends.pop(session, None)
        if self._open.pop(session, None) is not None:
            self.closed.append(session)


class LocalPool(EnvironmentPool):
    """A pool with one `LocalLane`."""

    def __init__(self, environment: type, rewards: dict[str, Any], **values: Any) -> None:
        config = EnvironmentConfig(**({"name": "my:Environment"} | values))
        super().__init__(config, RewardConfig.model_validate(rewards))
        self.local = LocalLane(environment)
        self._loops = [None]  # type: ignore[list-item]  # it runs

    async def _lane(self) -> Any:
        return self.local


class NumberRenderer:
    """Texts are token ids; nothing stands around turns."""

    history: Literal["keep"] = "keep"

    def rewritten(self, *_arguments: Any) -> None:
        """The conversation only grows."""

    def other_way(self) -> Any:
        """It is always the same."""
        return contextlib.nullcontext()

    def prompt(self, messages: Sequence[dict[str, Any]] | str, tools: Any = None) -> IntArray:
        del tools
        return self._ids(messages)

    def between(
        self, messages: Any, new_messages: Any, turn_tokens: Any, tools: Any = None
    ) -> IntArray:
        del messages, turn_tokens, tools
        return self._ids(new_messages)

    def turn_text(self, turn_tokens: Any) -> str:
        return in_words(list(turn_tokens))

    def _ids(self, said: Any) -> IntArray:
        text = said if isinstance(said, str) else " ".join(one["content"] for one in said)
        return np.array([int(word) for word in text.split()], np.int32)


def in_words(tokens: list[int]) -> str:
    return " ".join(map(str, tokens))


def episodes_of(
    environment: type,
    *,
    max_tokens: int = 8,
    rewards: dict[str, Any] | None = None,
    vocabulary: int = 100,
    **values: Any,
) -> tuple[Episodes, LocalPool]:
    """Episodes whose environments run here, and their pool."""
    pool = LocalPool(environment, rewards or {}, **values)
    translation = Translation(NumberRenderer(), in_words, vocabulary, max_observation_tokens=4)
    return Episodes(pool, translation, max_tokens=max_tokens, max_model_len=64), pool
