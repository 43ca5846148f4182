"""The cache against a naive model of it, and with budgets that are hard to keep."""

import itertools
import math
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
from cache_check import check
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from asyncrl.cache.config import CacheConfig, TreeRules
from asyncrl.cache.tree import arena
from asyncrl.cache.tree.arena import SPAN
from asyncrl.cache.tree.draft import BLEND
from asyncrl.cache.tree.rollout_tree import Drafts, RolloutCache

MAX_DRAFT_TOKENS = 12
# How far the cache's float32 numbers may be from those of the model, as a relative error. Each
# rounding adds at most 2^-24. What is computed in float64 adds far less.
#   5 for a vote: its version weight, that times the nearness, and the product with its share of
#     BLEND are rounded, and the sum that the share is divided by carries two roundings itself.
#     All votes are positive, so no sum of votes is less exact than its terms. Neither is `doubt`.
#   10 for the ratio of two such sums, the probability of a token.
#   2 for storing this probability and its product with the path before it.
#   1 for the higher-order terms and float64.
TOKEN_ERROR = 13 * 2**-24
"""Of a token's votes and of its probability."""
PATH_ERROR = MAX_DRAFT_TOKENS * TOKEN_ERROR
"""Of a path's probability. A comparison that is closer than this may turn out either way."""
KEYS = ("a", "b")
Place = tuple[list[tuple[list[int], float]], int]
"""Continuations with their weights, and the length of the match."""
PROMPTS = {"a": [7, 8, 9, 7, 8, 9, 5], "b": [2]}


@dataclass
class Sequence:
    tokens: list[int]
    """Head of `max_match` tokens, then the response."""
    versions: list[int]
    """Policy version at which each block was begun."""

    def write(self, tokens: list[int], version: int) -> None:
        self.tokens += tokens
        while len(self.versions) * SPAN < len(self.tokens):
            self.versions.append(version)


@dataclass
class Row:
    key: str
    context: list[int]
    own: Sequence | None = None


