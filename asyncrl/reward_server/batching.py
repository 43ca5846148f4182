"""Gathers texts that arrive at about the same time into batches for the model.

    submit ──► at most `max_waiting` ──► first come, first served ──► a batch ──► the model's thread

A batch begins when the model is free and a text waits. It takes further texts until it would have
more than `batch_tokens` tokens, padding included, or `window_seconds` have passed since then.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

logger = logging.getLogger(__name__)

Score = Callable[[Sequence[Sequence[int]]], list[float]]
"""Texts as tokens to their scores; called from one thread."""


class QueueFullError(Exception):
    """As many texts wait as may."""

    def __init__(self, seconds: float) -> None:
        super().__init__("as many texts wait as may")
        self.seconds = seconds
        """Until there may be room."""


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """How texts are gathered."""

    batch_tokens: int = 16_384
    """Most tokens of a batch, padding included; a longer text is a batch of its own."""
    window_seconds: float = 0.005
    """Longest time that a batch waits for further texts."""
    max_waiting: int = 1024
    """Most texts that wait."""


@dataclass(slots=True, eq=False)
class _Text:
    tokens: list[int]
    score: asyncio.Future[float]


class Batcher:
    """Used from one event loop.

    Args:
        score: the model.
        settings: how texts are gathered.
        pads: whether a batch may have several texts.
    """

    def __init__(self, score: Score, settings: BatchSettings, *, pads: bool = True) -> None:
        self._score, self._settings, self._pads = score, settings, pads
        self._waiting: deque[_Text] = deque()
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "reward-model")
        self._running: asyncio.Task[None] | None = None
        self._batch_seconds = 0.0
        self.batches = 0
        """Batches that the model has computed."""
        self.texts = 0
        """Texts in these."""

    @property
    def waiting(self) -> int:
        """Texts that wait for the model."""
        return len(self._waiting)

    def start(self) -> None:
        """Begin to compute."""
        self._running = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop; whoever waits is told. The batch that is being computed is waited for."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])
        while self._waiting:
            self._waiting.popleft().score.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def submit(self, tokens: list[int]) -> float:
        """The score of a text. Cancel it, and it is not computed.

        Raises:
            QueueFullError: too many wait.
            Exception: the model failed on the batch.
        """
        if len(self._waiting) >= self._settings.max_waiting:
            raise QueueFullError(self._seconds_of_queue())
        text = _Text(tokens, asyncio.get_running_loop().create_future())
        self._waiting.append(text)
        self._arrived.set()
        return await text.score

    def _seconds_of_queue(self) -> float:
        """What half of the queue takes, by the last batches."""
        per_text = self._batch_seconds * self.batches / max(1, self.texts)
        return max(1.0, math.ceil(per_text * len(self._waiting) / 2))

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            batch = await self._gather()
            began = time.monotonic()
            tokens = [text.tokens for text in batch]
            try:
                scores = await loop.run_in_executor(self._thread, self._score, tokens)
            except asyncio.CancelledError:
                for text in batch:
                    text.score.cancel()
                raise
            except Exception as error:
                logger.exception("a batch of %d texts failed", len(batch))
                for text in batch:
                    if not text.score.done():
                        text.score.set_exception(error)
                continue
            for text, score in zip(batch, scores, strict=True):
                if not text.score.done():
                    text.score.set_result(score)
            self.batches += 1
            self.texts += len(batch)
            self._batch_seconds += 0.2 * (time.monotonic() - began - self._batch_seconds)

    async def _gather(self) -> list[_Text]:
        """Wait for texts that fit into one batch."""
        batch: list[_Text] = []
        end: float | None = None
        left: float | None = None
        while True:
            if self._take(batch):
                return batch
            if batch:
                end = time.monotonic() + self._settings.window_seconds if end is None else end
                left = end - time.monotonic()
                if left <= 0:
                    return batch
            self._arrived.clear()
            try:
                async with asyncio.timeout(left):
                    await self._arrived.wait()
            except TimeoutError:
                return batch

    def _take(self, batch: list[_Text]) -> bool:
        """Move texts that wait into the batch while they fit; whether the next one does not."""
        while self._waiting:
            text = self._waiting[0]
            if text.score.done():  # given up
                self._waiting.popleft()
                continue
            if batch and not self._fits(batch, text):
                return True
            batch.append(self._waiting.popleft())
        return False

    def _fits(self, batch: list[_Text], text: _Text) -> bool:
        if not self._pads:
            return False  # a model without a padding token takes one text at a time
        longest = max(len(text.tokens), *(len(one.tokens) for one in batch))
        return longest * (len(batch) + 1) <= self._settings.batch_tokens
