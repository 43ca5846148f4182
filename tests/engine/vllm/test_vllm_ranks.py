"""Tensor-parallel ranks, each a thread here: rank 0 draws and scores, and the others follow.

Collective calls meet at a barrier with a time limit, so a rank that waits in vain fails. A real
vLLM with two ranks is in `test_vllm_tensor_parallel`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch import nn

from asyncrl.engine.remote.extras import Outcome, RequestExtra, ScoreColumns, StagingReport
from asyncrl.engine.remote.worker.held_weights import shard_of
from asyncrl.engine.remote.worker.ranks import Ranks
from asyncrl.engine.sampling.drawing import noise_seeds, top_k
from asyncrl.engine.sampling.logits import BYTES_PER_LOGIT
from asyncrl.engine.vllm.remote import to_extra_args
from asyncrl.engine.vllm.worker import sampling
from asyncrl.engine.vllm.worker.sampling import CoreSampler, CoreScorer, RunnerBatch
from asyncrl.engine.vllm.worker.weights import VllmHeldWeights
from asyncrl.rollout.trajectory import KeptTokens
from asyncrl.wire.weights.fingerprint import fingerprint

T = TypeVar("T")
VOCAB, WIDTH, DEADLINE = 12, 6, 20.0


class Group:
    """What `Ranks` needs of vLLM's group: calls of all ranks meet, and take what rank 0 gave."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=DEADLINE)
        self.given: Any = None
        self.calls: list[str] = []
        self.lock = threading.Lock()
        self.sum: torch.Tensor | None = None

    def exchange(self, rank: int, kind: str, value: T) -> T:
        if rank == 0:
            self.given = value
            self.calls.append(kind)
        self.barrier.wait()
        given: T = self.given
        self.barrier.wait()
        return given


class Member(Ranks):
    """A rank of such a group."""

    def share_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        given: torch.Tensor = self.group.exchange(self.rank, "tokens", tokens)
        assert given.shape == tokens.shape
        assert given.dtype == tokens.dtype
        return given

    def share(self, value: T) -> T:
        given: T = self.group.exchange(self.rank, "value", value)
        return given

    def total(self, numbers: torch.Tensor) -> torch.Tensor:
        with self.group.lock:
            before = self.group.sum
            self.group.sum = numbers.clone() if before is None else before + numbers
        self.group.barrier.wait()
        found: torch.Tensor = self.group.sum
        return found


def together(size: int, work: Callable[[Ranks], T]) -> list[T]:
    """What each rank returns; a rank that waits for the others in vain fails."""
    group = Group(size)
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(work, Member(rank, size, group)) for rank in range(size)]
        return [future.result(DEADLINE) for future in futures]


def request(rng: np.random.Generator, kept: KeptTokens | None, scored: int) -> Any:
    tokens = [1, 2, 3, *(kept.tokens.tolist() if kept is not None else [])]
    extra = RequestExtra(
        seed=int(rng.integers(1 << 62)), generated=scored, scored=scored, kept=kept, ticket=7
    )
    params = SimpleNamespace(
        extra_args=to_extra_args(extra), max_tokens=4, stop_token_ids=[], temperature=1.0,
        top_p=1.0,
    )  # fmt: skip
    return SimpleNamespace(prompt_token_ids=tokens, num_computed_tokens=0, sampling_params=params)


class Runner:
    """A model runner of one rank. Its logits differ from rank to rank in the last bits, as CUDA's
    may; `wrong` makes them differ entirely, so that following is seen."""

    def __init__(self, requests: dict[str, Any], rank: int, *, wrong: bool) -> None:
        rng = np.random.default_rng(0)
        self.head = torch.from_numpy(rng.normal(size=(WIDTH, VOCAB)).astype(np.float32))
        self.rank, self.wrong = rank, wrong
        self.asked: list[torch.Tensor] = []
        self.model = SimpleNamespace(compute_logits=self.compute_logits)
        self.model_config = SimpleNamespace(get_vocab_size=lambda: VOCAB)
        self.requests = requests
        names = list(requests)
        self.num_prompt_logprobs = dict.fromkeys(names, 3)
        lengths = [len(one.prompt_token_ids) for one in requests.values()]
        self.input_batch = SimpleNamespace(
            req_ids=names,
            num_reqs=len(names),
            req_id_to_index={name: i for i, name in enumerate(names)},
            num_tokens_no_spec=np.array(lengths, np.int32),
        )
        starts = np.cumsum([0, *lengths])
        self.query_start_loc = SimpleNamespace(np=starts)
        self.hidden = torch.from_numpy(rng.normal(size=(starts[-1], WIDTH)).astype(np.float32))
        self.fed = dict(zip(names, lengths, strict=True))

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.asked.append(hidden.clone())
        logits = hidden @ self.head
        return logits.flip(-1) if self.wrong and self.rank else logits


