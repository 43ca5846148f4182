"""Follows what vLLM's decode steps generate, and decides what to draft for the next one.

A request has a slot here as long as vLLM knows it, wherever its row lies and however often it is
preempted. Slots are kept in arrays, and a step looks only at tokens that are new since the last
one, so it costs some forty array operations for any number of rows of any length. Imports no vLLM.

A request's row in the cache opens when vLLM takes the request in and closes when vLLM forgets it.
A wrong draft costs time, never exactness.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.drafting.continuation import Continuations
from engine.drafting.planner import Planner
from engine.drafting.proposals import Proposer, offsets_of
from engine.drafting.source import NO_HANDLE, DraftSource
from engine.vllm.worker.batch import Entry
from rollout.trajectory import FloatArray, IntArray

NO_SLOT = -1
_NOT_A_TOKEN = -1

Index = NDArray[np.int64]


class RowBook:
    """The requests that draft, and what each has generated.

    Args:
        source: where drafts come from.
        planner: how much to draft.
    """

    def __init__(self, source: DraftSource, planner: Planner) -> None:
        self._source = source
        self._planner = planner
        self._slot_of: dict[str, int] = {}
        self._free: list[int] = []
        self._old = Continuations()
        self._proposer = Proposer(source, self._old, branching=False)
        self._handle: IntArray = np.empty(0, np.int32)
        self._limit = np.empty(0, np.int64)
        self._start = np.empty(0, np.int64)
        self._known = np.empty(0, np.int64)
        self._over = np.empty(0, np.bool_)
        self._stops: IntArray = np.empty((0, 0), np.int32)
        self._guess: FloatArray = np.empty((0, 0), np.float32)
        self._guessed = np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self._slot_of)

    def slot(self, request_id: str, entry: Entry) -> int:
        """The request's slot, a new one if it is new; NO_SLOT when it does not draft."""
        if not entry.extra.cache_key:
            return NO_SLOT
        slot = self._slot_of.get(request_id)
        if slot is None:
            if not self._free:
                self._grow()
            slot = self._slot_of[request_id] = self._free.pop()
            self._handle[slot] = self._source.open(entry.extra.cache_key, entry.context[-64:])
            self._limit[slot] = entry.limit
            self._start[slot] = self._known[slot] = len(entry.context)
            self._over[slot] = False
            self._guessed[slot] = 0
            self._widen("_stops", len(entry.stop_tokens), _NOT_A_TOKEN)
            self._stops[slot] = _NOT_A_TOKEN
            self._stops[slot, : len(entry.stop_tokens)] = entry.stop_tokens
            self._old.begin(slot, entry.extra.draft)
        return slot

    def forget(self, alive: Container[str]) -> None:
        """Close the rows of requests that are not `alive` any more."""
        for request_id in [r for r in self._slot_of if r not in alive]:
            slot = self._slot_of.pop(request_id)
            self._source.close(int(self._handle[slot]))
            self._old.end(slot)
            self._free.append(slot)

    def judge(self, slots: Index, fed: Index, accepted: Index) -> None:
        """Tell the planner which of the drafts that a step fed were accepted.

        Args:
            slots: `[n]`
            fed: `[n]` draft tokens of each row.
            accepted: `[n]` of those, how many were kept.
        """
        mine = np.flatnonzero((slots != NO_SLOT) & (fed > 0))
        slots, fed, accepted = slots[mine], fed[mine], accepted[mine]
        counts = np.minimum(fed, self._guessed[slots])
        place = np.arange(int(counts.max(initial=0)))
        inside = place < counts[:, None]
        kept = place < accepted[:, None]
        self._planner.judge(self._guess[slots][:, : len(place)][inside], kept[inside])

    def record(self, slots: Index, rows: Index, lengths: Index, table: IntArray) -> None:
        """Tell the cache what each row has generated.

        Args:
            slots: `[n]` slots that have new tokens.
            rows: `[n]` their rows of the table.
            lengths: `[n]` tokens of each row now.
            table: `[R, M]` tokens of each row.
        """
        limit = self._limit[slots]
        known = self._known[slots]
        grown = np.where(self._over[slots], 0, np.maximum(np.minimum(lengths, limit) - known, 0))
        row, place, tokens = _new_tokens(rows, known, grown, table)
        over = lengths >= limit
        if self._stops.shape[1]:
            stops = (tokens[:, None] == self._stops[slots][row]).any(axis=1)
            if stops.any():
                # Nothing after a stop token belongs to the response, as vLLM will see as well.
                first = np.flatnonzero(stops)[::-1]
                grown[row[first]] = place[first] + 1
                over[row[first]] = True
                tokens = tokens[place < grown[row]]
        if self._old:
            self._old.follow(slots, grown, table, rows, known + grown, self._start[slots])
        self._known[slots] = known + grown
        self._over[slots] |= over
        grew = np.flatnonzero(grown)
        if len(grew):
            self._source.extend(self._handle[slots[grew]], tokens, offsets_of(grown[grew]))

    def draft(self, slots: Index, lengths: Index, *, other_tokens: int) -> dict[int, list[int]]:
        """What to propose for the next step.

        Args:
            slots: `[n]` of the rows that decode in it; NO_SLOT for those that do not draft.
            lengths: `[n]` tokens of each row now.
            other_tokens: tokens of the next step that belong to none of them.

        Returns:
            Drafts by index into `slots`; rows without one are missing.
        """
        self._guessed[slots[slots != NO_SLOT]] = 0
        lasting = np.flatnonzero((slots == NO_SLOT) | ~self._over[slots])
        slots, lengths = slots[lasting], lengths[lasting]
        left = np.where(slots == NO_SLOT, 1, self._limit[slots] - lengths).astype(np.int32)
        budgets, min_probability = self._planner.ask(left, other_tokens=other_tokens)
        if not budgets.any():
            return {}
        handles = np.where(slots == NO_SLOT, NO_HANDLE, self._handle[slots])
        drafts = self._proposer.propose(
            slots, handles, budgets, budgets, min_probability=min_probability
        )
        if not len(drafts.tokens):
            return {}
        keep = self._planner.choose(
            drafts.path_probabilities, drafts.offsets, rows=len(slots), other_tokens=other_tokens
        )
        chosen = np.flatnonzero(keep)
        begins = drafts.offsets[chosen]
        self._remember(slots[chosen], begins, keep[chosen], drafts.path_probabilities)
        tokens = drafts.tokens.tolist()
        return {
            int(lasting[i]): tokens[begin : begin + keep[i]]
            for i, begin in zip(chosen.tolist(), begins.tolist(), strict=True)
        }

    def _remember(
        self, slots: Index, begins: IntArray, keep: IntArray, guesses: FloatArray
    ) -> None:
        """What was thought of the drafts, for `judge`."""
        width = int(keep.max(initial=0))
        self._widen("_guess", width, 0.0)
        place = np.minimum(begins[:, None] + np.arange(width), len(guesses) - 1)
        self._guess[slots, :width] = guesses[place]
        self._guessed[slots] = keep

    def _grow(self) -> None:
        have = len(self._handle)
        more = max(have, 16)
        for name in ("_handle", "_limit", "_start", "_known", "_over", "_guessed"):
            array = getattr(self, name)
            setattr(self, name, np.concatenate([array, np.zeros(more, array.dtype)]))
        for name in ("_stops", "_guess"):
            array = getattr(self, name)
            wide = np.full((more, array.shape[1]), _NOT_A_TOKEN, array.dtype)
            setattr(self, name, np.concatenate([array, wide]))
        self._free = list(range(have + more - 1, have - 1, -1))

    def _widen(self, name: str, width: int, fill: Any) -> None:
        array = getattr(self, name)
        lacking = width - array.shape[1]
        if lacking > 0:
            pad = np.full((len(array), lacking), fill, array.dtype)
            setattr(self, name, np.concatenate([array, pad], axis=1))


def _new_tokens(
    rows: Index, known: Index, grown: Index, table: IntArray
) -> tuple[Index, Index, IntArray]:
    """New tokens of all rows, flat, with the index of each one's row and its place among them."""
    if (grown == 1).all():
        index = np.arange(len(rows))
        return index, np.zeros(len(rows), np.int64), table[rows, known]
    row = np.repeat(np.arange(len(rows)), grown)
    place = np.arange(len(row)) - np.repeat(np.cumsum(grown) - grown, grown)
    return row, place, table[rows[row], known[row] + place]
