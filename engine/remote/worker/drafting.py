"""Parts of every engine's drafter: what to draft for the next step, the planner, times of steps.

A request has a slot here as long as the engine knows it, wherever its row lies and however often it
is preempted; its row in the cache is open for the same time. Generated tokens stay in the engine's
table until drafts are wanted or the row ends, so a step without drafts costs some twenty array
operations for any number of rows.
"""

import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.cache.config import CacheConfig
from asyncrl.cache.tree.rollout_tree import Drafts, RolloutCache
from asyncrl.engine.drafting.calibration import Floats
from asyncrl.engine.drafting.planner import DraftPlanner, Planner
from asyncrl.engine.drafting.proposals import NO_HANDLE, Continuations, Proposer
from asyncrl.engine.drafting.proposals import warm_up as warm_up_proposals
from asyncrl.engine.drafting.step_times import warm_up as warm_up_step_times
from asyncrl.engine.drafting.worth import worth_of
from asyncrl.engine.remote.extras import DrafterSettings
from asyncrl.engine.remote.worker.entries import Entry
from asyncrl.engine.sampling.verification import offsets_of
from asyncrl.rollout.jit import kernels_of
from asyncrl.rollout.trajectory import FloatArray, IntArray

kernel = kernels_of("engine/remote/worker")

NO_SLOT = -1
_NOT_A_TOKEN = -1
_ARRAYS = (
    *("_handle", "_limit", "_start", "_known", "_over", "_guessed", "_stops", "_guess"),
    *("_priority", "_before"),
)

Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Choice:
    """Drafts of m of n rows."""

    rows: NDArray[np.int64]
    """`[m]` indices of the rows among the n."""
    drafts: Drafts
    keep: IntArray
    """`[m]` number of nodes of each to feed: its first ones."""


