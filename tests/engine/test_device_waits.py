"""What makes the host wait for the device in a step, counted: docs/trainer.md has the same table.

Every count is exact, so a change is seen either way. A wait costs more than its own time: nothing
that was to be prepared meanwhile overlaps with what the device computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fake_device import NONZERO, READ, SYNCHRONIZE, TO_DEVICE, TO_HOST, FakeDevice, fake_kernels
from tiny_models import make_qwen3, save
from torch import nn
from tree_sources import RandomTrees

from asyncrl.cache.config import CacheConfig
from asyncrl.cache.sharing.cache_setup import CachePlace, to_json
from asyncrl.engine.drafting.trees import TokenTrees, no_trees, plant
from asyncrl.engine.protocol import SamplingParams
from asyncrl.engine.remote.extras import DrafterSettings, RequestExtra
from asyncrl.engine.remote.worker.entries import Entry
from asyncrl.engine.remote.worker.ranks import Ranks
from asyncrl.engine.remote.worker.shadow_model import ShadowModel
from asyncrl.engine.sglang.messages import Gauges
from asyncrl.engine.sglang.worker.drafts.tree_drawing import TreeDrawing
from asyncrl.engine.sglang.worker.drafts.verify_step import lay_out
from asyncrl.engine.sglang.worker.drawing import StepDrawing
from asyncrl.engine.sglang.worker.requests import Requests, SchedulerBatch
from asyncrl.engine.sglang.worker.steps import Outbox, Reporting
from asyncrl.engine.vllm.remote import CoreSettings, to_extra_args
from asyncrl.engine.vllm.worker.drafter import CacheDrafter
from asyncrl.engine.vllm.worker.sampling import CoreSampler, RunnerBatch
from asyncrl.rollout.trajectory import Provenance, SampleId, Trajectory, TrajectoryBuilder
from asyncrl.trainer import scoring
from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.trainer.learner import Learner
from asyncrl.wire.weights.fingerprint import fingerprint

BUDGETS: dict[str, dict[str, int]] = {
    "vLLM: a decode step without drafts": {},
    "vLLM: a decode step with drafts": {TO_DEVICE: 2},
    "vLLM: choosing drafts": {},
    "SGLang: a decode step of an engine without drafts": {},
    "SGLang: a step in which nothing is drafted": {TO_DEVICE: 3},
    "SGLang: a step with trees": {TO_DEVICE: 4},
    "vLLM and SGLang: installing staged weights": {SYNCHRONIZE: 1},
    "a fingerprint of two tensors": {TO_DEVICE: 2, TO_HOST: 1},
    "trainer: adding a group": {},
    "trainer: an optimizer step": {TO_HOST: 1, READ: 1},
}
PAGE = Path(__file__).parents[2] / "docs" / "trainer.md"
VOCAB = 12
ROWS = 1200
"""More than what CUDA copies from pageable memory without waiting."""
DEVICE = torch.device("cuda", 0)


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    with FakeDevice() as device, fake_kernels():
        yield device


def sampler(rows: int) -> CoreSampler:
    """Of a vLLM with so many requests."""
    params = SimpleNamespace(
        extra_args=to_extra_args(RequestExtra(seed=3, ticket=7, top_k_logprobs=4)), max_tokens=40,
        stop_token_ids=[], temperature=1.0, top_p=1.0,
    )  # fmt: skip
    names = [f"r{i}" for i in range(rows)]
    request = SimpleNamespace(prompt_token_ids=[1, 2, 3], sampling_params=params)
    runner = SimpleNamespace(
        requests=dict.fromkeys(names, request),
        input_batch=SimpleNamespace(
            req_ids=names, num_reqs=rows, num_tokens_no_spec=np.full(rows, 3, np.int32)
        ),
    )
    made = CoreSampler(runner, RunnerBatch(runner), Ranks(), 1 << 20)
    made._table, made._result = (lambda *parts: parts), (lambda **fields: SimpleNamespace(**fields))
    return made


def test_vllm_without_drafts(device: FakeDevice) -> None:
    """Asynchronous scheduling depends on it: the host prepares the next step meanwhile."""
    draw, logits = sampler(ROWS), torch.zeros(ROWS, VOCAB, device=DEVICE)
    device.waits.clear()
    out = draw(logits, None)
    assert device.waits == BUDGETS["vLLM: a decode step without drafts"] == {}
    _, logprobs, tickets = out.logprobs_tensors
    assert (out.sampled_token_ids.device, logprobs.device) == (DEVICE, DEVICE)
    assert tickets.tolist() == [7] * ROWS
    assert tickets.device.type == "cpu", "nothing there reads them"


def test_vllm_with_drafts(device: FakeDevice) -> None:
    """Copied: where drafts lie, and how many each row has."""
    draw, fed = sampler(3), [2, 0, 1]
    logits = torch.zeros(3 + sum(fed), VOCAB, device=DEVICE)
    drafts = torch.zeros(sum(fed), dtype=torch.int64, device=DEVICE)
    device.waits.clear()
    draw(
        logits,
        SimpleNamespace(max_spec_len=2, num_draft_tokens=fed, draft_token_ids=drafts),
    )
    assert device.waits == BUDGETS["vLLM: a decode step with drafts"]


def sglang(rows: int) -> tuple[SchedulerBatch, Reporting]:
    """A batch of so many requests, and where its tables go."""
    requests = Requests()
    names = [f"r{i}" for i in range(rows)]
    for name in names:
        extra = RequestExtra(seed=3, ticket=1, top_k_logprobs=2)
        prompt = np.array([1, 2], np.int32)
        requests.add(name, Entry(extra, SamplingParams(9), 2, prompt, 11, ()))
    batch = SchedulerBatch(requests, 4)
    reqs: Any = [SimpleNamespace(rid=name) for name in names]
    batch.begin(SimpleNamespace(reqs=reqs, seq_lens_cpu=torch.full((rows,), 2)))
    return batch, Reporting(requests, Outbox(lambda _: None, Gauges, 1))


def test_sglang_without_drafts(device: FakeDevice) -> None:
    batch, reporting = sglang(ROWS)
    draw = StepDrawing(batch, Ranks(), reporting, 1 << 20)
    logits = torch.zeros(ROWS, VOCAB, device=DEVICE)
    device.waits.clear()
    tokens, _ = draw(logits)
    assert device.waits == BUDGETS["SGLang: a decode step of an engine without drafts"] == {}
    assert tokens.device == DEVICE


@pytest.mark.parametrize("drafted", [False, True])
def test_sglang_in_a_tree_step(drafted: bool, device: FakeDevice) -> None:
    """Also where nothing is drafted: a step of an engine with drafts."""
    rows = 4
    trees: TokenTrees = no_trees(rows)
    if drafted:
        source, most = RandomTrees(VOCAB, 1), np.full(rows, 5, np.int32)
        handles = np.array([source.open("k", most) for _ in range(rows)], np.int32)
        trees = plant(source.draft(handles, most, branching=True), most, most, VOCAB)
    batch, reporting = sglang(rows)
    draw = TreeDrawing(batch, Ranks(), reporting, 1 << 20)
    feed = lay_out(trees, np.ones(rows, np.int32), np.full(rows, 2), ragged=False)
    assert (feed.real is not None) == drafted
    logits = torch.zeros(len(feed.tokens), VOCAB, device=DEVICE)
    device.waits.clear()
    draw(logits, trees, feed)
    kind = "a step with trees" if drafted else "a step in which nothing is drafted"
    assert device.waits == BUDGETS[f"SGLang: {kind}"]


def test_the_drafter(device: FakeDevice) -> None:
    """It works on what vLLM has brought to the host."""
    settings = DrafterSettings(
        cache=CacheConfig(min_match=1, min_probability=0.0).model_dump(mode="json"),
        place=to_json(CachePlace()),
        fixed_step_tokens=40,
        max_step_tokens=100,
        logits_bytes=1 << 20,
    )
    drafter = CacheDrafter(
        SimpleNamespace(
            additional_config=CoreSettings(4, settings).to_config(),
            model_config=SimpleNamespace(get_vocab_size=lambda: VOCAB),
        )
    )
    drawing = sampler(2)
    runner = drawing._runner
    for request in runner.requests.values():
        request.sampling_params.extra_args = to_extra_args(RequestExtra(seed=1, cache_key="k"))
    runner.execute_model = runner.take_draft_token_ids = None
    drafter.attach(runner, drawing._batch, drawing)
    text = np.tile(np.array([1, 2, 3, 4, 5, 1, 2, 3], np.int32), (2, 1))
    lengths = runner.input_batch.num_tokens_no_spec
    lengths[:] = 8
    drafter.propose([[4, 5, 1, 2, 3]] * 2, lengths, text)
    text = np.concatenate([text, [[4], [4]]], axis=1).astype(np.int32)
    lengths[:] = 9
    drafts = drafter.propose([[4]] * 2, lengths, text)
    assert any(drafts), "what it saw before"
    assert device.waits == BUDGETS["vLLM: choosing drafts"]


@pytest.mark.parametrize("staged", ["host", "device"])
def test_an_installation(staged: str, device: FakeDevice) -> None:
    """One wait for all copies together, after which the twin is loaded again."""
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300)).to(DEVICE)
    twin = ShadowModel(model, DEVICE if staged == "device" else torch.device("cpu"))
    for parameter in twin.model.parameters():
        parameter.data.fill_(2.0)
    device.waits.clear()
    with torch.inference_mode():
        twin.install()
    assert device.waits == BUDGETS["vLLM and SGLang: installing staged weights"]
    assert all((one == 2.0).all().item() for one in model.parameters())


def test_a_fingerprint(device: FakeDevice) -> None:
    """Of two tensors: which columns of each are looked at, and one copy of all digests."""
    model = nn.Linear(300, 300).to(DEVICE)
    device.waits.clear()
    fingerprint(model.named_parameters())
    assert device.waits == BUDGETS["a fingerprint of two tensors"]


def group(number: int) -> list[Trajectory]:
    """Two answers of different lengths."""
    out: list[Trajectory] = []
    for sample in range(2):
        tokens = np.arange(5 + sample, dtype=np.int32)
        logprobs = np.full(len(tokens), -2.0, np.float32)
        builder = TrajectoryBuilder(SampleId(number, sample), "p", np.array([1, 2], np.int32))
        builder.append(
            tokens=tokens,
            logprobs=logprobs,
            topk_ids=tokens[:, None],
            topk_logprobs=logprobs[:, None],
            noise_seeds=np.full(len(tokens), 17, np.uint64),
            provenance=np.full(len(tokens), Provenance.SAMPLED, np.uint8),
            policy_version=0,
        )
        out.append(builder.finish("stop"))
    return out


def test_a_step_of_the_trainer(
    device: FakeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups are added while the device computes the ones before; the step itself waits twice."""
    monkeypatch.setattr(scoring, "resolve_device", lambda _: DEVICE)
    path = save(make_qwen3(1), tmp_path)
    learner = Learner(
        TrainerConfig(device="cuda", dtype="float32"), str(path), group_size=2, seed=1
    )
    device.waits.clear()
    for number in range(3):
        learner.add_groups([(group(number), np.array([0.0, 1.0]))])
    assert device.waits == BUDGETS["trainer: adding a group"]
    metrics = learner.step()
    waits = BUDGETS["trainer: an optimizer step"]
    assert device.waits == waits, "the sums of the step, the gradient's norm"
    assert metrics.batch.groups == 3
    assert metrics.learning.grad_norm > 0


