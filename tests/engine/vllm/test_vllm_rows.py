"""What a step of vLLM generated and what is drafted for the next one, without vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cache.config import CacheConfig
from cache.place import CachePlace, to_json
from cache.tree import Drafts, RolloutCache
from engine.drafting.planner import DraftPlanner
from engine.protocol import SamplingParams
from engine.vllm.extras import DrafterSettings, RequestExtra
from engine.vllm.worker.batch import Entry
from engine.vllm.worker.drafter import CacheDrafter
from engine.vllm.worker.rows import NO_SLOT, RowBook
from rollout.trajectory import FloatArray, IntArray

STOP = 7


def ids(*values: int) -> IntArray:
    return np.array(values, np.int32)


@dataclass
class FakeSource:
    """Writes down what it is told and drafts 90, 91, ... for everyone."""

    told: dict[int, list[int]] = field(default_factory=dict)
    opened: list[tuple[str, list[int]]] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)

    def open(self, key: str, context: IntArray) -> int:
        self.opened.append((key, context.tolist()))
        self.told[len(self.opened)] = []
        return len(self.opened)

    def close(self, row: int) -> None:
        self.closed.append(row)

    def extend(self, rows: IntArray, tokens: IntArray, offsets: IntArray) -> None:
        for i, row in enumerate(rows.tolist()):
            self.told[row] += tokens[offsets[i] : offsets[i + 1]].tolist()

    def advance(self, policy_version: int) -> None: ...

    def draft(
        self,
        rows: IntArray,
        budgets: IntArray,
        *,
        branching: bool = False,
        min_probability: float = 0.0,
    ) -> Drafts:
        assert not branching
        assert len(rows) == len(budgets)
        offsets = np.concatenate([[0], np.cumsum(budgets)]).astype(np.int32)
        tokens = [90 + j for budget in budgets.tolist() for j in range(budget)]
        guesses = [0.5 ** (j + 1) for budget in budgets.tolist() for j in range(budget)]
        parents = [j - 1 for budget in budgets.tolist() for j in range(budget)]
        return Drafts(
            np.array(tokens, np.int32),
            np.array(parents, np.int32),
            offsets,
            np.array(guesses, np.float32),
        )


class FixedPlanner(DraftPlanner):
    """Every row gets `most` tokens; remembers what it is told."""

    def __init__(self, most: int) -> None:
        super().__init__(max_step_tokens=1000, max_draft_tokens=most)
        self.most = most
        self.asked: list[tuple[list[int], int]] = []
        self.judged: list[tuple[list[float], list[bool]]] = []
        self.observed: list[tuple[int, int, int, float]] = []

    def ask(self, left: IntArray, *, other_tokens: int = 0) -> tuple[IntArray, float]:
        self.asked.append((left.tolist(), other_tokens))
        return np.minimum(left - 1, self.most).astype(np.int32), 0.0

    def choose(
        self, path_probabilities: FloatArray, offsets: IntArray, *, rows: int, other_tokens: int = 0
    ) -> IntArray:
        assert len(offsets) == rows + 1
        return np.diff(offsets).astype(np.int32)

    def judge(self, path_probabilities: FloatArray, accepted: NDArray[np.bool_]) -> None:
        self.judged.append((path_probabilities.tolist(), accepted.tolist()))

    def observe(self, *, tokens: int, rows: int, context: int, seconds: float) -> None:
        self.observed.append((tokens, rows, context, seconds))


@dataclass
class Scene:
    """A book, and a table that stands for vLLM's."""

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
        slots = np.array([self.book.slot(name, self.entries[name]) for name in texts], np.int64)
        lengths = np.array([len(text) for text in texts.values()], np.int64)
        for row, text in enumerate(texts.values()):
            self.table[row, : len(text)] = text
        rows = np.arange(len(slots))
        self.book.record(slots, rows, lengths, self.table)
        drafts = self.book.draft(slots, lengths, other_tokens=other_tokens)
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
    assert scene.planner.asked == [([17], 0)]


