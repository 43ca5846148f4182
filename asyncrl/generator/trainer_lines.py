"""A generator's lines to the ranks of the trainer. Each group goes to one of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from asyncrl.wire import Line
from asyncrl.wire.messages import data


class TrainerLines:
    """One line to each rank.

    Args:
        lines: by rank, at least one.
    """

    def __init__(self, lines: Sequence[Line[data.ToGeneratorData]]) -> None:
        self._lines = list(lines)
        self._receiving: dict[int, asyncio.Task[data.ToGeneratorData]] = {}

    def to(self, rank: int) -> Line[data.ToGeneratorData]:
        """The line to a rank."""
        return self._lines[rank]

    async def receive(self) -> data.ToGeneratorData:
        """The next message of any rank. A call may be cancelled; no message is lost by that."""
        if len(self._lines) == 1:
            return await self._lines[0].receive()
        for rank, line in enumerate(self._lines):
            if rank not in self._receiving:
                self._receiving[rank] = asyncio.create_task(line.receive())
        await asyncio.wait(self._receiving.values(), return_when=asyncio.FIRST_COMPLETED)
        rank = next(rank for rank, task in self._receiving.items() if task.done())
        return self._receiving.pop(rank).result()