class RowBook:
    """The requests that draft and their tokens; if `branching`, the source may propose trees."""

    def __init__(self, source: RolloutCache, planner: Planner, *, branching: bool = False) -> None:
        self._source = source
        self._planner = planner
        self._slot_of: dict[str, int] = {}
        self._free: list[int] = []
        self._old = Continuations()
        self._proposer = Proposer(source, self._old, branching=branching)
        self._handle: IntArray = np.empty(0, np.int32)
        self._limit = np.empty(0, np.int64)
        self._start = np.empty(0, np.int64)
        self._known = np.empty(0, np.int64)
        self._priority = np.empty(0, np.int64)
        self._before = np.empty(0, np.int64)
        """Response tokens with which each slot's request began."""
        self._over = np.empty(0, np.bool_)
        self._stops: IntArray = np.empty((0, 0), np.int32)
        self._guess: FloatArray = np.empty((0, 0), np.float32)
        self._guessed = np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self._handle) - len(self._free)

    def slots(self, request_ids: Sequence[str], entry_of: Callable[[str], Entry]) -> Index:
        """Return `[n]` slots of requests, new ones for new requests; NO_SLOT: does not draft."""
        slot_of = self._slot_of
        for request_id in request_ids:
            if request_id not in slot_of:
                slot_of[request_id] = self._begin(entry_of(request_id))
        return np.array([slot_of[request_id] for request_id in request_ids], np.int64)

    def _begin(self, entry: Entry) -> int:
        if not entry.extra.cache_key:
            return NO_SLOT
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self._handle[slot] = self._source.open(entry.extra.cache_key, entry.context[-64:])
        self._limit[slot] = entry.limit
        self._start[slot] = self._known[slot] = len(entry.context)
        self._priority[slot], self._before[slot] = entry.extra.priority, entry.extra.generated
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
            if slot == NO_SLOT:
                continue
            self._source.close(int(self._handle[slot]))
            self._old.end(slot)
            self._free.append(slot)

    def judge(self, slots: Index, fed: Index, accepted: Index) -> None:
        """Report to the planner how many of the `fed` drafts of these rows were `accepted`."""
        mine = np.flatnonzero((slots != NO_SLOT) & (fed > 0))
        slots, fed, accepted = slots[mine], fed[mine], accepted[mine]
        counts = np.minimum(fed, self._guessed[slots])
        place = np.arange(int(counts.max(initial=0)))
        inside = place < counts[:, None]
        kept = place < accepted[:, None]
        self._planner.judge(self._guess[slots][:, : len(place)][inside], kept[inside])

    def record(self, slots: Index, rows: Index, lengths: Index, table: IntArray) -> None:
        """Add to the cache what rows have generated since they were last recorded.

        `slots` are `[n]`, NO_SLOT for rows to leave out; `rows` `[n]` are their rows of the `table`
        `[R, M]`, with `lengths` `[n]` tokens each.
        """
        mine = np.flatnonzero(slots != NO_SLOT)
        slots, rows, lengths = slots[mine], rows[mine], lengths[mine]
        known = self._known[slots]
        tokens = np.empty(int(np.maximum(lengths - known, 0).sum()), np.int32)
        grown = np.zeros(len(slots), np.int64)
        total = _new_tokens(
            slots, rows, lengths, table, self._limit, self._stops, self._known, self._over, grown,
            tokens,
        )  # fmt: skip
        if self._old:
            self._old.follow(slots, grown, table, rows, known + grown, self._start[slots])
        grew = np.flatnonzero(grown)
        if len(grew):
            handles = self._handle[slots[grew]]
            self._source.extend(handles, tokens[:total], offsets_of(grown[grew]))

    def draft(
        self, slots: Index, rows: Index, lengths: Index, table: IntArray, *, other_tokens: int
    ) -> dict[int, list[int]]:
        """Propose chains for the next step, by index into `slots`. Arguments as of `choose`."""
        choice = self.choose(slots, rows, lengths, table, other_tokens=other_tokens)
        if choice is None:
            return {}
        drafts, keep = choice.drafts, choice.keep
        chosen = np.flatnonzero(keep)
        begins = drafts.offsets[chosen]
        slots = slots[choice.rows[chosen]]
        self._remember(slots, begins, keep[chosen], drafts.path_probabilities)
        tokens = drafts.tokens.tolist()
        return {
            int(choice.rows[i]): tokens[begin : begin + keep[i]]
            for i, begin in zip(chosen.tolist(), begins.tolist(), strict=True)
        }

    def choose(
        self, slots: Index, rows: Index, lengths: Index, table: IntArray, *, other_tokens: int
    ) -> Choice | None:
        """Ask the source for drafts of the next step, and the planner how many to feed.

        The rows are recorded only if the planner wants drafts: the cache takes tokens of several
        steps more cheaply together. Arguments are as of `record`; `other_tokens` of the next step
        belong to none of these rows. Returns None if the planner wants no drafts.
        """
        mine = slots != NO_SLOT
        self._guessed[slots[mine]] = 0
        left = np.where(mine, self._limit[slots] - lengths, 1).astype(np.int32)
        lasting = np.flatnonzero(~mine | (~self._over[slots] & (left > 0)))
        budgets, min_probability = self._planner.ask(left[lasting], other_tokens=other_tokens)
        if not budgets.any():
            return None
        self.record(slots, rows, lengths, table)
        running = ~(self._over[slots[lasting]] & mine[lasting])
        lasting, budgets = lasting[running], budgets[running]
        slots = slots[lasting]
        handles = np.where(slots == NO_SLOT, NO_HANDLE, self._handle[slots])
        drafts = self._proposer.propose(
            slots,
            handles,
            budgets,
            budgets,
            stops=self._stops[slots] if len(self._stops) else self._stops[:0],
            min_probability=min_probability,
        )
        # Also if nothing was found: the planner learns that asking does not pay.
        keep = self._planner.choose(
            drafts.path_probabilities,
            drafts.offsets,
            rows=len(slots),
            other_tokens=other_tokens,
            worth=self._worth(slots, lengths[lasting]),
        )
        return Choice(lasting, drafts, keep)

    def _worth(self, slots: Index, lengths: Index) -> Floats | None:
        """Return what a token of each row is worth; rows that do not draft are not due."""
        priority = np.where(slots == NO_SLOT, 1, self._priority[slots])
        generated = self._before[slots] + lengths - self._start[slots]
        return worth_of(priority, generated, self._old.left(slots))

    def _remember(
        self, slots: Index, begins: IntArray, keep: IntArray, guesses: FloatArray
    ) -> None:
        """Keep the probabilities of the drafts for `judge`."""
        width = int(keep.max(initial=0))
        self._widen("_guess", width, 0.0)
        place = np.minimum(begins[:, None] + np.arange(width), len(guesses) - 1)
        self._guess[slots, :width] = guesses[place]
        self._guessed[slots] = keep

    def _grow(self) -> None:
        have = len(self._handle)
        more = max(have, 16)
        for name in _ARRAYS:
            array = getattr(self, name)
            unset = np.full((more, *array.shape[1:]), _NOT_A_TOKEN, array.dtype)
            setattr(self, name, np.concatenate([array, unset]))
        self._free = list(range(have + more - 1, have - 1, -1))

    def _widen(self, name: str, width: int, fill: Any) -> None:
        array = getattr(self, name)
        lacking = width - array.shape[1]
        if lacking > 0:
            pad = np.full((len(array), lacking), fill, array.dtype)
            setattr(self, name, np.concatenate([array, pad], axis=1))


@kernel
def _new_tokens(
    slots: Index,
    rows: Index,
    lengths: Index,
    table: IntArray,
    limit: Index,
    stops: IntArray,
    known: Index,
    over: NDArray[np.bool_],
    grown: Index,
    tokens: IntArray,
) -> int:
    """Collect the new tokens of rows up to their end; update `known` and `over` of their slots.

    `slots`, `rows`, `lengths` and `grown` (set to the new tokens of each row) are `[n]`, `table` is
    `[R, M]`; `limit`, `known`, `over` and `stops` `[S, W]` are by slot. Returns the number of
    `tokens`.
    """
    total = 0
    for i in range(len(slots)):
        slot = slots[i]
        at = known[slot]
        while not over[slot] and at < min(lengths[i], limit[slot]):
            token = table[rows[i], at]
            tokens[total] = token
            total += 1
            at += 1
            over[slot] = (stops[slot] == token).any() or at >= limit[slot]
        grown[i] = at - known[slot]
        known[slot] = at
    return total