def test_no_row_drafts_its_last_token_and_others_count_as_rows() -> None:
    scene = Scene()
    scene.add("a", limit=5)
    scene.add("b", limit=4)
    slots = np.array([NO_SLOT, *(scene.book.slot(n, scene.entries[n]) for n in "ab")], np.int64)
    scene.table[1:3, :3] = (1, 2, 3)
    lengths = np.array([9, 3, 3])
    scene.book.record(slots[1:], np.array([1, 2]), lengths[1:], scene.table)
    assert scene.book.draft(slots, lengths, other_tokens=4) == {1: [90]}
    assert scene.planner.asked == [([1, 2, 1], 4)]


def test_a_row_follows_its_old_text_and_finds_it_again() -> None:
    scene = Scene()
    old = (3, 4, 5, 6, 8, 9, 10, 11)
    scene.add("a", old=old)
    scene.add("b")
    assert scene.step({"a": (1, 2, 3), "b": (1, 2, 5)}) == [[4, 5, 6], [90, 91, 92]]
    assert scene.step({"b": (1, 2, 5, 3), "a": (1, 2, 3, 4, 5)})[1] == [6, 8, 9]
    assert scene.step({"a": (1, 2, 3, 4, 5, 30)}) == [[90, 91, 92]]
    # One token of the old text is missing in the new one: three that agree bring it back.
    text = (1, 2, 3, 4, 5, 30, 8)
    assert scene.step({"a": text}) == [[90, 91, 92]]
    assert scene.step({"a": (*text, 9)}) == [[90, 91, 92]]
    assert scene.step({"a": (*text, 9, 10)}) == [[11]]


def test_what_became_of_drafts_is_told_with_their_estimates() -> None:
    """vLLM may feed less than was proposed; a row without a slot is nobody's draft."""
    scene = Scene()
    scene.add("a")
    scene.add("b")
    scene.step({"a": (1, 2, 3), "b": (1, 2, 4)})
    slots = np.array([scene.book.slot("b", scene.entries["b"]), NO_SLOT, 0], np.int64)
    slots[2] = scene.book.slot("a", scene.entries["a"])
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
    for name, slot in scene.book._slot_of.items():
        stored = cache.stored_rollout(int(scene.book._handle[slot]))
        if stored is not None:
            assert stored.tokens[-(length[name] - 2) :].tolist() == list(
                text[name][2 : length[name]]
            )
    cache.check()
    scene.book.forget(())
    assert cache.stats().rows == 0


# The adapter


class Clockless:
    """vLLM's model runner, as far as the adapter looks at it."""

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}
        self.num_prompt_logprobs: dict[str, int] = {}
        self.model_config = SimpleNamespace(is_hybrid=False)
        self.scheduler_config = SimpleNamespace(max_num_batched_tokens=100)
        self.speculative_config: Any = "set"
        self.seen: list[Any] = []
        self.input_batch = SimpleNamespace(
            req_ids=[],
            num_prompt_tokens=np.full(4, 2),
            num_computed_tokens_cpu=np.zeros(4, np.int32),
            num_tokens_no_spec=np.zeros(4, np.int32),
        )

    def add(self, name: str, key: str) -> None:
        params = SimpleNamespace(
            extra_args=RequestExtra(seed=1, cache_key=key).to_extra_args(),
            max_tokens=10,
            stop_token_ids=[STOP],
            temperature=1.0,
            top_p=1.0,
        )
        self.requests[name] = SimpleNamespace(prompt_token_ids=[1, 2], sampling_params=params)

    def execute_model(self, scheduler_output: Any) -> None:
        self._prepare_inputs(scheduler_output)

    def _prepare_inputs(self, scheduler_output: Any) -> None:
        self.seen.append(self.speculative_config)

    def take_draft_token_ids(self) -> Any:
        return SimpleNamespace(req_ids=["all"], draft_token_ids=[["of"], ["them"]])


def scheduled(fed: dict[str, int], drafts: dict[str, list[int]] | None = None) -> Any:
    return SimpleNamespace(
        num_scheduled_tokens=fed,
        scheduled_spec_decode_tokens=drafts or {},
        scheduled_cached_reqs=SimpleNamespace(req_ids=list(fed)),
        total_num_scheduled_tokens=sum(fed.values()),
    )


