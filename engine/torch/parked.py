"""KV of responses that wait for their environment, in slots that no row uses.

A request that ends may be a turn of a longer response (`GenerateRequest.session`). Its row is freed
like any other; its KV stays in the slot that becomes free, under the name of the session. The next
turn takes it along, so only what is new is fed. Rows come first: when they need the slot, the KV
moves to another free one, and if there is none, what has waited longest is dropped. That turn is
fed from its beginning then. Results are the same up to rounding. What a response leaves that has no
further turn is dropped when it ends (`Engine.end_session`): it would take the place of others.

Only KV of the current weights is kept: a turn that begins after an installation is a request of the
new weights as any other. Requests that run across an installation keep theirs, as the protocol
says; what they leave is not parked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from asyncrl.engine.errors import EngineError
from asyncrl.engine.protocol import GenerateRequest
from asyncrl.engine.torch.rows import Rows
from asyncrl.engine.torch.slots import SlotCache
from asyncrl.engine.torch.waiting import context_of
from asyncrl.rollout.trajectory import IntArray


@dataclass(frozen=True, slots=True)
class Parked:
    """The KV of one session."""

    slot: int
    tokens: IntArray
    """`[L]` whose KV is in the slot's first places."""


class ParkingLot:
    """The slots `[n, S)` that hold KV of sessions, for n running rows.

    Args:
        rows: of the core.
        cache: whose slots.
    """

    def __init__(self, rows: Rows, cache: SlotCache) -> None:
        self._rows = rows
        self._cache = cache
        self._held: dict[str, Parked] = {}
        """By session, who waits longest first."""

    def __len__(self) -> int:
        return len(self._held)

    def clear(self) -> None:
        """Forget all of it: the weights have changed."""
        self._held.clear()

    def drop(self, session: str) -> None:
        """Forget what is kept of a session: its turns are over. Idempotent."""
        self._held.pop(session, None)

    def known(self, request: GenerateRequest) -> int:
        """Tokens of a request's context whose KV is here."""
        held = self._held.get(request.session) if request.session else None
        if held is None or request.kept is not None:
            return 0
        context, size = context_of(request), len(held.tokens)
        fits = size < len(context) and np.array_equal(context[:size], held.tokens)
        return size if fits else 0

    def claim(self, requests: Sequence[GenerateRequest]) -> dict[str, Parked]:
        """By request id, what requests continue; it is theirs from now on.

        What another text of a session has left is dropped: its environment has gone back.
        """
        out: dict[str, Parked] = {}
        for request in requests:
            known = self.known(request)
            held = self._held.pop(request.session, None) if request.session else None
            if held is not None and known:
                out[request.request_id] = held
        return out

    def park(self, session: str, slot: int, tokens: IntArray) -> None:
        """Keep what lies in a slot that has become free."""
        self._held.pop(session, None)
        self._held[session] = Parked(slot, tokens)

    def make_room(self, new: range, claimed: dict[int, Parked]) -> None:
        """Free the slots that new rows take, and bring what they claimed there.

        Args:
            new: the rows.
            claimed: by row, what was parked for it.
        """
        sources = [one.slot for one in claimed.values()]
        lengths = [len(one.tokens) for one in claimed.values()]
        targets = list(claimed)
        while len(self._held) > self._cache.slots - new.stop:
            del self._held[next(iter(self._held))]
        taken = {one.slot for one in self._held.values()}
        free = (slot for slot in range(new.stop, self._cache.slots) if slot not in taken)
        for session, one in self._held.items():
            if one.slot in new:
                slot = next(free)
                sources.append(one.slot)
                targets.append(slot)
                lengths.append(len(one.tokens))
                self._held[session] = Parked(slot, one.tokens)
        self._cache.move_rows(sources, targets, lengths)

    def check(self) -> None:
        """Raise EngineError unless each session has a slot of its own that no row uses."""
        slots = sorted(one.slot for one in self._held.values())
        inside = all(self._rows.n <= slot < self._cache.slots for slot in slots)
        if not inside or len(set(slots)) != len(slots):
            raise EngineError(f"parked KV in slots {slots}, with {self._rows.n} rows running")