class FixedBudget:
    """A `Planner` that fills every step up to a fixed number of tokens; learns nothing."""

    def __init__(self, *, max_step_tokens: int, max_draft_tokens: int) -> None:
        self._max_step_tokens = max_step_tokens
        self._max_draft_tokens = max_draft_tokens

    def declines(self, rows: int) -> bool:
        """Return True if a step of this many rows has no room for a draft."""
        return min(self._max_step_tokens - rows, self._max_draft_tokens) <= 0

    def ask(self, left: IntArray, *, other_tokens: int = 0) -> tuple[IntArray, float]:
        """Give each row an equal share of the step's tokens, but never draft its last token."""
        n = len(left)
        spare = self._max_step_tokens - other_tokens - n
        if n == 0 or spare <= 0 or self._max_draft_tokens <= 0:
            return np.zeros(n, np.int32), 0.0
        share, extra = divmod(spare, n)
        budgets = np.full(n, share, np.int32)
        budgets[:extra] += 1
        longest = np.minimum(left - 1, self._max_draft_tokens).astype(np.int32)
        return np.minimum(budgets, longest), 0.0

    def choose(
        self,
        path_probabilities: FloatArray,  # noqa: ARG002
        offsets: IntArray,
        *,
        rows: int,  # noqa: ARG002
        other_tokens: int = 0,  # noqa: ARG002
        worth: Floats | None = None,  # noqa: ARG002
    ) -> IntArray:
        """Feed all that was proposed."""
        return np.diff(offsets).astype(np.int32)

    def observe(self, *, tokens: int, rows: int, context: int, seconds: float) -> None:
        """Ignore the cost of a step."""

    def judge(
        self, path_probabilities: NDArray[np.floating[Any]], accepted: NDArray[np.bool_]
    ) -> None:
        """Ignore acceptance."""


_GAP = 0.002
"""Seconds between two steps that a scheduler may need, however short the step."""


@dataclass(slots=True)
class _Step:
    began: float
    tokens: int
    rows: int
    context: int = 0
    ended: float = 0.0
    """0: no tokens were drawn in it."""


@dataclass
class StepTimer:
    """Reports to a planner how long steps took, with all that the engine does until the next one.

    A step ends when the next one begins, or at a break (no work, a pause, prompts to take in).
    Steps that mostly took in prompts are not reported. If `guess_breaks`, `rest` is not called
    before breaks, and a step that is followed by a gap longer than itself plus 2 ms is left out.
    """

    planner: Planner
    clock: Callable[[], float] = time.perf_counter
    guess_breaks: bool = False
    _step: _Step | None = None

    def begin(self, now: float) -> None:
        """Begin a step, which ends the previous one."""
        last = self._step
        if last and self.guess_breaks and now - last.ended > last.ended - last.began + _GAP:
            self._step = None
        self.rest(now)

    def rest(self, now: float) -> None:
        """End the previous step; what follows is not timed."""
        last, self._step = self._step, None
        if last is not None and last.ended:
            self.planner.observe(
                tokens=last.tokens, rows=last.rows, context=last.context, seconds=now - last.began
            )

    def note(self, began: float, *, tokens: int, rows: int, drafted: int) -> None:
        """Time the step that has begun, unless it mostly takes in prompts.

        `began` was given to `begin`; `tokens` include prompts and the `drafted` ones.
        """
        if rows and tokens <= 2 * (rows + drafted):
            self._step = _Step(began, tokens, rows)

    @property
    def noted(self) -> bool:
        """True if the step that has begun is timed."""
        return self._step is not None

    def drawn(self, context: int) -> None:
        """Note that the step's tokens are drawn, over `context` keys."""
        if self._step is not None:
            self._step.context = context
            self._step.ended = self.clock()


def planner_of(settings: DrafterSettings, max_draft_tokens: int, vocab_size: int) -> Planner:
    """Return the planner that the settings ask for, bounded by the memory for logits."""
    fixed = settings.fixed_step_tokens
    if fixed is not None:
        return FixedBudget(max_step_tokens=fixed, max_draft_tokens=max_draft_tokens)
    affordable = settings.logits_bytes // (4 * vocab_size)
    return DraftPlanner(
        max_step_tokens=min(settings.max_step_tokens, affordable), max_draft_tokens=max_draft_tokens
    )


def warm_up() -> None:
    """Compile what drafting calls, or load the compiled code."""
    cache = RolloutCache(CacheConfig(max_bytes=1 << 20))
    context = np.arange(8, dtype=np.int32)
    cache.insert("warm-up", context, context)
    row = cache.open("warm-up", context)
    cache.draft(np.array([row], np.int32), np.array([2], np.int32))
    cache.close(row)
    index, table, flag = np.zeros(1, np.int64), np.zeros((1, 1), np.int32), np.zeros(1, np.bool_)
    _new_tokens(index, index, index, table, index, table, index, flag, index, table[0])
    warm_up_proposals()
    warm_up_step_times()
