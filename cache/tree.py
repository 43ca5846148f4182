"""The tree of earlier rollouts, per prompt: rows write their tokens and draft from the others'.

Example:
    >>> import numpy as np
    >>> from cache.config import CacheConfig
    >>> cache = RolloutCache(CacheConfig(max_bytes=1 << 20))
    >>> prompt = np.array([11, 12, 13], np.int32)
    >>> first = cache.open("add-17", prompt)
    >>> accepted = np.array([7, 8, 9], np.int32)
    >>> cache.extend(np.array([first]), accepted, np.array([0, 3]))
    >>> second = cache.open("add-17", prompt)
    >>> cache.draft(np.array([second]), np.array([8])).tokens.tolist()
    [7, 8, 9]

One object serves one engine and is not thread-safe. All methods are batched over the rows of a
decode step; the work is in compiled kernels (`cache.store`, `cache.insert`, `cache.match`).
Nothing here can change what is sampled, only how fast (see `rollout.acceptance`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from cache import branch, estimate, insert, integrity, match, store, stored
from cache.config import CacheConfig
from cache.errors import CacheCorrupt
from rollout.arrays import int32_values
from rollout.trajectory import FloatArray, IntArray

BLOCK_BYTES = 4 * store.BLOCK
TREE_BYTES = 512
"""Charged for each tree beside its blocks: its row in `trees`, its key's entry (without text)."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """What the cache expects next: for each row a token tree, or a chain (a tree without forks).

    A row's nodes come in order of falling `path_probabilities`, a parent before its children, and
    the children of one node are distinct tokens: so the first m nodes of a row are a valid draft
    for every m, and the best one of m tokens.
    """

    tokens: IntArray
    """`[N]` drafted tokens, row after row."""
    parents: IntArray
    """`[N]` the node before it, counted within its row; -1: the row's last token."""
    offsets: IntArray
    """`[B+1]` row i's nodes are offsets[i] .. offsets[i+1] - 1; there may be none."""
    path_probabilities: FloatArray
    """`[N]` estimated probability that the node and all before it on its path are accepted."""


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Gauges (now) and counters (since start, monotone)."""

    bytes: int
    """Bytes that the cached rollouts take now, indexes included; never above `max_bytes`."""
    max_bytes: int
    tokens: int
    """Response tokens cached now."""
    sequences: int
    """Rollouts cached now, running ones included."""
    trees: int
    """Prompts known now."""
    rows: int
    """Open rows."""
    inserted_tokens: int
    """Counter: accepted tokens given to `extend`."""
    evicted_tokens: int
    """Counter: response tokens dropped to stay under a budget."""
    refused_tokens: int
    """Counter: accepted tokens that were not stored, because there was no room for them."""
    drafted: int
    """Counter: tokens drafted."""


class RolloutCache:
    """Trees of rollouts under a byte budget; see the module's docstring for an example.

    Args:
        config: budgets and drafting rules. With `enabled=False` every row drafts nothing.
    """

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        blocks = config.max_bytes // BLOCK_BYTES if config.enabled else 0
        # Only reserved: the system hands out a page when a block in it is first used.
        self._arena: IntArray = np.empty((blocks + 1) * store.BLOCK, np.int32)
        self._state = np.zeros(store.STATE_WORDS, np.int64)
        self._state[store.BUMP] = store.BLOCK
        self._state[store.LIMIT] = blocks
        self._trees = np.zeros((16, store.TREE_WORDS), np.int64)
        self._free_trees: list[int] = list(range(15, -1, -1))
        self._keys: OrderedDict[str, int] = OrderedDict()  # least recently used first
        self._key_of: dict[int, str] = {}
        self._open_rows: dict[int, int] = {}  # tree: open rows, where there are any
        self._cursors = np.full((16, store.CURSOR_WORDS), store.CLOSED, np.int64)
        self._rings: IntArray = np.zeros((16, config.max_match), np.int32)
        self._free_rows: list[int] = list(range(15, -1, -1))
        self._key_bytes = 0
        self._prompt_blocks = config.max_bytes_per_prompt // BLOCK_BYTES
        self._rules = match.Rules(
            config.min_match,
            config.max_match,
            config.max_candidates,
            config.max_draft_tokens,
            match.fading(config.version_half_life),
        )
        # Trees guess more tokens than they draft, all of which teach something.
        width = 2 * config.max_draft_tokens + 8
        self._experience = estimate.no_experience(config.max_match, config.doubt, 16, width)
        self._inserted = self._evicted = self._drafted = 0

    def open(self, key: str, context: IntArray) -> int:
        """A request starts; returns its row handle.

        Args:
            key: names the prompt's tree; "" opens a row that neither writes nor drafts.
            context: `[C]` prompt tokens and the response tokens it resumes from. Its end is
                what the first draft is matched by, so it should be the same for all samples of
                a prompt; only its last `max_match` tokens are looked at.

        Raises:
            TypeError: key is no string, or context no integers.
            ValueError: a token is negative or does not fit 32 bits.
        """
        if not isinstance(key, str):
            raise TypeError(f"a cache key must be a str, not {type(key).__name__}")
        tail = int32_values("context", context, minimum=0)[-self.config.max_match :]
        tree = self._tree_of(key) if key and self.config.enabled else store.DETACHED
        row = self._new_row()
        ring = self._rings[row]
        ring[:] = -1
        ring[len(ring) - len(tail) :] = tail
        cursor = self._cursors[row]
        cursor[:] = 0
        cursor[store.TREE] = tree
        self._experience.waiting[row] = 0
        past = np.ascontiguousarray(ring)
        cursor[store.HASH_SHORT] = match.hash_of(past, len(past), self.config.min_match)
        cursor[store.HASH_LONG] = match.hash_of(past, len(past), len(past))
        if tree >= 0:
            self._open_rows[tree] = self._open_rows.get(tree, 0) + 1
        return row

    def close(self, row: int) -> None:
        """A request ended; its tokens stay, its handle becomes invalid (and may be reused).

        Raises:
            ValueError: the row is not open.
        """
        if not 0 <= row < len(self._cursors) or self._cursors[row, store.TREE] == store.CLOSED:
            raise ValueError(f"row {row} is not open: closed twice, or never opened")
        tree = int(self._cursors[row, store.TREE])
        own = int(self._cursors[row, store.OWN])
        self._cursors[row] = store.CLOSED
        self._free_rows.append(row)
        if tree < 0:
            return
        if own > 0:
            self._arena[own + store.SEQ_OPEN] = 0
        self._open_rows[tree] -= 1
        if not self._open_rows[tree]:
            del self._open_rows[tree]
            key = self._key_of[tree]
            self._keys.move_to_end(key)
            if not self._trees[tree, store.FIRST]:
                self._drop(key)

    def extend(self, rows: IntArray, tokens: IntArray, offsets: IntArray) -> None:
        """Rows accepted tokens: their cursors move, and siblings can draft the tokens at once.

        Args:
            rows: `[B]` open rows.
            tokens: `[N]` accepted response tokens, row after row.
            offsets: `[B+1]`, rising from 0 to N; row i accepted tokens[offsets[i] : offsets[i+1]].

        Raises:
            ValueError: a row is not open, offsets do not fit, a token is negative or above
                2 ** 31 - 1. Nothing was changed.
        """
        rows = self._open_only(rows)
        tokens = int32_values("tokens", tokens, minimum=0)
        offsets = int32_values("offsets", offsets, minimum=0)
        if len(offsets) != len(rows) + 1 or offsets[0] != 0 or offsets[-1] != len(tokens):
            raise ValueError(
                f"offsets must be {len(rows) + 1} numbers from 0 to {len(tokens)} "
                f"for {len(rows)} rows, not {_brief(offsets)}"
            )
        if np.any(offsets[1:] < offsets[:-1]):
            raise ValueError(f"offsets must not fall: {_brief(offsets)}")
        self._inserted += len(tokens)
        self._write(rows, tokens, offsets)

    def draft(
        self,
        rows: IntArray,
        budgets: IntArray,
        *,
        branching: bool = False,
        min_probability: float = 0.0,
    ) -> Drafts:
        """Expected continuations of rows, each at most `budgets[i]` tokens.

        Args:
            rows: `[B]` open rows.
            budgets: `[B]` most tokens for each; `max_draft_tokens` bounds them too.
            branching: token trees, of which the nodes with the highest path probability are taken;
                otherwise chains.
            min_probability: of a node's path; `min_probability` of the settings bounds it too.

        Raises:
            ValueError: a row is not open, or a budget is negative or missing.
        """
        rows = self._open_only(rows)
        budgets = int32_values("budgets", budgets, minimum=0)
        if len(budgets) != len(rows):
            raise ValueError(f"{len(rows)} rows need as many budgets, not {len(budgets)}")
        room = int(np.minimum(budgets, self.config.max_draft_tokens).sum(dtype=np.int64))
        offsets = np.zeros(len(rows) + 1, np.int32)
        tokens = np.empty(room, np.int32)
        parents = np.empty(room, np.int32)
        probabilities = np.empty(room, np.float32)
        kernel = branch.draft if branching else match.draft
        total = kernel(
            self._arena, self._trees, self._cursors, self._rings, rows, budgets,
            float(max(self.config.min_probability, min_probability)), self._rules,
            self._state[store.WRITER], self._experience, offsets, tokens, parents, probabilities,
        )  # fmt: skip
        self._drafted += total
        return Drafts(tokens[:total], parents[:total], offsets, probabilities[:total])

    def advance(self, policy_version: int) -> None:
        """From now on `policy_version` writes; what others wrote counts less the further away.

        A version may also fall (a run that goes back to a checkpoint): the distance counts.

        Raises:
            ValueError: it is negative or above 2 ** 31 - 1.
        """
        self._state[store.WRITER] = int32_values("policy_version", [policy_version], minimum=0)[0]

    def insert(
        self, key: str, context: IntArray, tokens: IntArray, policy_version: int | None = None
    ) -> None:
        """Add a finished rollout (from a checkpoint, another generator); as open, extend, close.

        Args:
            key: as for `open`.
            context: as for `open`.
            tokens: `[N]` its response.
            policy_version: that wrote it; None: the one that writes now.
        """
        values = int32_values("tokens", tokens, minimum=0)
        writer = self._state[store.WRITER]
        if policy_version is not None:
            self.advance(policy_version)
        try:
            row = self.open(key, context)
            self.extend(np.array([row], np.int32), values, np.array([0, len(values)], np.int32))
            self.close(row)
        finally:
            self._state[store.WRITER] = writer

    def written(self, row: int) -> stored.StoredRollouts | None:
        """What an open row has stored: its head and its response so far.

        None: nothing (yet), or it stopped storing for want of room.

        Raises:
            ValueError: the row is not open.
        """
        row = int(self._open_only(np.array([row]))[0])
        tree, own = int(self._cursors[row, store.TREE]), int(self._cursors[row, store.OWN])
        if tree < 0 or own <= 0:
            return None
        tokens = np.empty(stored.length(self._arena, own), np.int32)
        length, version = stored.copy(self._arena, own, tokens)
        one = np.array([[length], [version]], np.int32)
        return stored.StoredRollouts(self._key_of[tree], one[0], one[1], tokens)

    def finished(self) -> Iterator[stored.StoredRollouts]:
        """All rollouts that are not being written, for a snapshot; the cache must stay as it is.

        Prompt by prompt, the least recently used first.
        """
        for key, tree in self._keys.items():
            sequences, total = stored.count(self._arena, self._trees, tree)
            if sequences:
                lengths, versions = np.empty((2, sequences), np.int32)
                tokens = np.empty(total, np.int32)
                stored.finished(self._arena, self._trees, tree, lengths, versions, tokens)
                yield stored.StoredRollouts(key, lengths, versions, tokens)

    def stats(self) -> CacheStats:
        """Gauges and counters, without waiting."""
        return CacheStats(
            bytes=self._bytes(),
            max_bytes=self.config.max_bytes,
            tokens=int(self._state[store.TOKENS]),
            sequences=int(self._state[store.SEQUENCES]),
            trees=len(self._keys),
            rows=len(self._cursors) - len(self._free_rows),
            inserted_tokens=self._inserted,
            evicted_tokens=self._evicted,
            refused_tokens=int(self._state[store.REFUSED]),
            drafted=self._drafted,
        )

    def check(self) -> None:
        """Walk the whole cache. For tests and idle moments: it reads everything.

        Raises:
            CacheCorrupt: an invariant does not hold; the message says which.
        """
        used = np.array(sorted(self._keys.values()), np.int32)
        problem = integrity.check(
            self._arena, self._state, self._trees, used,
            self.config.min_match, self.config.max_match,
        )  # fmt: skip
        if problem:
            raise CacheCorrupt(integrity.PROBLEMS[problem])
        if self._bytes() > self.config.max_bytes and self._state[store.LIVE]:
            raise CacheCorrupt(f"{self._bytes()} bytes are above {self.config.max_bytes}")
        own = self._cursors[self._cursors[:, store.TREE] >= 0, store.OWN]
        marked = [int(name) for name in own if name > 0]
        if any(not self._arena[name + store.SEQ_OPEN] for name in marked):
            raise CacheCorrupt("an open row's sequence is not marked open")

    def _bytes(self) -> int:
        return int(self._state[store.LIVE]) * BLOCK_BYTES + self._overhead()

    def _overhead(self) -> int:
        return len(self._keys) * TREE_BYTES + self._key_bytes

    def _set_limit(self) -> None:
        blocks = (self.config.max_bytes - self._overhead()) // BLOCK_BYTES
        self._state[store.LIMIT] = max(0, blocks)

    def _tree_of(self, key: str) -> int:
        """The tree of a key, made when it is new; DETACHED when there is no room even for that."""
        if key in self._keys:
            self._keys.move_to_end(key)
            return self._keys[key]
        cost = TREE_BYTES + _key_size(key)
        while self._bytes() + cost > self.config.max_bytes:
            if not self._make_room(1):
                return store.DETACHED
        if not self._free_trees:
            size = len(self._trees)
            self._trees = np.concatenate([self._trees, np.zeros_like(self._trees)])
            self._free_trees = list(range(2 * size - 1, size - 1, -1))
        tree = self._free_trees.pop()
        self._trees[tree] = 0
        self._keys[key] = tree
        self._key_of[tree] = key
        self._key_bytes += _key_size(key)
        self._set_limit()
        return tree

    def _new_row(self) -> int:
        if not self._free_rows:
            size = len(self._cursors)
            self._cursors = np.concatenate([self._cursors, np.full_like(self._cursors, -2)])
            self._rings = np.concatenate([self._rings, np.zeros_like(self._rings)])
            self._experience = estimate.more_rows(self._experience)
            self._free_rows = list(range(2 * size - 1, size - 1, -1))
        return self._free_rows.pop()

    def _open_only(self, rows: ArrayLike) -> IntArray:
        out = int32_values("rows", rows)
        known = (out >= 0) & (out < len(self._cursors))
        if not known.all() or (self._cursors[out, store.TREE] == store.CLOSED).any():
            bad = [
                int(row)
                for row, ok in zip(out, known, strict=True)
                if not ok or self._cursors[row, store.TREE] == store.CLOSED
            ]
            raise ValueError(f"rows {bad} are not open")
        return out

    def _write(self, rows: IntArray, tokens: IntArray, offsets: IntArray) -> None:
        """Run the kernel; when it asks for room, make some, or give up on that row's storage."""
        state = self._state
        state[store.AT_ROW] = state[store.AT_TOKEN] = 0
        grow = True
        while True:
            code = insert.extend(
                self._arena, state, self._trees, self._cursors, self._rings, rows, tokens,
                offsets, self.config.min_match, self._prompt_blocks, grow,
                self._experience, self.config.calibrate,
            )  # fmt: skip
            if code == store.DONE:
                return
            row = int(rows[state[store.AT_ROW]])
            tree = int(self._cursors[row, store.TREE])
            if code == store.TREE_FULL:
                made = self._trim(tree, self._prompt_blocks // 2)
            else:
                made = self._make_room(int(state[store.NEEDED]))
            if not made and grow:
                grow = False  # perhaps it only wanted a larger index
            elif not made:
                self._mute(row)

    def _mute(self, row: int) -> None:
        """Stop storing a row's tokens; it still drafts. What it stored stays."""
        own = int(self._cursors[row, store.OWN])
        if own > 0:
            self._arena[own + store.SEQ_OPEN] = 0
        self._cursors[row, store.OWN] = store.MUTED

    def _make_room(self, blocks: int) -> bool:
        """Free at least `blocks`, and some more so that this is rare; False when none was freed."""
        state = self._state
        goal = state[store.LIMIT] - max(blocks, state[store.LIMIT] // 32)
        before = self._bytes()
        for key in list(self._keys):
            if state[store.LIVE] <= goal:
                break
            if self._keys[key] not in self._open_rows:
                self._drop(key)
                goal = state[store.LIMIT] - max(blocks, state[store.LIMIT] // 32)
        for tree in list(self._keys.values()):  # all in use: their oldest rollouts
            if state[store.LIVE] <= goal:
                break
            self._trim(tree, int(self._trees[tree, store.BLOCKS]) // 2)
        return self._bytes() < before

    def _trim(self, tree: int, target: int) -> bool:
        """Drop a tree's oldest finished rollouts down to `target` blocks; False when none could."""
        dropped = store.trim(
            self._arena, self._state, self._trees, tree, target,
            self.config.min_match, self.config.max_match,
        )  # fmt: skip
        self._evicted += max(0, dropped)
        return dropped >= 0

    def _drop(self, key: str) -> None:
        """Forget a prompt that has no open rows."""
        tree = self._keys.pop(key)
        self._trim(tree, 0)
        del self._key_of[tree]
        self._free_trees.append(tree)
        self._key_bytes -= _key_size(key)
        self._set_limit()


def warm_up() -> None:
    """Load the compiled kernels, or compile them (some seconds, once per machine and version).

    For an engine's start, so that the first decode step does not wait for the compiler.
    """
    cache = RolloutCache(CacheConfig(max_bytes=1 << 14))
    for _ in range(2):
        cache.insert("warm up", np.arange(4, dtype=np.int32), np.arange(9, dtype=np.int32))
    rows = np.array([cache.open("warm up", np.arange(4, dtype=np.int32))], np.int32)
    for branching in (False, True):
        cache.draft(rows, np.array([4], np.int32), branching=branching)
    cache.extend(rows, np.arange(2, dtype=np.int32), np.array([0, 2], np.int32))
    cache.written(int(rows[0]))
    list(cache.finished())
    cache.close(int(rows[0]))
    cache.insert("makes room", np.zeros(1, np.int32), np.zeros(8000, np.int32))


def _key_size(key: str) -> int:
    return 4 * len(key)  # at most, as Python holds it


def _brief(values: IntArray) -> str:
    return np.array2string(values, threshold=8)
