"""The vLLM engine's parts, without vLLM's engine: rows, steps, weights, the CPU repair."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cache.config import CacheConfig
from cache.trajectory import IntArray, Provenance
from cache.tree import RolloutCache
from engine.config import EngineConfig
from engine.errors import EngineError, EngineStartError, WeightsError
from engine.protocol import GenerateRequest, SamplingParams
from engine.vllm.drafter import CacheDrafter
from engine.vllm.engine import VllmEngine
from engine.vllm.requests import generate_arguments
from engine.vllm.rows import Drafting, RowBook, RowView, request_extra
from engine.vllm.steps import AbortedError, ChunkBuilder, Step, StepQueue, most_probable
from engine.vllm.weights import ModelShapes, WeightsFile, read_tensors


def ids(*values: int) -> IntArray:
    return np.array(values, np.int32)


# What a step wrote, and what is drafted


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

    def draft(self, rows: IntArray, budgets: IntArray) -> Any:
        @dataclass
        class Found:
            tokens: IntArray
            offsets: IntArray

        tokens = [90 + j for budget in budgets.tolist() for j in range(budget)]
        offsets = np.concatenate([[0], np.cumsum(budgets)]).astype(np.int32)
        return Found(np.array(tokens, np.int32), offsets)


def view(
    name: str,
    *tokens: int,
    prompt: int = 2,
    limit: int = 20,
    stop: int = 7,
    old: tuple[int, ...] = (),
) -> RowView:
    drafting = Drafting(f"tree of {name}", limit, frozenset([stop]), ids(*old))
    return RowView(name, prompt, ids(*tokens), drafting)


def book(source: FakeSource, *, step: int = 8, row: int = 3) -> RowBook:
    return RowBook(source, max_step_tokens=step, max_draft_tokens=row)


def test_each_token_is_told_once_wherever_its_row_lies() -> None:
    source = FakeSource()
    rows = book(source)
    rows.step([view("a", 1, 2, 3), view("b", 1, 2, 4)], other_rows=0)
    rows.step([view("b", 1, 2, 4, 5, 6), view("a", 1, 2, 3, 8)], other_rows=0)
    rows.step([view("a", 1, 2, 3, 8)], other_rows=0)
    assert source.opened == [("tree of a", [1, 2]), ("tree of b", [1, 2])]
    assert source.told == {1: [3, 8], 2: [4, 5, 6]}
    rows.forget({"b"})
    assert source.closed == [1]
    assert len(rows) == 1


def test_nothing_after_a_stop_token_or_the_limit_is_told_or_drafted() -> None:
    source = FakeSource()
    views = [view("a", 1, 2, 3, 7, 5), view("b", 1, 2, 3, 4, 5, limit=4), view("c", 1, 2, 3)]
    drafts = book(source).step(views, other_rows=0)
    assert source.told == {1: [3, 7], 2: [3, 4], 3: [3]}
    assert drafts == [[], [], [90, 91, 92]]


@pytest.mark.parametrize(
    ("step", "others", "drafted"), [(8, 0, 3), (4, 0, 1), (4, 2, 0), (1, 5, 0)]
)
def test_the_budget_is_what_the_rows_of_the_step_leave(
    step: int, others: int, drafted: int
) -> None:
    views = [view("a", 1, 2, 3), view("b", 1, 2, 4)]
    drafts = book(FakeSource(), step=step).step(views, other_rows=others)
    assert [len(draft) for draft in drafts] == [drafted, drafted]


def test_a_row_follows_its_old_continuation_until_it_diverges() -> None:
    rows = book(FakeSource())
    old = (3, 4, 5, 6, 8)
    assert rows.step([view("a", 1, 2, 3, old=old)], other_rows=0) == [[4, 5, 6]]
    assert rows.step([view("a", 1, 2, 3, 4, 5, old=old)], other_rows=0) == [[6, 8]]
    assert rows.step([view("a", 1, 2, 3, 4, 5, 9, old=old)], other_rows=0) == [[90, 91, 92]]


def test_no_row_drafts_its_last_token() -> None:
    views = [view("a", 1, 2, 3, limit=5), view("b", 1, 2, 3, limit=4)]
    assert book(FakeSource()).step(views, other_rows=0) == [[90], []]


def test_the_adapter_names_rows_by_the_runners_batch() -> None:
    """Row 1 asks for no drafts, row 2 has a prompt that is not all in; then the rows move."""

    @dataclass
    class Thing:
        def __init__(self, **values: Any) -> None:
            self.__dict__.update(values)

    def request(extra: dict[str, Any] | None) -> Thing:
        params = Thing(extra_args=extra, max_tokens=10, stop_token_ids=[7])
        return Thing(prompt_token_ids=[1, 2], sampling_params=params)

    settings = {"cache": CacheConfig(min_match=1, min_probability=0.0).model_dump(mode="json")}
    drafter = CacheDrafter(Thing(additional_config={"asyncrl": settings | {"max_step_tokens": 20}}))
    drafter.load_model(None)
    tokens = np.zeros((4, 16), np.int32)
    tokens[0, :5], tokens[1, :3], tokens[2, :2] = [1, 2, 3, 4, 5], [1, 2, 3], [1, 2]
    assert drafter.propose([[5], [3], []], np.array([5, 3, 2]), tokens) == [[], [], []]
    extra = request_extra("tree", ids())
    runner = Thing(
        requests={"a": request(extra), "none": request(None), "b": request(extra)},
        input_batch=Thing(req_ids=["a", "none", "b"], num_prompt_tokens=[2, 2, 2]),
    )
    drafter.attach(runner)
    assert drafter.propose([[3, 4, 5], [3], []], np.array([5, 3, 2]), tokens) == [[], [], []]
    del runner.requests["none"]
    runner.input_batch.req_ids = ["b", "a"]
    tokens[0, :3], tokens[1, :6] = [1, 2, 3], [1, 2, 3, 4, 5, 6]
    drafts = drafter.propose([[3], [6]], np.array([3, 6]), tokens)
    assert drafts[0][:2] == [4, 5]
    assert drafts[1] == []


# Steps and chunks


def step(n: int, version: int = 0, **more: Any) -> Step:
    logprob_ids = np.arange(3 * n, dtype=np.int32).reshape(n, 3)
    return Step(logprob_ids[:, 0], logprob_ids, np.full((n, 3), -1.0, np.float32), version, **more)


def test_a_chunk_never_spans_two_versions() -> None:
    steps = [step(1, 3), step(2, 3), step(1, 4, finish_reason="length")]
    chunks = ChunkBuilder("r", 2).chunks(steps)
    assert [(len(c.tokens), c.policy_version, c.finish_reason) for c in chunks] == [
        (3, 3, None),
        (1, 4, "length"),
    ]
    assert chunks[0].tokens.tolist() == [0, 0, 3]
    assert chunks[0].topk_ids.tolist() == [[1, 2], [1, 2], [4, 5]]


@pytest.mark.parametrize(("accepted", "last"), [(3, [1, 0]), (4, [1, 1]), (9, [1, 1])])
def test_the_last_step_may_end_within_its_drafts(accepted: int, last: list[int]) -> None:
    steps = [step(1), step(3), step(2, finish_reason="stop", accepted=accepted)]
    (chunk,) = ChunkBuilder("r", 2).chunks(steps)
    assert chunk.provenance.tolist() == [0, 1, 1, 0, *last]
    assert Provenance.DRAFTED == 1


def test_top_k_is_padded_where_less_has_mass() -> None:
    given = np.array([[5, 5, 2, 1]], np.int32)
    logprobs = np.array([[-0.1, -0.1, -2.0, -np.inf]], np.float32)
    topk, values = most_probable(given, logprobs, 4)
    assert topk.tolist() == [[5, 2, -1, -1]]
    assert np.isneginf(values[0, 2:]).all()
    topk, _ = most_probable(given, logprobs, 1)
    assert topk.tolist() == [[5]]


def test_the_consumer_is_woken_for_enough_tokens_a_flush_or_an_end() -> None:
    async def scene() -> None:
        queue = StepQueue(wake_at=3)
        taker = asyncio.ensure_future(queue.take())
        queue.push(step(1))
        done, _ = await asyncio.wait([taker], timeout=0.01)
        assert not done
        queue.flush()
        assert len(await taker) == 1
        queue.push(step(2))
        queue.push(step(2))
        assert len(await queue.take()) == 2
        queue.push(step(1))
        queue.put(EngineError("gone"))
        assert len(await queue.take()) == 1
        for _ in range(2):
            with pytest.raises(EngineError, match="gone"):
                await queue.take()
        aborted = StepQueue(wake_at=1)
        aborted.put(object())
        with pytest.raises(AbortedError):
            await aborted.take()

    asyncio.run(scene())


def test_a_resumed_response_has_fresh_noise() -> None:
    def seed(given: int | None, prefix: IntArray) -> Any:
        sampling = SamplingParams(max_tokens=9, seed=given)
        request = GenerateRequest("r", "", ids(1), sampling, prefix_tokens=prefix)
        return generate_arguments(request, 10)[1]["seed"]

    seeds = [seed(5, ids()), seed(5, ids(1)), seed(6, ids()), seed(-5, ids())]
    assert len(set(seeds)) == 4
    assert all(0 <= value < 2**63 for value in seeds)
    assert seed(5, ids()) == seeds[0]
    assert seed(None, ids()) is None


# Weights


def test_weights_arrive_as_they_were_in_any_dtype() -> None:
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.randn(7).to(torch.bfloat16),
        "scalar": torch.tensor(2.0),
        "strided": torch.randn(4, 6).T,
    }
    shapes = ModelShapes({k: tuple(t.shape) for k, t in tensors.items()}, frozenset(tensors))
    file = WeightsFile()
    for version in (4, 5):
        tensors["a"] += 1
        manifest = file.write(iter(tensors.items()), version, shapes)
        got = dict(read_tensors(manifest))
        assert got.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert got[name].dtype == tensor.dtype
            assert torch.equal(got[name], tensor)
    stale = manifest.__class__(4, manifest.path, manifest.nbytes, manifest.tensors)
    with pytest.raises(ValueError, match="holds 5, not 4"):
        next(read_tensors(stale))
    file.close()
    file.close()
    with pytest.raises(OSError, match="No such file"):
        next(read_tensors(manifest))


def test_of_tied_weights_the_first_name_is_enough(tiny_qwen3: str, tiny_llama: str) -> None:
    tied = ModelShapes.of(tiny_qwen3)
    assert tied.shapes.keys() - tied.needed == {"lm_head.weight"}
    tied.check({name: tied.shapes[name] for name in tied.needed})
    with pytest.raises(WeightsError, match=r"missing weights: model.embed_tokens.weight"):
        tied.check({n: s for n, s in tied.shapes.items() if n != "model.embed_tokens.weight"})
    assert "lm_head.weight" in ModelShapes.of(tiny_llama).needed


def test_a_tensor_twice_is_refused() -> None:
    tensor = torch.zeros(1)
    with pytest.raises(WeightsError, match="'a' was given twice"):
        WeightsFile().write([("a", tensor), ("a", tensor)], 1, ModelShapes({}, frozenset()))


def test_a_directory_without_a_model_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match=str(tmp_path)):
        ModelShapes.of(str(tmp_path))
    config = EngineConfig(kind="vllm", slots=2, max_model_len=16)

    async def scene() -> None:
        engine = VllmEngine(config, str(tmp_path), cache_config=CacheConfig(), seed=0)
        with pytest.raises(EngineError, match="not started"):
            await engine.score([])
        for what in (engine.start, engine.pause):
            with pytest.raises(EngineError, match=str(tmp_path)):
                await what()
        await engine.close()
        await engine.close()

    asyncio.run(scene())


# The repair of sampling on a CPU


@pytest.mark.vllm
def test_the_repair_is_needed_here_and_works() -> None:
    """In a process of its own: importing vLLM's CPU code changes much of this one."""
    script = """
import torch
from vllm.platforms import current_platform
if current_platform.is_cpu():
    from vllm.utils import cpu_triton_utils as kernels
    from engine.vllm.cpu_sampling import apply_if_affected, expand, writes_its_output
    current_platform.import_kernels()
    original = kernels._expand_kernel_impl
    print("original writes:", writes_its_output(original))
    apply_if_affected()
    print("repaired:", kernels._expand_kernel_impl is expand)
    print("repaired writes:", writes_its_output(kernels._expand_kernel_impl))
    apply_if_affected()
    print("still:", kernels._expand_kernel_impl is expand)
    # What the original does right, integers of 8 bytes, the repair does alike.
    values, ends = torch.tensor([5, 2, 9]), torch.tensor([1, 1, 4])
    outputs = [torch.full((4,), -7), torch.full((4,), -7)]
    for kernel, output in zip((original, expand), outputs):
        kernel(output, values, ends, 9, 1)
    print("same:", outputs[0].tolist() == outputs[1].tolist() == [5, 1, 1, 1])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    facts = [line for line in done.stdout.splitlines() if ":" in line]
    if not facts:
        pytest.skip("this vLLM runs on a GPU: the repair is not for it")
    assert facts == [
        "original writes: False",
        "repaired: True",
        "repaired writes: True",
        "still: True",
        "same: True",
    ]


def test_the_cache_drafts_within_the_hooks_limits() -> None:
    """The real cache behind the book: never more than the budget, and only known tokens."""
    cache = RolloutCache(CacheConfig(min_match=1, min_probability=0.0, max_draft_tokens=3))
    rows = RowBook(cache, max_step_tokens=6, max_draft_tokens=3)
    rng = np.random.default_rng(0)
    length = dict.fromkeys("abcd", 3)
    table = {name: rng.integers(0, 5, 40).astype(np.int32) for name in "abcd"}
    for _ in range(30):
        views = [
            RowView(n, 2, table[n][: length[n]], Drafting("tree", 40, frozenset(), ids()))
            for n in rng.permutation(list("abcd"))
        ]
        drafts = rows.step(views, other_rows=0)
        lasting = sum(count < 40 for count in length.values())
        assert sum(len(draft) for draft in drafts) <= 6 - lasting
        for one in length:
            length[one] = min(length[one] + int(rng.integers(1, 3)), 40)
    cache.check()
    rows.forget(())
    assert cache.stats().rows == 0
