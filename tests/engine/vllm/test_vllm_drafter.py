"""The adapter to vLLM's drafting hook, against a stand-in for its model runner."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_drafting import STOP, FakeSource, FixedPlanner

from asyncrl.cache.config import CacheConfig
from asyncrl.cache.sharing.cache_setup import CachePlace, to_json
from asyncrl.engine.remote.extras import DrafterSettings, RequestExtra
from asyncrl.engine.remote.worker.ranks import Ranks
from asyncrl.engine.vllm.remote import CoreSettings, to_extra_args
from asyncrl.engine.vllm.worker.drafter import CacheDrafter, prepare_plainly
from asyncrl.engine.vllm.worker.sampling import RunnerBatch


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
            token_ids_cpu=np.zeros((4, 16), np.int32),
        )

    def add(self, name: str, key: str) -> None:
        params = SimpleNamespace(
            extra_args=to_extra_args(RequestExtra(seed=1, cache_key=key)),
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


def scheduled(
    fed: dict[str, int], drafts: dict[str, list[int]] | None = None, finished: tuple[str, ...] = ()
) -> Any:
    return SimpleNamespace(
        finished_req_ids=set(finished),
        num_scheduled_tokens=fed,
        scheduled_spec_decode_tokens=drafts or {},
        scheduled_cached_reqs=SimpleNamespace(req_ids=list(fed)),
        total_num_scheduled_tokens=sum(fed.values()),
    )


def vllm_config_of(settings: DrafterSettings, vocabulary: int = 10) -> Any:
    """What the drafter reads of vLLM's configuration."""
    return SimpleNamespace(
        additional_config=CoreSettings(4, settings).to_config(),
        model_config=SimpleNamespace(get_vocab_size=lambda: vocabulary),
    )


@pytest.fixture
def adapter() -> tuple[CacheDrafter, Clockless, FixedPlanner]:
    from asyncrl.engine.vllm.worker.sampling import CoreSampler

    settings = DrafterSettings(
        cache=CacheConfig(min_match=1, min_probability=0.0).model_dump(mode="json"),
        place=to_json(CachePlace()),
        fixed_step_tokens=20,
        max_step_tokens=100,
        logits_bytes=1 << 20,
    )
    drafter = CacheDrafter(vllm_config_of(settings))
    drafter.load_model(None)
    planner = drafter.planner = drafter.timer.planner = drafter._book._planner = FixedPlanner(3)
    runner = Clockless()
    batch = RunnerBatch(runner)
    prepare_plainly(runner)
    drafter.attach(runner, batch, CoreSampler(runner, batch, Ranks(), 1 << 20))
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
        drafter.timer.clock = lambda: now + 0.9
        drafter.begin(scheduled({"a": fed}, {"a": list(drafts)} if drafts else {}), now)
        batch.num_tokens_no_spec[0] = length
        drafter.propose([[1]], batch.num_tokens_no_spec, tokens)

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


def test_what_a_request_generated_is_kept_when_it_ends_and_when_the_weights_change(
    adapter: tuple[CacheDrafter, Clockless, FixedPlanner],
) -> None:
    """No drafts were wanted, so the cache was not told before; the weights label the tokens."""
    drafter, runner, planner = adapter
    planner.most = 0
    source = drafter._book._source = FakeSource()
    told_at: list[dict[int, list[int]]] = []
    drafter._cache.advance = lambda _: told_at.append(  # type: ignore[method-assign]
        {row: list(tokens) for row, tokens in source.told.items()}
    )
    for name in "ab":
        runner.add(name, "tree")
    batch = runner.input_batch
    batch.req_ids = ["a", "b"]
    batch.token_ids_cpu[:2, :6] = [1, 2, 3, 4, 5, 6]
    batch.num_tokens_no_spec[:2] = 4, 5
    assert drafter.propose([[4], [5]], batch.num_tokens_no_spec, batch.token_ids_cpu) == [[], []]
    assert source.told == {1: [], 2: []}
    drafter.begin(scheduled({"b": 1}, finished=("a", "never seen")), 0.0)
    assert source.told == {1: [3, 4], 2: []}
    drafter.advance(1)
    assert told_at == [{1: [3, 4], 2: [3, 4, 5]}]


def test_drafts_do_not_exceed_the_memory_for_logits() -> None:
    """100 MB of float32 logits are 164 rows of 151,936: no step drafts beyond them."""
    settings = DrafterSettings(
        cache=CacheConfig().model_dump(mode="json"),
        place=to_json(CachePlace()),
        fixed_step_tokens=None,
        max_step_tokens=4096,
        logits_bytes=100_000_000,
    )
    planner = CacheDrafter(vllm_config_of(settings, 151_936)).planner
    assert not planner.declines(163)
    assert planner.declines(164)
