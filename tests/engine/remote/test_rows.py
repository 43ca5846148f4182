"""What a step of an engine generated and what is drafted for the next one."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from cache_check import check
from fake_drafting import STOP, FakeSource, FixedPlanner, ids

from asyncrl.cache.config import CacheConfig
from asyncrl.cache.tree.rollout_tree import RolloutCache
from asyncrl.engine.protocol import SamplingParams
from asyncrl.engine.remote.extras import RequestExtra
from asyncrl.engine.remote.worker.drafting import NO_SLOT, RowBook
from asyncrl.engine.remote.worker.entries import Entry
from asyncrl.rollout.trajectory import IntArray


@dataclass
class Scene:
    """A book, and a table that stands for the engine's."""

    most: int = 3
    source: FakeSource = field(default_factory=FakeSource)
    table: IntArray = field(default_factory=lambda: np.zeros((8, 40), np.int32))

    def __post_init__(self) -> None:
        self.planner = FixedPlanner(self.most)
        self.book = RowBook(self.source, self.planner)
        self.entries: dict[str, Entry] = {}

    def add(self, name: str, *, limit: int = 20, old: tuple[int, ...] = (), key: str = "") -> None:
        extra = RequestExtra(seed=1, cache_key=key or f"tree of {name}", draft=ids(*old))
        self.entries[name] = Entry(extra, SamplingParams(limit), 2, ids(1, 2), limit, (STOP,))

    def step(self, texts: dict[str, tuple[int, ...]], other_tokens: int = 0) -> list[list[int]]:
        """A step after which the rows hold these texts, in this order."""
        slots = self.book.slots(list(texts), self.entries.__getitem__)
        lengths = np.array([len(text) for text in texts.values()], np.int64)
        for row, text in enumerate(texts.values()):
            self.table[row, : len(text)] = text
        rows = np.arange(len(slots))
        drafts = self.book.draft(slots, rows, lengths, self.table, other_tokens=other_tokens)
        return [drafts.get(row, []) for row in rows.tolist()]


def test_each_token_is_told_once_wherever_its_row_lies() -> None:
    scene = Scene()
    scene.add("a")
    scene.add("b")
    scene.step({"a": (1, 2, 3), "b": (1, 2, 4)})
    scene.step({"b": (1, 2, 4, 5, 6), "a": (1, 2, 3, 8)})
    scene.step({"a": (1, 2, 3, 8)})  # b is preempted
    scene.step({"a": (1, 2, 3, 8, 9), "b": (1, 2, 4, 5, 6, 9)})
    assert scene.source.opened == [("tree of a", [1, 2]), ("tree of b", [1, 2])]
    assert scene.source.told == {1: [3, 8, 9], 2: [4, 5, 6, 9]}
    scene.book.forget({"b"})
    assert scene.source.closed == [1]
    assert len(scene.book) == 1


def test_nothing_after_a_stop_token_or_the_limit_is_told_or_drafted() -> None:
    scene = Scene()
    scene.add("a")
    scene.add("b", limit=4)
    scene.add("c")
    scene.add("d")
    drafts = scene.step(
        {"a": (1, 2, 3, STOP, 5, STOP, 6), "b": (1, 2, 3, 4, 5), "c": (1, 2, 3), "d": (1, 2, STOP)}
    )
    assert scene.source.told == {1: [3, STOP], 2: [3, 4], 3: [3], 4: [STOP]}
    assert drafts == [[], [], [90, 91, 92], []]
    # a and d are known to have ended only when they are recorded.
    assert scene.planner.asked == [([13, 17, 17], 0)]


def test_no_row_drafts_its_last_token_and_others_count_as_rows() -> None:
    scene = Scene()
    scene.add("a", limit=5)
    scene.add("b", limit=4)
    slots = np.array([NO_SLOT, *scene.book.slots("ab", scene.entries.__getitem__)], np.int64)
    scene.table[1:3, :3] = (1, 2, 3)
    lengths = np.array([9, 3, 3])
    drafts = scene.book.draft(slots, np.arange(3), lengths, scene.table, other_tokens=4)
    assert drafts == {1: [90]}
    assert scene.planner.asked == [([1, 2, 1], 4)]