@dataclass
class Naive:
    """The same rules in plain Python, looking at every position of every rollout."""

    config: CacheConfig
    rules: TreeRules
    trees: dict[str, list[Sequence]] = field(default_factory=lambda: defaultdict(list))
    rows: dict[int, Row] = field(default_factory=dict)
    version: int = 0

    def tail(self, row: Row) -> list[int]:
        size = self.rules.max_match
        return ([-1] * size + row.context)[-size:]

    def extend(self, handle: int, tokens: list[int]) -> None:
        row = self.rows[handle]
        if tokens and row.own is None:
            row.own = Sequence([], [])
            row.own.write(self.tail(row), self.version)
            self.trees[row.key].append(row.own)
        if row.own:
            row.own.write(tokens, self.version)
        row.context += tokens

    def candidates(
        self, row: Row, past: list[int], blend: float
    ) -> tuple[list[tuple[list[int], float]], int]:
        """Continuations with weights, and the longest match's length."""
        size = self.rules.max_match
        found, echo = [], []
        extra = len(past) - size  # drafted tokens after the row's own
        expected = (len(row.own.tokens) - size if row.own else 0) - 1 + extra
        for sequence in self.trees[row.key]:
            for at in range(size - 1, len(sequence.tokens) - 1):
                length = 0
                while length < size and sequence.tokens[at - length] == past[-1 - length]:
                    length += 1
                rest = sequence.tokens[at + 1 :]
                if sequence is row.own:
                    echo = rest if length == size else echo
                elif length >= self.config.min_match:
                    age = abs(self.version - sequence.versions[at // SPAN])
                    fading = max(0.5 ** (age / self.rules.version_half_life), 1 / 16)
                    near = max(0.1, 1 / (1 + abs(at - size - expected)))
                    found.append((rest, fading * near, length))
        # With more, the cache lets only the newest vote.
        assume(2 * len(found) < self.rules.max_candidates)
        if not found:
            return ([(echo, 0.5)], size) if echo else ([], 0)
        sure = [(rest, w) for rest, w, length in found if length == size]
        short = [item for item in found if item[2] < size]
        longest = max((length for _, _, length in short), default=0)
        others = [(rest, w * 0.25 ** (longest - n)) for rest, w, n in short]
        if not sure:
            return others, longest
        share = blend / max(sum(w for _, w in others), 1e-9)
        return sure + [(rest, w * share) for rest, w in others if blend], size

    def judge(
        self, handle: int, budget: int, tokens: list[int], probabilities: list[float]
    ) -> None:
        """Assert that a draft is one that the rules allow."""
        config, row = self.config, self.rows[handle]
        budget = min(budget, config.max_draft_tokens)
        assert len(tokens) <= budget
        past, path, done = self.tail(row), 1.0, 0
        alive: list[tuple[list[int], float]] = []
        matched = 0
        while True:
            alive = [item for item in alive if item[0]]
            if not alive:
                alive, matched = self.candidates(row, past, 0.0)
            if done == budget or not alive:
                break
            votes: dict[int, float] = defaultdict(float)
            for rest, weight in alive:
                votes[rest[0]] += weight
            total = sum(votes.values())
            best = max(votes.values())
            p = min(best / (total + self.rules.doubt * self.rules.max_match / matched), 0.9999)
            path *= p
            if done == len(tokens):
                assert not clearly_less(config.min_probability, path), "stopped too early"
                break
            assert not clearly_less(path, config.min_probability), "too unlikely"
            assert math.isclose(votes[tokens[done]], best, rel_tol=TOKEN_ERROR)
            assert math.isclose(probabilities[done], path, rel_tol=PATH_ERROR)
            alive = [(rest[1:], w) for rest, w in alive if rest[0] == tokens[done]]
            past.append(tokens[done])
            matched = min(matched + 1, self.rules.max_match)
            done += 1
        assert done == len(tokens), "continued too long"

    def forks(self, handle: int, past: list[int], place: Place) -> dict[int, tuple[float, Place]]:
        """Possible next tokens, each with its probability and the candidates that follow it."""
        alive, matched = [item for item in place[0] if item[0]], place[1]
        if not alive:
            alive, matched = self.candidates(self.rows[handle], past, BLEND)
        total = sum(weight for _, weight in alive)
        out: dict[int, tuple[float, Place]] = {}
        for token in {rest[0] for rest, _ in alive}:
            behind = [(rest[1:], weight) for rest, weight in alive if rest[0] == token]
            votes = sum(weight for _, weight in behind)
            p = min(votes / (total + self.rules.doubt * self.rules.max_match / matched), 0.9999)
            out[token] = p, (behind, min(matched + 1, self.rules.max_match))
        return out

    def judge_tree(self, handle: int, budget: int, found: dict[tuple[int, ...], float]) -> None:
        """Assert that a tree, parents first, consists of the `budget` likeliest paths.

        Every path that extends one of the tree by a token must be less likely than all of its
        paths or, if the tree is smaller than its budget, than `min_probability`.
        """
        budget = min(budget, self.config.max_draft_tokens)
        assert len(found) <= budget
        tail = self.tail(self.rows[handle])
        outside: dict[tuple[int, ...], tuple[float, Place]] = {(): (1.0, ([], 0))}
        lowest = 1.0
        for path, probability in {(): 1.0, **found}.items():
            assert path in outside, "no candidate votes for this token"
            lowest, place = outside.pop(path)
            assert math.isclose(probability, lowest, rel_tol=PATH_ERROR)
            assert not clearly_less(lowest, self.config.min_probability), "too unlikely"
            for token, (p, behind) in self.forks(handle, tail + list(path), place).items():
                outside[(*path, token)] = lowest * p, behind
        bar = lowest if len(found) == budget else self.config.min_probability
        for p, _ in outside.values():
            assert not clearly_less(bar, p), "a likelier path was left out"


def clearly_less(low: float, high: float) -> bool:
    """Whether a path probability is below another by more than the errors of both."""
    return low < high and not math.isclose(low, high, rel_tol=2 * PATH_ERROR)


Settings = tuple[CacheConfig, TreeRules]


def config_of(
    min_match: int, more: int, min_probability: float, version_half_life: float, doubt: float
) -> Settings:
    config = CacheConfig(
        max_bytes=1 << 20,
        min_match=min_match,
        min_probability=min_probability,
        max_draft_tokens=MAX_DRAFT_TOKENS,
    )
    rules = TreeRules(
        max_match=min_match + more,
        version_half_life=version_half_life,
        doubt=doubt,
        calibrate=False,
        max_candidates=256,
    )
    return config, rules


configs = st.builds(
    config_of,
    st.integers(1, 3),
    st.integers(0, 4),
    st.sampled_from([0.0, 0.0999, 0.4999]),
    st.sampled_from([1.5, 1000.0]),
    st.sampled_from([0.0, 0.3]),
)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("open"), st.integers(0, 1), st.lists(st.integers(0, 2), max_size=4)),
        st.tuples(
            st.just("extend"),
            st.lists(st.lists(st.integers(0, 2), max_size=12), min_size=1, max_size=3),
        ),
        st.tuples(st.just("draft"), st.integers(0, 15)),
        st.tuples(st.just("close"), st.integers(0, 5)),
        st.tuples(st.just("advance"), st.integers(0, 9)),
    ),
    min_size=5,
    max_size=30,
)


def paths_of(drafts: Drafts, row: int) -> dict[tuple[int, ...], float]:
    """A row's nodes by their tokens from the root; asserts what `Drafts` promises."""
    low, high = drafts.offsets[row : row + 2]
    paths: list[tuple[int, ...]] = []
    for node in range(low, high):
        parent = int(drafts.parents[node])
        assert -1 <= parent < node - low
        paths.append(((*paths[parent],) if parent >= 0 else ()) + (int(drafts.tokens[node]),))
    probabilities = drafts.path_probabilities[low:high].tolist()
    assert all(a >= b for a, b in itertools.pairwise([1.0, *probabilities, 0.0]))
    named = dict(zip(paths, probabilities, strict=True))
    assert len(named) == len(paths), "two children of a node are the same token"
    return named