@pytest.fixture
def adapter() -> tuple[CacheDrafter, Clockless, FixedPlanner]:
    from engine.vllm.worker.batch import Batch
    from engine.vllm.worker.sampling import CoreSampler

    settings = DrafterSettings(
        cache=CacheConfig(min_match=1, min_probability=0.0).model_dump(mode="json"),
        place=to_json(CachePlace()),
        fixed_step_tokens=20,
        max_step_tokens=100,
    )
    drafter = CacheDrafter(SimpleNamespace(additional_config=settings.to_config()))
    drafter.load_model(None)
    planner = drafter.planner = drafter._book._planner = FixedPlanner(3)
    runner = Clockless()
    batch = Batch(runner)
    drafter.attach(runner, batch, CoreSampler(runner, batch))
    return drafter, runner, planner


def test_the_adapter_names_rows_by_the_runners_batch(
    adapter: tuple[CacheDrafter, Clockless, FixedPlanner],
) -> None:
    """Row 1 asks for no drafts, row 2 has a prompt that is not all in; then the rows move."""
    drafter, runner, planner = adapter
    for name, key in (("a", "tree"), ("none", ""), ("b", "tree")):
        runner.add(name, key)
    batch = runner.input_batch
    batch.req_ids = ["a", "none", "b"]
    tokens = np.zeros((4, 16), np.int32)
    tokens[0, :5], tokens[1, :3], tokens[2, :2] = [1, 2, 3, 4, 5], [1, 2, 3], [1, 2]
    batch.num_tokens_no_spec[:3] = 5, 3, 2
    assert drafter.propose([[3, 4, 5], [3], []], batch.num_tokens_no_spec, tokens) == [[], [], []]
    assert planner.asked == [([7, 1], 2)]
    assert runner.take_draft_token_ids() is None
    del runner.requests["none"]
    batch.req_ids = ["b", "a"]
    tokens[0, :3], tokens[1, :6] = [1, 2, 3], [1, 2, 3, 4, 5, 6]
    batch.num_tokens_no_spec[:2] = 3, 6
    drafts = drafter.propose([[3], [6]], batch.num_tokens_no_spec, tokens)
    assert drafts == [[4, 5], []] or drafts == [[4, 5, 6], []]
    taken = runner.take_draft_token_ids()
    assert (taken.req_ids, taken.draft_token_ids) == (["b"], [drafts[0]])


def test_a_step_without_drafts_is_prepared_as_a_plain_one(
    adapter: tuple[CacheDrafter, Clockless, FixedPlanner],
) -> None:
    _, runner, _ = adapter
    runner.execute_model(scheduled({"a": 1}))
    runner.execute_model(scheduled({"a": 3}, {"a": [4, 5]}))
    assert runner.seen == [None, "set"]
    assert runner.speculative_config == "set"


def test_only_whole_steps_of_decoding_are_timed(
    adapter: tuple[CacheDrafter, Clockless, FixedPlanner],
) -> None:
    drafter, runner, planner = adapter
    runner.add("a", "tree")
    batch = runner.input_batch
    batch.req_ids = ["a"]
    tokens = np.tile(np.arange(16, dtype=np.int32) + 10, (4, 1))

    def step(now: float, length: int, fed: int = 1, drafts: tuple[int, ...] = ()) -> None:
        drafter.begin(scheduled({"a": fed}, {"a": list(drafts)} if drafts else {}), now)
        batch.num_tokens_no_spec[0] = length
        drafter.propose([[1]], batch.num_tokens_no_spec, tokens)
        if drafter._taken is not None:
            drafter._taken.ended = now + 0.9

    step(0.0, 3)
    step(1.0, 5, 3, (8, 9))
    step(2.0, 6, 40)  # mostly a prompt
    step(3.0, 7)
    step(9.0, 8)  # after a pause
    runner.num_prompt_logprobs["a"] = 1
    step(10.0, 9)  # scores as well
    runner.num_prompt_logprobs.clear()
    step(11.0, 10)
    drafter.begin(scheduled({}), 12.0)
    assert planner.observed == [(1, 1, 3, 1.0), (3, 1, 5, 1.0), (1, 1, 8, 1.0), (1, 1, 10, 1.0)]
