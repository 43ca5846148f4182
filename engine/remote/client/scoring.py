"""Scores given tokens, all of them under one policy version."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from asyncrl.engine.errors import EngineError
from asyncrl.engine.protocol import Score, ScoreRequest
from asyncrl.engine.remote.client.core import Core
from asyncrl.engine.remote.client.requests import check_temperature, score_of, scoring, unscored
from asyncrl.engine.remote.client.streams import Reader, Streams
from asyncrl.engine.requests import Limits, SeedStream

T = TypeVar("T")


class Scoring:
    """The `score` calls of one engine.

    Args:
        core: of the engine.
        streams: its requests.
        limits: of requests.
        seeds: of requests without one.
    """

    def __init__(self, core: Core, streams: Streams, limits: Limits, seeds: SeedStream) -> None:
        self._core = core
        self._streams = streams
        self._limits = limits
        self._seeds = seeds

    def check(self, requests: Sequence[ScoreRequest]) -> None:
        """Raise RequestError if one of them cannot be scored."""
        for request in requests:
            self._limits.check_score(request)
            check_temperature(request.request_id, request.sampling, self._core)

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Scores in the order asked. What new weights overtook is scored again."""
        scores = await _gather([self._score(request) for request in requests])
        while len({score.policy_version for score in scores}) > 1:
            installed = self._core.policy_version  # not the highest: it may have fallen
            stale = [i for i, score in enumerate(scores) if score.policy_version != installed]
            again = await _gather([self._score(requests[i]) for i in stale])
            for i, score in zip(stale, again, strict=True):
                scores[i] = score
        return scores

    async def _score(self, request: ScoreRequest) -> Score:
        if not len(request.tokens):
            return unscored(request, self._core.policy_version)
        name = request.request_id
        submitted = scoring(request, self._seeds.seed_of(request.sampling))
        scored = await self._streams.scored(name, submitted, Reader())
        if scored is None:
            raise EngineError(f"request {name!r}: the engine was closed while scoring")
        return score_of(request, scored)


async def _gather(calls: Sequence[Awaitable[T]]) -> list[T]:
    """Results in order; at the first failure the others are cancelled."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