NEAR_THE_BAR = [
    ("open", 0, []),
    ("extend", [[], [0, 0, 0, 2, 2, 0, 0, 0, 0]]),
    ("extend", [[0] * 8, [0, 0, 0, 0, 0, 0, 0, 2, 0, 2, 1]]),
    ("extend", [[0, 0]]),
    ("extend", [[0, 0, 2, 2]]),
]
"""Leads to a path with probability 0.5 * 0.9999^2, which exceeds 0.4999 by a part in 10^8."""


@settings(max_examples=500)
@given(configs, actions)
@example(config_of(1, 1, 0.4999, 1.5, 0.0), NEAR_THE_BAR)
def test_drafts_are_those_of_the_naive_model(given: Settings, steps: list[tuple]) -> None:
    cache, model = RolloutCache(*given), Naive(*given)
    for name, *arguments in [("open", 0, []), ("open", 0, []), *steps, ("draft", 12)]:
        handles = list(model.rows)
        if name == "open":
            key = KEYS[arguments[0]]
            context = PROMPTS[key] + arguments[1]
            handle = cache.open(key, np.array(context, np.int32))
            assert handle not in model.rows
            model.rows[handle] = Row(key, list(context))
        elif name == "extend":
            chunks = dict(zip(handles, arguments[0], strict=False))
            offsets = np.cumsum([0, *map(len, chunks.values())])
            tokens = np.array([t for chunk in chunks.values() for t in chunk], np.int32)
            cache.extend(np.array(list(chunks), np.int32), tokens, offsets)
            for handle, chunk in chunks.items():
                model.extend(handle, chunk)
        elif name == "draft":
            budgets = np.full(len(handles), arguments[0])
            rows = np.array(handles, np.int32)
            chains = cache.draft(rows, budgets)
            trees = cache.draft(rows, budgets, branching=True)
            for at, handle in enumerate(handles):
                span = slice(chains.offsets[at], chains.offsets[at + 1])
                found = chains.tokens[span].tolist(), chains.path_probabilities[span].tolist()
                model.judge(handle, arguments[0], *found)
                model.judge_tree(handle, arguments[0], paths_of(trees, at))
        elif name == "advance":
            cache.advance(arguments[0])
            model.version = arguments[0]
        elif handles:
            handle = handles[arguments[0] % len(handles)]
            cache.close(handle)
            del model.rows[handle]
    check(cache)
    stored = sum(len(s.tokens) - cache.rules.max_match for t in model.trees.values() for s in t)
    assert cache.stats().tokens == stored


def allocated(cache: RolloutCache) -> int:
    return int(cache._forest.state[arena.BUMP]) // arena.BLOCK - 1


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), st.integers(14, 17), st.integers(13, 16), st.integers(1, 40))
def test_memory_stays_within_its_budget(seed: int, total: int, prompt: int, max_match: int) -> None:
    rng = np.random.default_rng(seed)
    config = CacheConfig(max_bytes=1 << total, min_match=min(1 + max_match // 4, 8))
    cache = RolloutCache(config, TreeRules(bytes_per_prompt=1 << prompt, max_match=max_match))
    vocabulary = int(rng.choice([2, 50, 2**31 - 1]))
    rows: list[int] = []
    for _ in range(60):
        if len(rows) < 20 and rng.random() < 0.6:
            key = f"prompt {rng.integers(8)}" * int(rng.choice([1, 20]))
            rows.append(cache.open(key, rng.integers(0, vocabulary, rng.integers(20))))
        if rows and rng.random() < 0.4:
            cache.close(rows.pop(rng.integers(len(rows))))
        lengths = rng.integers(0, rng.choice([3, 200]), len(rows))
        tokens = rng.integers(0, vocabulary, lengths.sum())
        cache.extend(np.array(rows, np.int32), tokens, np.concatenate([[0], lengths.cumsum()]))
        branching = bool(rng.random() < 0.5)
        drafts = cache.draft(np.array(rows, np.int32), np.full(len(rows), 8), branching=branching)
        for at in range(len(rows)):
            assert len(paths_of(drafts, at)) <= 8
        if rng.random() < 0.2:
            cache.advance(int(rng.integers(2**31)))
        check(cache)
        assert cache._forest.state[arena.LIVE] + cache._forest.state[arena.FREE] == allocated(cache)
        stats = cache.stats()
        assert stats.bytes <= config.max_bytes
        gone = stats.evicted_tokens + stats.refused_tokens
        assert stats.tokens + gone <= stats.inserted_tokens
    for row in rows:
        cache.close(row)
    check(cache)
