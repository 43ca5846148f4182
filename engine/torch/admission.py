"""Gives slots to requests and takes them back.

The order of rows in a step: rows that decode; new ones that copy the KV of a running sibling's
prompt and decode from its last token; new ones whose contexts are taken in (leaders; first those
that continue a session whose KV was parked); the leaders' siblings (followers).

A request that ends may be a turn of a longer response (`GenerateRequest.session`). Its KV stays
parked in the slot that becomes free until the next turn takes it over or `Engine.end_session` drops
it. Rows come first: when they need the slot, the KV moves to another free one; if there is none,
the KV that has waited longest is dropped, and that turn is fed from its beginning. Results are the
same up to rounding. Only KV of the current weights is parked.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import numpy as np

from asyncrl.engine.errors import EngineError
from asyncrl.engine.protocol import GenerateRequest
from asyncrl.engine.requests import SeedStream
from asyncrl.engine.torch.drafting import Drafter
from asyncrl.engine.torch.reports import Unreported
from asyncrl.engine.torch.rows import NewRows, Rows, context_of, fed_context, logits_of
from asyncrl.engine.torch.slots import SlotCache
from asyncrl.rollout.trajectory import IntArray


@dataclass(frozen=True, slots=True)
class Parked:
    """The KV of one session."""

    slot: int
    tokens: IntArray
    """`[L]` tokens whose KV is in the slot's first places."""


class RetainedSlots:
    """The slots `[n, S)` that hold KV of sessions, for n running rows."""

    def __init__(self, rows: Rows, cache: SlotCache) -> None:
        self._rows = rows
        self._cache = cache
        self._held: dict[str, Parked] = {}
        """Keys are sessions, the longest waiting first."""

    def clear(self) -> None:
        """Forget everything, as the weights have changed."""
        self._held.clear()

    def drop(self, session: str) -> None:
        """Forget the KV of a session whose turns are over. Idempotent."""
        self._held.pop(session, None)

    def known(self, request: GenerateRequest) -> int:
        """Return the number of a request's context tokens whose KV is parked."""
        held = self._held.get(request.session) if request.session else None
        if held is None or request.kept is not None:
            return 0
        context, size = context_of(request), len(held.tokens)
        fits = size < len(context) and np.array_equal(context[:size], held.tokens)
        return size if fits else 0

    def claim(self, requests: Sequence[GenerateRequest]) -> dict[str, Parked]:
        """Hand over the KV that requests continue, by request id; drop KV of another text."""
        out: dict[str, Parked] = {}
        for request in requests:
            known = self.known(request)
            held = self._held.pop(request.session, None) if request.session else None
            if held is not None and known:
                out[request.request_id] = held
        return out

    def park(self, session: str, slot: int, tokens: IntArray) -> None:
        """Keep the KV in a slot that has become free."""
        self._held.pop(session, None)
        self._held[session] = Parked(slot, tokens)

    def make_room(self, new: range, claimed: dict[int, Parked]) -> None:
        """Free the slots that new rows take, and move the KV that they claimed there."""
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
        """Raise EngineError unless each session has a separate slot that no row uses."""
        slots = sorted(one.slot for one in self._held.values())
        inside = all(self._rows.n <= slot < self._cache.slots for slot in slots)
        if not inside or len(set(slots)) != len(slots):
            raise EngineError(f"parked KV needs separate slots from {self._rows.n} on, not {slots}")


