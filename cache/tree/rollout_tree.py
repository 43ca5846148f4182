"""The rollout cache: rows store their tokens and draft from the others', one tree per prompt.

Example:
    >>> import numpy as np
    >>> from asyncrl.cache.config import CacheConfig
    >>> cache = RolloutCache(CacheConfig(max_bytes=1 << 20))
    >>> prompt = np.array([11, 12, 13], np.int32)
    >>> first = cache.open("add-17", prompt)
    >>> accepted = np.array([7, 8, 9], np.int32)
    >>> cache.extend(np.array([first]), accepted, np.array([0, 3]))
    >>> second = cache.open("add-17", prompt)
    >>> cache.draft(np.array([second]), np.array([8])).tokens.tolist()
    [7, 8, 9]

`RolloutCache` serves one engine and is not thread-safe. Its methods are batched over the rows of a
decode step, and compiled kernels do the work:

    arena        stored rollouts: blocks and hash chains
    estimate     learning from outcomes
    match        earlier places of recent tokens
    draft        drafting chains and trees
    forest       the Python side: trees and their budget

The cache can only change speed, never what is sampled (see `asyncrl.rollout.acceptance`).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from asyncrl.cache.config import RUN_RULES, CacheConfig, TreeRules
from asyncrl.cache.tree import arena, estimate
from asyncrl.cache.tree.arena import LongArray, StoredRollouts, hash_of
from asyncrl.cache.tree.draft import draft
from asyncrl.cache.tree.forest import Forest
from asyncrl.cache.tree.match import Rules, version_weights
from asyncrl.rollout.jit import check_offsets, int32_values
from asyncrl.rollout.trajectory import FloatArray, IntArray


class OpenRows:
    """Row handles, and the arrays in which compiled code keeps the state of each row."""

    def __init__(self, config: CacheConfig, rules: TreeRules) -> None:
        self._min_match = config.min_match
        self.cursors: LongArray = np.full((16, arena.CURSOR_WORDS), arena.CLOSED, np.int64)
        """`[R, CURSOR_WORDS]` see `asyncrl.cache.tree.arena`."""
        self.rings: IntArray = np.zeros((16, rules.max_match), np.int32)
        """`[R, max_match]` the last tokens of each row, as a ring; -1 if there are fewer."""
        # A tree makes more guesses than it drafts, and all of them teach something.
        width = 2 * config.draft_tokens + 8
        self.experience = estimate.no_experience(rules.max_match, rules.doubt, 16, width)
        self._free: list[int] = list(range(15, -1, -1))

    def __len__(self) -> int:
        return len(self.cursors) - len(self._free)

    def add(self, tree: int, tail: IntArray) -> int:
        """Open a row with the last tokens `tail` `[C]` of its context; return its handle.

        `tree` is its tree, or DETACHED; `tail` has at most `max_match` tokens.
        """
        if not self._free:
            size = len(self.cursors)
            closed = np.full_like(self.cursors, arena.CLOSED)
            self.cursors = np.concatenate([self.cursors, closed])
            self.rings = np.concatenate([self.rings, np.zeros_like(self.rings)])
            self.experience = estimate.more_rows(self.experience)
            self._free = list(range(2 * size - 1, size - 1, -1))
        row = self._free.pop()
        ring = self.rings[row]
        ring[:] = -1
        ring[len(ring) - len(tail) :] = tail
        past = np.ascontiguousarray(ring)
        cursor = self.cursors[row]
        cursor[:] = 0
        cursor[arena.TREE] = tree
        cursor[arena.HASH_SHORT] = hash_of(past, len(past), self._min_match)
        cursor[arena.HASH_LONG] = hash_of(past, len(past), len(past))
        self.experience.waiting[row] = 0
        return row

    def remove(self, row: int) -> tuple[int, int]:
        """Close an open row (else ValueError); return its tree and the name of its sequence."""
        if not 0 <= row < len(self.cursors) or self.cursors[row, arena.TREE] == arena.CLOSED:
            raise ValueError(f"row {row} is not open: closed twice, or never opened")
        tree, own = int(self.cursors[row, arena.TREE]), int(self.cursors[row, arena.OWN])
        self.cursors[row] = arena.CLOSED
        self._free.append(row)
        return tree, own

    def require_open(self, rows: ArrayLike) -> IntArray:
        """Return `rows` as an int32 vector. Raises ValueError if one of them is not open."""
        handles = int32_values("rows", rows)
        known = (handles >= 0) & (handles < len(self.cursors))
        known[known] = self.cursors[handles[known], arena.TREE] != arena.CLOSED
        if not known.all():
            raise ValueError(f"rows {handles[~known].tolist()} are not open")
        return handles


@dataclass(frozen=True, slots=True)
class Drafts:
    """The draft of each row: a token tree, or a chain (a tree without forks).

    A row's nodes are in order of falling `path_probabilities`, a parent before its children, and
    the children of a node are distinct tokens. So the first m nodes of a row are a valid draft for
    every m, and the best one of m tokens.
    """

    tokens: IntArray
    """`[N]` drafted tokens, row after row."""
    parents: IntArray
    """`[N]` index of the parent node within its row; -1: the row's last token."""
    offsets: IntArray
    """`[B+1]` row i's nodes are offsets[i] .. offsets[i+1] - 1; it may have none."""
    path_probabilities: FloatArray
    """`[N]` estimated probability that the node and all its ancestors are accepted."""


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Gauges (current values) and counters (since the start, monotone)."""

    bytes: int
    """Gauge: bytes of the cached rollouts, indexes included; never above `max_bytes`."""
    max_bytes: int
    tokens: int
    """Gauge: response tokens in the cache."""
    sequences: int
    """Gauge: rollouts in the cache, running ones included."""
    trees: int
    """Gauge: prompts with a tree."""
    rows: int
    inserted_tokens: int
    """Counter: accepted tokens passed to `extend`."""
    evicted_tokens: int
    """Counter: response tokens dropped to stay within a budget."""
    refused_tokens: int
    """Counter: accepted tokens that were not stored for lack of room."""
    drafted: int


class RolloutCache:
    """Trees of rollouts within a byte budget; see the module's docstring for an example.

    With `config.enabled` False every row drafts nothing.
    """

    def __init__(self, config: CacheConfig, rules: TreeRules = RUN_RULES) -> None:
        self.config, self.rules = config, rules
        self._forest = Forest(config, rules)
        self._rows = OpenRows(config, rules)
        self._rules = Rules(
            config.min_match,
            rules.max_match,
            rules.max_candidates,
            config.draft_tokens,
            version_weights(rules.version_half_life),
        )
        self._inserted = self._drafted = 0

    def open(self, key: str, context: IntArray) -> int:
        """Open a row for a request that starts; return its handle.

        `key` names the prompt's tree; "" opens a row that neither stores nor drafts. `context`
        `[C]` is the prompt and the response tokens that the request resumes from. The first draft
        is matched by its end, which should be the same for all samples of a prompt; only the last
        `max_match` tokens are used. Raises TypeError for a key that is not a string or tokens that
        are not integers; ValueError for tokens that are negative or above 2 ** 31 - 1.
        """
        if not isinstance(key, str):
            raise TypeError(f"a cache key must be a str, not {type(key).__name__}")
        tail = int32_values("context", context, minimum=0)[-self.rules.max_match :]
        tree = self._forest.tree_of(key) if key and self.config.enabled else arena.DETACHED
        row = self._rows.add(tree, tail)
        if tree >= 0:
            self._forest.row_opened(tree)
        return row

    def close(self, row: int) -> None:
        """Close a row; its tokens stay, its handle may be reused. ValueError if it is not open."""
        tree, own = self._rows.remove(row)
        if tree < 0:
            return
        if own > 0:
            self._forest.arena[own + arena.SEQ_OPEN] = 0
        self._forest.row_closed(tree)

    def extend(self, rows: IntArray, tokens: IntArray, offsets: IntArray) -> None:
        """Append accepted tokens to rows; other rows can draft them at once.

        Row i of `[B]` open rows accepted tokens[offsets[i] : offsets[i+1]]; `offsets` `[B+1]` rise
        from 0 to N. Raises ValueError if a row is not open, the offsets do not fit, or a token is
        negative or above 2 ** 31 - 1; nothing was changed.
        """
        vectors = all(_is_int32_vector(one) for one in (rows, tokens, offsets))
        if not vectors or not arena.acceptable(self._rows.cursors, rows, tokens, offsets):
            rows = self._rows.require_open(rows)
            tokens = int32_values("tokens", tokens, minimum=0)
            offsets = int32_values("offsets", offsets, minimum=0)
            if len(offsets) != len(rows) + 1:
                raise ValueError(
                    f"{len(rows)} rows need {len(rows) + 1} offsets, not {len(offsets)}"
                )
            check_offsets("extend", offsets, len(tokens))
        self._inserted += len(tokens)
        self._store(rows, tokens, offsets)

    def draft(
        self,
        rows: IntArray,
        budgets: IntArray,
        *,
        branching: bool = False,
        min_probability: float = 0.0,
    ) -> Drafts:
        """Draft the expected continuations of rows, at most `budgets[i]` tokens each.

        `max_draft_tokens` and `config.min_probability` are limits too. Drafts are token trees of
        the nodes with the highest path probabilities if `branching`, otherwise chains. Raises
        ValueError if one of `[B]` rows is not open, or a budget is negative or missing.
        """
        rows = self._rows.require_open(rows)
        budgets = int32_values("budgets", budgets, minimum=0)
        if len(budgets) != len(rows):
            raise ValueError(f"{len(rows)} rows need as many budgets, not {len(budgets)}")
        room = int(np.minimum(budgets, self.config.draft_tokens).sum(dtype=np.int64))
        offsets = np.zeros(len(rows) + 1, np.int32)
        tokens, parents = np.empty(room, np.int32), np.empty(room, np.int32)
        probabilities = np.empty(room, np.float32)
        total = draft(
            self._forest.arena, self._forest.trees, self._rows.cursors, self._rows.rings, rows,
            budgets, float(max(self.config.min_probability, min_probability)), self._rules,
            self._forest.state[arena.POLICY_VERSION], self._rows.experience, bool(branching),
            offsets, tokens, parents, probabilities,
        )  # fmt: skip
        self._drafted += total
        return Drafts(tokens[:total], parents[:total], offsets, probabilities[:total])

    def advance(self, policy_version: int) -> None:
        """Set the current policy version, which may fall; votes of distant ones count less.

        Raises ValueError if it is negative or above 2 ** 31 - 1.
        """
        version = int32_values("policy_version", [policy_version], minimum=0)[0]
        self._forest.state[arena.POLICY_VERSION] = version

    def insert(
        self, key: str, context: IntArray, tokens: IntArray, policy_version: int | None = None
    ) -> None:
        """Add a finished rollout of `policy_version` (None: the current one)."""
        values = int32_values("tokens", tokens, minimum=0)
        state = self._forest.state
        current = state[arena.POLICY_VERSION]
        if policy_version is not None:
            self.advance(policy_version)
        try:
            # Not the methods of `SharedCache`, which publish the rollout.
            row = RolloutCache.open(self, key, context)
            offsets = np.array([0, len(values)], np.int32)
            RolloutCache.extend(self, np.array([row], np.int32), values, offsets)
            RolloutCache.close(self, row)
        finally:
            state[arena.POLICY_VERSION] = current

    def stored_rollout(self, row: int) -> StoredRollouts | None:
        """Return the head and response that an open row has stored; None if it stores nothing.

        Raises ValueError if the row is not open.
        """
        row = int(self._rows.require_open(np.array([row]))[0])
        cursor = self._rows.cursors[row]
        tree, own = int(cursor[arena.TREE]), int(cursor[arena.OWN])
        if tree < 0 or own <= 0:
            return None
        return self._forest.rollout(tree, own)

    def finished_rollouts(self) -> Iterator[StoredRollouts]:
        """Yield all rollouts without an open row, prompt by prompt, the least recently used first.

        The cache must not be used during this.
        """
        return self._forest.finished_rollouts()

    def stats(self) -> CacheStats:
        """Return gauges and counters; takes no time."""
        state = self._forest.state
        return CacheStats(
            bytes=self._forest.bytes,
            max_bytes=self.config.max_bytes,
            tokens=int(state[arena.TOKENS]),
            sequences=int(state[arena.SEQUENCES]),
            trees=len(self._forest),
            rows=len(self._rows),
            inserted_tokens=self._inserted,
            evicted_tokens=self._forest.evicted_tokens,
            refused_tokens=int(state[arena.REFUSED]),
            drafted=self._drafted,
        )

    def _store(self, rows: IntArray, tokens: IntArray, offsets: IntArray) -> None:
        """Run the kernel. When it needs room, make some, or stop storing that row's tokens."""
        forest, state = self._forest, self._forest.state
        state[arena.AT_ROW] = state[arena.AT_TOKEN] = 0
        grow = True
        while True:
            code = arena.extend(
                forest.arena, state, forest.trees, self._rows.cursors, self._rows.rings, rows,
                tokens, offsets, self.config.min_match, forest.prompt_blocks, grow,
                self._rows.experience, self.rules.calibrate,
            )  # fmt: skip
            if code == arena.DONE:
                return
            row = int(rows[state[arena.AT_ROW]])
            if code == arena.TREE_FULL:
                tree = int(self._rows.cursors[row, arena.TREE])
                made = forest.trim(tree, forest.prompt_blocks // 2)
            else:
                made = forest.make_room(int(state[arena.NEEDED]))
            if not made and grow:
                grow = False  # perhaps it only needed a larger index
            elif not made:  # the row still drafts, and what it has stored stays
                own = int(self._rows.cursors[row, arena.OWN])
                if own > 0:
                    forest.arena[own + arena.SEQ_OPEN] = 0
                self._rows.cursors[row, arena.OWN] = arena.MUTED


def _is_int32_vector(array: object) -> bool:
    """Return True if compiled code takes it as it is."""
    return (
        isinstance(array, np.ndarray)
        and array.dtype == np.int32
        and array.ndim == 1
        and array.flags.c_contiguous
        and array.flags.writeable  # read-only ones would be compiled for again
    )


def warm_up() -> None:
    """Load the compiled kernels, or compile them, before the first decode step."""
    cache = RolloutCache(CacheConfig(max_bytes=1 << 14))
    for _ in range(2):
        cache.insert("warm up", np.arange(4, dtype=np.int32), np.arange(9, dtype=np.int32))
    rows = np.array([cache.open("warm up", np.arange(4, dtype=np.int32))], np.int32)
    for branching in (False, True):
        cache.draft(rows, np.array([4], np.int32), branching=branching)
    cache.extend(rows, np.arange(2, dtype=np.int32), np.array([0, 2], np.int32))
    cache.stored_rollout(int(rows[0]))
    list(cache.finished_rollouts())
    cache.close(int(rows[0]))
    cache.insert("makes room", np.zeros(1, np.int32), np.zeros(8000, np.int32))