def test_the_page_has_these_counts() -> None:
    rows = [
        f"| {what} | {', '.join(f'{n} x {kind}' for kind, n in waits.items()) or '0'} |"
        for what, waits in BUDGETS.items()
    ]
    assert "\n".join(rows) in PAGE.read_text()


def test_what_waits_is_counted(device: FakeDevice) -> None:
    rows = torch.from_numpy(np.arange(8.0)).to(DEVICE)
    assert rows[rows > 3].tolist() == [4.0, 5.0, 6.0, 7.0]
    assert rows.sum().item() == 28.0
    assert torch.equal(rows, rows)
    rows[np.array([0])] = 1.0
    torch.cuda.synchronize()
    assert device.waits == {TO_DEVICE: 2, NONZERO: 2, TO_HOST: 1, READ: 1, SYNCHRONIZE: 1}


def test_what_does_not_wait_is_not_counted(device: FakeDevice) -> None:
    pinned = torch.zeros(1 << 17, pin_memory=True)
    rows = pinned.to(DEVICE, non_blocking=True)
    rows += torch.ones(100).to(DEVICE, non_blocking=True).sum()
    rows.to("cpu", non_blocking=True)
    rows[torch.arange(3, device=DEVICE)] = torch.where(rows[:3] > 50, 2.0, 3.0)
    assert device.waits == {}
    assert rows[:4].tolist() == [2.0, 2.0, 2.0, 100.0]
    device.waits.clear()
    pinned.to(DEVICE)
    torch.zeros(1 << 17).to(DEVICE, non_blocking=True)
    assert device.waits == {TO_DEVICE: 2}, "torch waits unless it is asked not to, CUDA for pages"
