"""The cache against a naive model of it, and under budgets it cannot keep to easily."""

import math
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.config import CacheConfig
from cache.tree import RolloutCache

KEYS = ("a", "b")
PROMPTS = {"a": [7, 8, 9, 7, 8, 9, 5], "b": [2]}


@dataclass
class Sequence:
    tokens: list[int]
    """Head of `max_match` tokens, then the response."""
    ordinal: int


@dataclass
class Row:
    key: str
    context: list[int]
    own: Sequence | None = None


@dataclass
class Naive:
    """The same rules in plain Python, looking at every position of every rollout."""

    config: CacheConfig
    trees: dict[str, list[Sequence]] = field(default_factory=lambda: defaultdict(list))
    rows: dict[int, Row] = field(default_factory=dict)

    def tail(self, row: Row) -> list[int]:
        size = self.config.max_match
        return ([-1] * size + row.context)[-size:]

    def extend(self, handle: int, tokens: list[int]) -> None:
        row = self.rows[handle]
        if tokens and row.own is None:
            row.own = Sequence(self.tail(row), len(self.trees[row.key]) + 1)
            self.trees[row.key].append(row.own)
        if row.own:
            row.own.tokens += tokens
        row.context += tokens

    def candidates(self, row: Row, past: list[int]) -> tuple[list[tuple[list[int], float]], int]:
        """Continuations with weights, and the longest match's length."""
        size = self.config.max_match
        found, echo = [], []
        for sequence in self.trees[row.key]:
            for at in range(size - 1, len(sequence.tokens) - 1):
                length = 0
                while length < size and sequence.tokens[at - length] == past[-1 - length]:
                    length += 1
                rest = sequence.tokens[at + 1 :]
                if sequence is row.own:
                    echo = rest if length == size else echo
                elif length >= self.config.min_match:
                    age = len(self.trees[row.key]) - sequence.ordinal
                    found.append((rest, 0.5 ** (age / self.config.recency_half_life), length))
        if not found:
            return ([(echo, 0.5)], size) if echo else ([], 0)
        longest = max(length for _, _, length in found)
        if longest == size:
            found = [item for item in found if item[2] == size]
        return [(rest, w * 0.25 ** (longest - n)) for rest, w, n in found], longest

    def judge(
        self, handle: int, budget: int, tokens: list[int], probabilities: list[float]
    ) -> None:
        """Assert that a draft is one that the rules allow (ties may fall either way)."""
        config, row = self.config, self.rows[handle]
        budget = min(budget, config.max_draft_tokens)
        assert len(tokens) <= budget
        past, path, done = self.tail(row), 1.0, 0
        alive: list[tuple[list[int], float]] = []
        matched = 0
        while True:
            alive = [item for item in alive if item[0]]
            if not alive:
                alive, matched = self.candidates(row, past)
            if done == budget or not alive:
                break
            votes: dict[int, float] = defaultdict(float)
            for rest, weight in alive:
                votes[rest[0]] += weight
            total = sum(votes.values())
            best = max(votes.values())
            p = best / (total + config.doubt * config.max_match / matched)
            path *= p
            if path < config.min_probability * (1 - 1e-5) or done == len(tokens):
                assert path < config.min_probability * (1 + 1e-5), "stopped too early"
                break
            assert math.isclose(votes[tokens[done]], best, rel_tol=1e-5)
            assert math.isclose(probabilities[done], path, rel_tol=1e-4)
            alive = [(rest[1:], w) for rest, w in alive if rest[0] == tokens[done]]
            past.append(tokens[done])
            matched = min(matched + 1, config.max_match)
            done += 1
        assert done == len(tokens), "went on too long"


configs = st.builds(
    lambda low, more, probability, half_life, doubt: CacheConfig(
        max_bytes=1 << 20,
        min_match=low,
        max_match=low + more,
        min_probability=probability,
        recency_half_life=half_life,
        doubt=doubt,
        max_draft_tokens=12,
        max_candidates=256,
    ),
    st.integers(1, 3),
    st.integers(0, 4),
    st.sampled_from([0.0, 0.1, 0.5]),
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
    ),
    min_size=5,
    max_size=30,
)


@settings(max_examples=500, deadline=None)
@given(configs, actions)
def test_drafts_are_those_of_the_naive_model(config: CacheConfig, steps: list[tuple]) -> None:
    cache, model = RolloutCache(config), Naive(config)
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
            drafts = cache.draft(np.array(handles, np.int32), budgets)
            for at, handle in enumerate(handles):
                span = slice(drafts.offsets[at], drafts.offsets[at + 1])
                found = drafts.tokens[span].tolist(), drafts.path_probabilities[span].tolist()
                model.judge(handle, arguments[0], *found)
        elif handles:
            handle = handles[arguments[0] % len(handles)]
            cache.close(handle)
            del model.rows[handle]
    cache.check()
    stored = sum(len(s.tokens) - config.max_match for t in model.trees.values() for s in t)
    assert cache.stats().tokens == stored


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(14, 17), st.integers(13, 16), st.integers(1, 40))
def test_memory_stays_under_its_budget_for_ever(
    seed: int, total: int, prompt: int, max_match: int
) -> None:
    rng = np.random.default_rng(seed)
    config = CacheConfig(
        max_bytes=1 << total,
        max_bytes_per_prompt=1 << prompt,
        min_match=1 + max_match // 4,
        max_match=max_match,
    )
    cache = RolloutCache(config)
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
        cache.draft(np.array(rows, np.int32), np.full(len(rows), 8))
        cache.check()
        stats = cache.stats()
        assert stats.bytes <= config.max_bytes
        gone = stats.evicted_tokens + stats.refused_tokens
        assert stats.tokens + gone <= stats.inserted_tokens
    for row in rows:
        cache.close(row)
    cache.check()