class Admission:
    """Moves requests into slots and out of them. Siblings of a prompt share its prefill."""

    def __init__(
        self,
        rows: Rows,
        cache: SlotCache,
        drafter: Drafter,
        unreported: Unreported,
        seeds: SeedStream,
    ) -> None:
        self._rows, self._cache, self._seeds = rows, cache, seeds
        self._drafter, self._unreported = drafter, unreported
        self.parked = RetainedSlots(rows, cache)

    def admit(self, requests: Sequence[GenerateRequest], installation: int) -> NewRows:
        """Give each request a row. There must be enough free slots."""
        if not requests:
            return NewRows.none(self._rows.n)
        claimed = self.parked.claim(requests)
        fresh: list[list[GenerateRequest]] = [[r] for r in requests if r.kept is not None]
        groups: dict[bytes, list[GenerateRequest]] = {}
        for request in requests:
            if request.kept is None and request.request_id not in claimed:
                groups.setdefault(context_of(request).tobytes(), []).append(request)
        shared: list[tuple[list[GenerateRequest], int]] = []
        for group in groups.values():
            sibling = self._sibling_row(context_of(group[0]), installation)
            if sibling is None:
                fresh.append(group)
            else:
                shared.append((group, sibling))
        decoding = self._rows.n + sum(len(group) for group, _ in shared)
        resumed = [one for one in requests if one.request_id in claimed]
        places = {decoding + i: claimed[one.request_id] for i, one in enumerate(resumed)}
        self.parked.make_room(range(self._rows.n, self._rows.n + len(requests)), places)
        for group, sibling in shared:
            given = self._take(group, installation)
            length = len(context_of(group[0])) - 1
            self._cache.copy_row(sibling, given, length)
            self._rows.kv_length[given.start : given.stop] = length
        fresh.sort(key=lambda group: len(fed_context(group[0])))
        fresh = [[one] for one in resumed] + fresh
        leaders = self._take([group[0] for group in fresh], installation)
        siblings = [(one, leader) for leader, group in enumerate(fresh) for one in group[1:]]
        rows = self._take([request for request, _ in siblings], installation)
        followers = [(row, leader) for row, (_, leader) in zip(rows, siblings, strict=True)]
        starts = np.zeros(len(fresh), np.int32)
        starts[: len(resumed)] = [len(one.tokens) for one in places.values()]
        lengths = np.array([len(fed_context(group[0])) for group in fresh], np.int32) - starts
        wanted = np.array([logits_of(group[0]) for group in fresh], np.int32)
        return NewRows(decoding, leaders, followers, lengths, starts, len(resumed), wanted)

    def share_prefill(self, new: NewRows) -> None:
        """Copy the KV of leaders' contexts to their followers."""
        for leader, shared in groupby(new.followers, key=itemgetter(1)):
            rows = [row for row, _ in shared]  # adjacent ones
            source = new.leaders[leader]
            length = int(self._rows.total[source])
            self._cache.copy_row(source, range(rows[0], rows[-1] + 1), length)

    def release(self, row: int, installation: int) -> None:
        """Free a row's slot; the last row moves into its place.

        The KV of a session moves into the last row's, unless it began under other weights.
        """
        self._drafter.end(row)
        rows = self._rows
        session, length = rows.requests[row].session, int(rows.kv_length[row])
        parks = bool(session and length) and rows.kv_installation[row] == installation
        if parks:
            self.parked.park(session, rows.n - 1, rows.tokens[row, :length].copy())
        moved = rows.release(row)
        if moved is not None:
            sources, lengths = [moved], [int(rows.kv_length[row])]
            if parks:
                sources, lengths = [moved, row], [*lengths, length]
            self._cache.move_rows(sources, [row, moved][: len(sources)], lengths)
            self._drafter.move(moved, row)
            self._unreported.move(moved, row)

    def _sibling_row(self, context: IntArray, installation: int) -> int | None:
        """Return a running row that begins with this context and has KV of the current weights."""
        rows, n = self._rows, self._rows.n
        if not n or len(context) < 2:
            return None
        fits = (rows.kv_installation[:n] == installation) & (rows.total[:n] >= len(context))
        fits &= rows.kv_length[:n] >= len(context) - 1
        fits &= (rows.tokens[:n, : len(context)] == context).all(axis=1)
        return int(fits.argmax()) if fits.any() else None

    def _take(self, requests: Sequence[GenerateRequest], installation: int) -> range:
        seeds = [self._seeds.seed_of(request.sampling) for request in requests]
        given = self._rows.take(requests, seeds=seeds, installation=installation)
        for row in given:
            self._drafter.begin(row)
            self._unreported.begin(row)
        return given