def old_tokens(rng: np.random.Generator, n: int, k: int) -> KeptTokens:
    """Kept tokens that another policy has drawn, most of them outside their lists of K."""
    logprobs = torch.log_softmax(torch.from_numpy(rng.normal(size=(n, VOCAB))).float(), -1)
    listed = top_k(logprobs, k)
    tokens = rng.integers(0, VOCAB, n).astype(np.int32)
    own = logprobs[torch.arange(n), torch.from_numpy(tokens).long()].numpy()
    seeds = noise_seeds(rng.integers(1 << 60, size=n).astype(np.uint64), 0)
    return KeptTokens(tokens, own, listed.ids.numpy(), listed.logprobs.numpy(), seeds)


def test_one_rank_verifies_and_the_others_take_part_in_the_output_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where a token has to be named afterwards, which rank 0 alone knows; in slabs of 5."""
    monkeypatch.setattr(sampling, "_as_vllm", lambda *table: table)

    def work(ranks: Ranks) -> tuple[dict[str, Any], list[torch.Tensor]]:
        rng = np.random.default_rng(3)
        requests = {f"r{i}": request(rng, old_tokens(rng, 9, 2), 9) for i in range(8)}
        runner = Runner(requests, ranks.rank, wrong=True)
        scorer = CoreScorer(runner, RunnerBatch(runner), ranks, 5 * VOCAB * BYTES_PER_LOGIT)
        return scorer.compute(runner.hidden, runner.fed), runner.asked

    (tables, asked), (nothing, also_asked) = together(2, work)
    ((alone, _),) = together(1, work)
    assert nothing == {}
    assert len(asked) == len(also_asked) > 8 * 9 // 5 + 1, "tokens were named afterwards"
    for mine, theirs in zip(asked, also_asked, strict=True):
        assert torch.equal(mine, theirs)
    columns = ScoreColumns(2)
    assert Outcome.DRAWN in [int(ids[-1, columns.outcome]) for ids, _ in tables.values()]
    for name, (ids, _) in tables.items():
        np.testing.assert_array_equal(ids, alone[name][0])


@pytest.mark.parametrize("drafts", [None, [2, 0, 1]])
def test_all_ranks_take_the_tokens_of_rank_0(
    drafts: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their logits say something else. Only rank 0 reports log-probabilities."""
    monkeypatch.setattr(CoreSampler, "install", _without_vllm)
    counts = [1, 1, 1] if drafts is None else [1 + n for n in drafts]

    def work(ranks: Ranks) -> Any:
        rng = np.random.default_rng(1)
        runner = Runner({f"r{i}": request(rng, None, 0) for i in range(3)}, ranks.rank, wrong=True)
        sampler = CoreSampler(runner, RunnerBatch(runner), ranks, 1 << 20)
        sampler.install()
        logits = torch.randn(
            sum(counts), VOCAB, generator=torch.Generator().manual_seed(ranks.rank)
        )
        metadata = None
        if drafts is not None:
            metadata = SimpleNamespace(
                max_spec_len=2, num_draft_tokens=drafts, draft_token_ids=torch.tensor([4, 5, 6])
            )
        return sampler(logits, metadata)

    first, second, third = together(3, work)
    width = 1 if drafts is None else 3
    assert first.sampled_token_ids.shape == (3, width)
    assert (first.sampled_token_ids[:, 0] >= 0).all()
    for other in (second, third):
        assert torch.equal(other.sampled_token_ids, first.sampled_token_ids)
        assert other.logprobs_tensors is None
    assert first.logprobs_tensors is not None


def _without_vllm(sampler: CoreSampler) -> None:
    sampler._table = lambda *parts: parts
    sampler._result = lambda **fields: SimpleNamespace(**fields)


HEADS, KV_HEADS, HEAD, HIDDEN, INNER, WORDS = 4, 2, 3, 10, 8, 13


