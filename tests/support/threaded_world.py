"""The ranks of a trainer as threads of one process."""

from __future__ import annotations

import threading

from asyncrl.trainer.base.errors import RankLost
from asyncrl.trainer.ranks import World

SECONDS = 60.0


class ThreadedWorld(World):
    """Exchanges bytes with the other ranks; `of` makes all of them."""

    def __init__(
        self, rank: int, size: int, barrier: threading.Barrier, given: list[bytes]
    ) -> None:
        super().__init__(rank, size)
        self._barrier = barrier
        self._given = given
        self.said: list[str] = []
        """What was exchanged, in order."""

    @classmethod
    def of(cls, size: int) -> list[ThreadedWorld]:
        barrier, given = threading.Barrier(size), [b""] * size
        return [cls(rank, size, barrier, given) for rank in range(size)]

    def gather(self, own: bytes, what: str) -> list[bytes]:
        self.said.append(what)
        self._given[self.rank] = own
        try:
            self._barrier.wait(SECONDS)
            found = list(self._given)
            self._barrier.wait(SECONDS)
        except threading.BrokenBarrierError as error:
            raise RankLost(f"rank {self.rank} waited for {what}") from error
        return found
