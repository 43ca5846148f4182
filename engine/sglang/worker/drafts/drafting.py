"""Drafts for SGLang's decode steps: the texts of its running requests, and trees from the cache.

SGLang's batch has no table of tokens, so one is kept here. A row of it is a request's place in
SGLang's pool of requests (`req_pool_indices`), which a request keeps while it has KV. After a
retraction it comes back in another row. Generated tokens are added to the cache when drafts are
wanted, at the request's end, and before new weights (`asyncrl.engine.remote.worker.drafting`).

Imports no SGLang. Wrong drafts cost time, never exactness.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from asyncrl.cache.tree.rollout_tree import Drafts, RolloutCache
from asyncrl.engine.drafting.planner import Planner
from asyncrl.engine.drafting.trees import TokenTrees, no_trees, plant
from asyncrl.engine.remote.worker.drafting import NO_SLOT, RowBook, StepTimer
from asyncrl.engine.remote.worker.entries import Entry
from asyncrl.engine.sampling.verification import offsets_of
from asyncrl.rollout.trajectory import IntArray

Index = NDArray[np.int64]


class Drafter:
    """Follows what requests generate, and drafts trees for them.

    The table has a row of `width` tokens, drafts included, for each place in SGLang's pool of
    requests. Drafts of tokens outside the vocabulary are dropped.
    """

    def __init__(
        self,
        source: RolloutCache,
        planner: Planner,
        entry_of: Callable[[str], Entry],
        *,
        rows: int,
        width: int,
        vocab_size: int,
    ) -> None:
        self._source = source
        self._planner = planner
        self.timer = StepTimer(planner)
        self._entry_of = entry_of
        self._vocab_size = vocab_size
        self._book = RowBook(source, planner, branching=True)
        self._table: IntArray = np.zeros((rows, width), np.int32)
        self._lengths = np.zeros(rows, np.int64)
        self._owner = [""] * rows
        self._row_of: dict[str, int] = {}
        self._ended: set[str] = set()
        self._ids: list[str] = []
        self._slots: Index = np.empty(0, np.int64)

    def take_in(self, request_id: str, row: int, tokens: Callable[[], Sequence[int]]) -> None:
        """Give a request a row of the table, if it does not have this one."""
        if self._owner[row] == request_id:
            return
        before = self._owner[row]
        if self._row_of.get(before) == row:
            self._record([before])  # it was retracted, and has no other row yet
        left = self._row_of.get(request_id)
        if left is not None and self._owner[left] == request_id:
            self._owner[left] = ""  # what it holds will not follow the request
        self._book.slots([request_id], self._entry_of)
        known = np.array(tokens(), np.int32)
        self._owner[row] = request_id
        self._row_of[request_id] = row
        self._table[row, : len(known)] = known
        self._lengths[row] = len(known)

    def end(self, request_ids: Iterable[str]) -> None:
        """Forget requests at the next `settle`."""
        self._ended.update(request_ids)

    def settle(self) -> None:
        """Cache what ended requests have generated, before their rows are given to others."""
        ended = [name for name in self._ended if name in self._row_of]
        self._ended.clear()
        if ended:
            self._record(ended)
            for name in ended:
                row = self._row_of.pop(name)
                if self._owner[row] == name:
                    self._owner[row] = ""
            self._book.forget(self._row_of)
            self._ids = []

    def advance(self, policy_version: int) -> None:
        """Label later tokens with this policy version."""
        self.settle()
        self._record(list(self._row_of))
        self._source.advance(policy_version)

    def last_tokens(self, rows: Index, lengths: Index) -> IntArray:
        """Return `[n]` last tokens of `rows` `[n]`, which have `lengths` `[n]` tokens."""
        last: IntArray = self._table[rows, lengths - 1]
        return last

    def draft(self, request_ids: list[str], rows: Index, lengths: Index) -> TokenTrees:
        """Draft for n requests, whose `rows` of the table have `lengths` `[n]` tokens."""
        n = len(request_ids)
        if request_ids != self._ids:
            self._slots = self._book.slots(request_ids, self._entry_of)
            self._ids = list(request_ids)
        if self._planner.declines(n) or not (self._slots != NO_SLOT).any():
            return no_trees(n)
        choice = self._book.choose(self._slots, rows, lengths, self._table, other_tokens=0)
        if choice is None or not len(choice.drafts.tokens):
            return no_trees(n)
        sizes, keep = np.zeros(n, np.int64), np.zeros(n, np.int32)
        sizes[choice.rows] = np.diff(choice.drafts.offsets)
        keep[choice.rows] = choice.keep
        found = choice.drafts
        drafts = Drafts(found.tokens, found.parents, offsets_of(sizes), found.path_probabilities)
        # A row does not get more nodes than it may generate tokens, so no path is too deep.
        return plant(drafts, keep, keep, self._vocab_size)

    def judge(self, trees: TokenTrees, accepted: NDArray[np.bool_]) -> None:
        """Report to the planner which of the N nodes of a step were accepted: `[N]` flags."""
        self._planner.judge(trees.path_probabilities, accepted)

    def append(self, rows: Index, lengths: Index, tokens: IntArray, counts: Index) -> None:
        """Append `counts` `[n]` new tokens, row after row, to rows of `lengths` `[n]` tokens."""
        total = int(counts.sum())
        place = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
        self._table[np.repeat(rows, counts), np.repeat(lengths, counts) + place] = tokens
        self._lengths[rows] = lengths + counts

    def _record(self, request_ids: list[str]) -> None:
        rows = np.array([self._row_of[name] for name in request_ids], np.int64)
        mine = [i for i, name in enumerate(request_ids) if self._owner[rows[i]] == name]
        if mine:
            rows = rows[mine]
            slots = self._book.slots([request_ids[i] for i in mine], self._entry_of)
            self._book.record(slots, rows, self._lengths[rows], self._table)