def layers(weights: dict[str, torch.Tensor], rank: int, size: int) -> nn.Module:
    """A model split as vLLM splits it; KV heads are replicated where there are fewer than ranks."""

    def module(**fields: Any) -> Any:
        one = nn.Module()
        for name, value in fields.items():
            held = nn.Parameter(value.clone()) if isinstance(value, torch.Tensor) else value
            setattr(one, name, held)
        return one

    def part(name: str, of: int, which: int) -> torch.Tensor:
        return weights[name].chunk(of)[which]

    shards = min(size, KV_HEADS)
    kv = rank // (size // shards)
    stacked = [part("attn.q.weight", size, rank)]
    stacked += [part(f"attn.{one}.weight", shards, kv) for one in "kv"]
    biases = [part("attn.q.bias", size, rank)]
    biases += [part(f"attn.{one}.bias", shards, kv) for one in "kv"]
    out = weights["mlp.down.weight"].chunk(size, dim=1)[rank]
    per = -(-WORDS // size)
    start, end = min(rank * per, WORDS), min((rank + 1) * per, WORDS)
    table = torch.zeros(per, HIDDEN)
    table[: end - start] = weights["embed.weight"][start:end]
    model = module(norm=module(weight=weights["norm.weight"]))
    model.attn = module(
        qkv=module(
            weight=torch.cat(stacked),
            bias=torch.cat(biases),
            output_partition_sizes=[len(one) for one in stacked],
            input_size_per_partition=HIDDEN,
        )
    )
    model.mlp = module(
        down=module(
            weight=out, output_partition_sizes=[HIDDEN], input_size_per_partition=out.shape[1]
        )
    )
    indices = SimpleNamespace(org_vocab_start_index=start, org_vocab_end_index=end)
    model.embed = module(weight=table, shard_indices=indices)
    model.packed_modules_mapping = {"qkv": ["q", "k", "v"]}
    return model


def policy() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "attn.q.weight": torch.randn(HEADS * HEAD, HIDDEN),
        "attn.k.weight": torch.randn(KV_HEADS * HEAD, HIDDEN),
        "attn.v.weight": torch.randn(KV_HEADS * HEAD, HIDDEN),
        "attn.q.bias": torch.randn(HEADS * HEAD),
        "attn.k.bias": torch.randn(KV_HEADS * HEAD),
        "attn.v.bias": torch.randn(KV_HEADS * HEAD),
        "mlp.down.weight": torch.randn(HIDDEN, INNER * 8),
        "embed.weight": torch.randn(WORDS, HIDDEN),
        "norm.weight": torch.randn(HIDDEN),
    }


def taken(weights: dict[str, torch.Tensor], size: int, change: Any = None) -> list[Any]:
    """The fingerprint that each rank gives; `change` alters a model before."""
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}

    def work(ranks: Ranks) -> Any:
        model = layers(weights, ranks.rank, ranks.size)
        if change is not None:
            with torch.no_grad():
                change(model, ranks.rank)
        *_, found = VllmHeldWeights(model, shapes, ranks).fingerprint(elements=20)
        return found

    return together(size, work)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_sum_to_the_fingerprint_of_the_whole(size: int) -> None:
    weights = policy()
    expected = fingerprint(weights.items())
    for found in taken(weights, size):
        assert found.tensors.keys() == weights.keys()
        assert found == expected


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize(
    ("path", "place", "name"),
    [
        ("attn.qkv", (0, 1), "attn.q.weight"),
        ("attn.qkv", (4, 2), "attn.k.weight"),
        ("mlp.down", (2, 3), "mlp.down.weight"),
        ("norm", (5,), "norm.weight"),
    ],
)
def test_one_wrong_number_in_any_rank_is_found(
    path: str, place: tuple[int, ...], name: str, rank: int
) -> None:
    """In a part, and in one of several replicas: a norm, and a key head of two ranks."""
    weights = policy()

    def change(model: nn.Module, own: int) -> None:
        if own == rank:
            model.get_submodule(path).weight[place] += 1e-3

    found = taken(weights, 4, change)[0].tensors
    expected = fingerprint(weights.items()).tensors
    assert [one for one in weights if found[one] != expected[one]] == [name]


def test_replicas_count_once() -> None:
    module = SimpleNamespace(output_partition_sizes=[3], input_size_per_partition=HIDDEN)
    shards = [shard_of(module, 0, 0, (6, HIDDEN), rank, 8) for rank in range(8)]
    found = [shard for shard in shards if shard is not None]
    assert [shard.row for shard in found] == [0] * 4 + [3] * 4
    assert sum(shard.factor for shard in found[:4]) % (1 << 64) == 1
    assert sum(shard.factor for shard in found[4:]) % (1 << 64) == 1


def test_layers_that_are_wider_than_their_tensors() -> None:
    """SGLang pads a layer of 48 to 64 on a CPU: the second of two that it stacks lies after 64."""
    stacked = SimpleNamespace(output_partition_sizes=[64, 64], input_size_per_partition=HIDDEN)
    one = shard_of(stacked, 1, 48, (48, HIDDEN), 0, 1)
    assert one is not None
    assert (one.first, one.shape) == (64, (48, HIDDEN))
    halves = SimpleNamespace(output_partition_sizes=[32, 32], input_size_per_partition=HIDDEN)
    down = SimpleNamespace(output_partition_sizes=[HIDDEN], input_size_per_partition=32)
    for rank in range(2):  # all of them must leave out the same ones
        assert shard_of(halves, 1, 48, (48, HIDDEN), rank, 2) is None
        assert shard_of(down, 0, 0, (HIDDEN, 48), rank, 2) is None


def test_a_staging_ends_when_all_ranks_have_ended() -> None:
    staged, running = StagingReport("staged"), StagingReport("running")
    refused, gone = StagingReport("refused", "not finite"), StagingReport("superseded", "newer")
    assert StagingReport.of_all([staged, staged]) == staged
    assert StagingReport.of_all([refused, running]) == running
    assert StagingReport.of_all([staged, gone]) == gone
    assert StagingReport.of_all([gone, refused]) == refused