def test_tokens_wait_in_the_table_until_drafts_are_wanted_or_they_are_recorded() -> None:
    """The cache is told of several steps at once, across rows that move and a stop token."""
    scene = Scene(most=0)
    scene.add("a")
    scene.add("b")
    scene.step({"a": (1, 2, 3), "b": (1, 2, 4)})
    scene.step({"b": (1, 2, 4, 5, 6), "a": (1, 2, 3, 8)})
    assert scene.source.told == {1: [], 2: []}
    scene.planner.most = 1
    assert scene.step({"a": (1, 2, 3, 8, STOP), "b": (1, 2, 4, 5, 6, 9)}) == [[], [90]]
    assert scene.source.told == {1: [3, 8, STOP], 2: [4, 5, 6, 9]}
    scene.planner.most = 0
    scene.step({"b": (1, 2, 4, 5, 6, 9, 10, 11)})
    scene.book.record(
        scene.book.slots("b", scene.entries.__getitem__), np.array([0]), np.array([8]), scene.table
    )
    assert scene.source.told[2] == [4, 5, 6, 9, 10, 11]


def test_a_row_follows_its_old_text_and_finds_it_again() -> None:
    scene = Scene()
    old = (3, 4, 5, 6, 8, 9, 10, 11)
    scene.add("a", old=old)
    scene.add("b")
    assert scene.step({"a": (1, 2, 3), "b": (1, 2, 5)}) == [[4, 5, 6], [90, 91, 92]]
    assert scene.step({"b": (1, 2, 5, 3), "a": (1, 2, 3, 4, 5)})[1] == [6, 8, 9]
    assert scene.step({"a": (1, 2, 3, 4, 5, 30)}) == [[8, 9, 10]], "a substitution"
    # The next token differs as well: three that agree bring the old text back.
    text = (1, 2, 3, 4, 5, 30, 31, 8)
    assert scene.step({"a": text[:-1]}) == [[90, 91, 92]]
    assert scene.step({"a": text}) == [[90, 91, 92]]
    assert scene.step({"a": (*text, 9)}) == [[90, 91, 92]]
    assert scene.step({"a": (*text, 9, 10)}) == [[11]]


def test_what_became_of_drafts_is_told_with_their_estimates() -> None:
    """An engine may feed less than was proposed; a row without a slot is nobody's draft."""
    scene = Scene()
    scene.add("a")
    scene.add("b")
    scene.step({"a": (1, 2, 3), "b": (1, 2, 4)})
    b, a = scene.book.slots("ba", scene.entries.__getitem__)
    slots = np.array([b, NO_SLOT, a], np.int64)
    scene.book.judge(slots, np.array([3, 1, 2]), np.array([1, 1, 2]))
    assert scene.planner.judged == [
        ([0.5, 0.25, 0.125, 0.5, 0.25], [True, False, False, True, True])
    ]


def test_the_cache_drafts_for_many_rows_that_come_and_go() -> None:
    """The real cache behind the book, against a table kept next to it."""
    cache = RolloutCache(CacheConfig(min_match=1, min_probability=0.0, max_draft_tokens=3))
    scene = Scene()
    scene.book = RowBook(cache, FixedPlanner(3))
    rng = np.random.default_rng(0)
    names = [f"r{i}" for i in range(40)]
    text = {name: tuple(rng.integers(10, 15, 38).tolist()) for name in names}
    length = dict.fromkeys(names, 3)
    for name in names:
        scene.add(name, key="tree", limit=38)
    scene.table = np.zeros((64, 40), np.int32)
    drafted = 0
    for _ in range(40):
        present = [n for n in rng.permutation(names) if rng.random() < 0.7]
        for name in present:
            length[name] = min(length[name] + int(rng.integers(1, 4)), 38)
        drafts = scene.step({name: text[name][: length[name]] for name in present})
        assert all(len(d) <= 3 for d in drafts)
        assert all(not d for n, d in zip(present, drafts, strict=True) if length[n] >= 37)
        drafted += sum(map(len, drafts))
    assert drafted > 500
    scene.step({name: text[name][: length[name]] for name in names})
    slots = scene.book.slots(names, scene.entries.__getitem__)
    lengths = np.array([length[name] for name in names])
    scene.book.record(slots, np.arange(len(names)), lengths, scene.table)
    for name, slot in scene.book._slot_of.items():
        stored = cache.stored_rollout(int(scene.book._handle[slot]))
        if stored is not None:
            assert stored.tokens[-(length[name] - 2) :].tolist() == list(
                text[name][2 : length[name]]
            )
    check(cache)
    scene.book.forget(())
    assert cache.stats().rows == 0
