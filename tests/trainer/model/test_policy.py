"""Packed log-probabilities equal those of one plain forward pass per sequence."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import numpy as np
import pytest
import torch
from enumerated_policies import truncated
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, PreTrainedModel

from asyncrl.engine.protocol import SamplingParams
from asyncrl.engine.sampling.truncation import SamplingColumns, processed_logprobs
from asyncrl.rollout.truncation import Truncation
from asyncrl.trainer.accumulation import split_by_tokens
from asyncrl.trainer.base.errors import UnsupportedModelError
from asyncrl.trainer.model import head as head_module
from asyncrl.trainer.model import packing
from asyncrl.trainer.model.model_loading import multiply_in_tf32
from asyncrl.trainer.model.packing import Family, Layout, PackedBatch, packed_attention
from asyncrl.trainer.model.policy import Policy, _relative_gap

CPU = torch.device("cpu")
VOCAB = 32


def _pairs(count: int = 7) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(3)
    return [
        (
            rng.integers(0, VOCAB, rng.integers(1, 9)).astype(np.int32),
            rng.integers(0, VOCAB, rng.integers(1, 25)).astype(np.int32),
        )
        for _ in range(count)
    ]


def _plain_model(path: str) -> PreTrainedModel:
    """With transformers' own attention."""
    return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()


def _logits_of(model: PreTrainedModel, pairs: list[tuple[np.ndarray, np.ndarray]]) -> torch.Tensor:
    """`[N, V]`: one unpadded forward pass per sequence."""
    rows = []
    for prompt, response in pairs:
        ids = torch.from_numpy(np.concatenate([prompt, response])).long()[None]
        rows.append(model(input_ids=ids).logits[0, len(prompt) - 1 : -1])
    return torch.cat(rows)


def _plain_logits(path: str, pairs: list[tuple[np.ndarray, np.ndarray]]) -> torch.Tensor:
    with torch.no_grad():
        return _logits_of(_plain_model(path), pairs)


def _group(prompt: int = 6) -> list[tuple[np.ndarray, np.ndarray]]:
    """Responses of several lengths, the shortest one token long, to one prompt."""
    shared = np.arange(prompt, dtype=np.int32)
    return [(shared, response) for _, response in [*_pairs(5), (shared, shared[:1])]]


@pytest.mark.parametrize("pairs", [_pairs(), _group()], ids=["own prompts", "a shared prompt"])
@pytest.mark.parametrize(
    "name",
    [
        *("qwen3", "llama", "mistral_window", "gpt2", "granite", "gemma2", "gemma3", "cohere"),
        *("phi3", "gpt_oss", "qwen3_moe", "mixtral", "olmo_clipped", "smollm3", "glm4"),
        "deepseek_v3",
    ],
)
def test_packed_equals_separate(
    name: str, pairs: list[tuple[np.ndarray, np.ndarray]], model_path: Callable[[str], str]
) -> None:
    path = model_path(name)
    batch = PackedBatch.of(pairs, CPU)
    weight = torch.linspace(-1.0, 2.0, len(batch.targets))
    plain = _plain_model(path)
    want = torch.log_softmax(_logits_of(plain, pairs) / 0.7, -1)
    chosen = want.gather(-1, batch.targets[:, None])[:, 0]
    (chosen * weight).sum().backward()
    policy = Policy(path, dtype="float32", device=CPU, temperature=0.7)
    got = policy.score(batch)
    (got.logprobs * weight).sum().backward()
    torch.testing.assert_close(got.logprobs, chosen, atol=1e-5, rtol=0)
    torch.testing.assert_close(got.entropy, -(want.exp() * want).sum(-1), atol=1e-5, rtol=0)
    mine = dict(policy.model.named_parameters())
    for parameter_name, parameter in plain.named_parameters():
        expected = parameter.grad
        if expected is not None:
            close = 1e-5 + 1e-4 * float(expected.abs().max())
            torch.testing.assert_close(mine[parameter_name].grad, expected, atol=close, rtol=0)


@pytest.mark.parametrize(
    ("name", "reason"), [("llama4", "chunked_attention"), ("mamba", "attention")]
)
def test_a_model_that_packing_would_change_is_refused(
    name: str, reason: str, model_path: Callable[[str], str]
) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        Policy(model_path(name), dtype="float32", device=CPU)


def test_one_token_at_another_expert_is_no_difference_of_a_mixture() -> None:
    """Of all logits together it is; where attention is wrong, most tokens are."""
    wanted = torch.ones(9, 4)
    flipped, wrong = wanted.clone(), wanted.clone()
    flipped[3], wrong[3:] = -1.0, -1.0
    assert _relative_gap(flipped, wanted, by_token=False) == pytest.approx(2 / 3)
    assert _relative_gap(flipped, wanted, by_token=True) == 0
    assert _relative_gap(wrong, wanted, by_token=True) == pytest.approx(2)
    nothing = torch.zeros(9, 4)
    for by_token in (False, True):
        assert _relative_gap(nothing, nothing, by_token=by_token) == 0
        assert _relative_gap(wanted, nothing, by_token=by_token) == float("inf")
        assert not _relative_gap(wanted * float("nan"), wanted, by_token=by_token) <= 1


def test_a_missing_model_is_named() -> None:
    with pytest.raises(UnsupportedModelError, match="/nowhere"):
        Policy("/nowhere", dtype="float32", device=CPU)


@pytest.mark.parametrize(
    "truncation",
    [Truncation(top_p=0.6), Truncation(top_k=5), Truncation(min_p=0.3), Truncation(9, 0.8, 0.2)],
    ids=str,
)
def test_a_truncated_distribution_is_renormalised_with_the_drawn_token(
    model_path: Callable[[str], str], truncation: Truncation
) -> None:
    """The set is the reference's; a drawn token outside it is added."""
    pairs = _pairs(3)
    path = model_path("qwen3")
    batch = PackedBatch.of(pairs, CPU)
    logits = _plain_logits(path, pairs)
    with torch.no_grad():
        got = Policy(path, dtype="float32", device=CPU, truncation=truncation).score(batch)
    checked = 0
    for row, target, logprob, outside in zip(
        logits, batch.targets.tolist(), got.logprobs, got.outside, strict=True
    ):
        chances = torch.softmax(row.double(), -1).numpy()
        settings = (truncation.top_k, truncation.top_p, truncation.min_p)
        kept = truncated(chances, *settings) > 0
        assert bool(outside) == (not kept[target])
        checked += int(kept[target])
        kept[target] = True
        want = np.log(chances[target] / chances[kept].sum())
        assert float(logprob) == pytest.approx(want, abs=1e-5)
    assert 0 < checked < len(batch.targets)


def test_engine_and_trainer_have_the_same_log_probabilities(
    model_path: Callable[[str], str],
) -> None:
    """Token by token what the engine's function gives, for everything that it can draw."""
    pairs = _pairs()
    path = model_path("qwen3")
    logits = _plain_logits(path, pairs).float()
    batch = PackedBatch.of(pairs, CPU)
    settings = {"temperature": 1.3, "top_k": 9, "top_p": 0.8, "min_p": 0.2}
    params = SamplingParams(1, **settings)  # type: ignore[arg-type]
    with torch.no_grad():
        scores = Policy(
            path, dtype="float32", device=CPU, temperature=1.3, truncation=params.truncation
        ).score(batch)
    engine = processed_logprobs(logits.clone(), SamplingColumns.of([params] * len(logits)))
    drawn = engine.gather(1, batch.targets[:, None])[:, 0]
    inside = ~scores.outside
    assert inside.any()
    assert (inside == drawn.isfinite()).all()
    torch.testing.assert_close(scores.logprobs[inside], drawn[inside], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["llama", "gemma2", "cohere"])
def test_chunked_head_gives_the_same_gradient(
    name: str, model_path: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = PackedBatch.of(_pairs(), CPU)
    grads = []
    for budget in (1 << 25, VOCAB * 5):
        monkeypatch.setattr(head_module, "LOGIT_BUDGET", budget)
        monkeypatch.setitem(head_module.BLOCK, "cpu", 5 * VOCAB)
        policy = Policy(model_path(name), dtype="float64", device=CPU)
        policy.score(batch).logprobs.square().sum().backward()
        grads.append([p.grad for p in policy.model.parameters()])
    for whole, chunked in zip(*grads, strict=True):
        torch.testing.assert_close(whole, chunked, atol=1e-10, rtol=1e-10)


def test_gradient_checkpointing_changes_nothing(model_path: Callable[[str], str]) -> None:
    batch = PackedBatch.of(_pairs(), CPU)
    grads = []
    for on in (False, True):
        policy = Policy(model_path("gpt2"), dtype="float64", device=CPU, gradient_checkpointing=on)
        assert policy.model.is_gradient_checkpointing == on
        policy.score(batch).logprobs.sum().backward()
        grads.append([p.grad for p in policy.model.parameters()])
    for plain, recomputed in zip(*grads, strict=True):
        torch.testing.assert_close(plain, recomputed, atol=1e-10, rtol=1e-10)


def test_bfloat16_computes_low_and_keeps_high(model_path: Callable[[str], str]) -> None:
    batch = PackedBatch.of(_pairs(), CPU)
    policy = Policy(model_path("qwen3"), dtype="bfloat16", device=CPU)
    scores = policy.score(batch)
    assert scores.logprobs.dtype == torch.float32
    assert {p.dtype for p in policy.model.parameters()} == {torch.float32}
    with torch.no_grad():
        exact = Policy(model_path("qwen3"), dtype="float32", device=CPU).score(batch)
    gap = (scores.logprobs.detach() - exact.logprobs).abs()
    assert 0 < float(gap.max()) < 0.2


def test_attention_without_a_layout_is_refused() -> None:
    tensor = torch.zeros(1, 2, 3, 4)
    with pytest.raises(UnsupportedModelError, match="keyword"):
        packed_attention(torch.nn.Identity(), tensor, tensor, tensor, None)


def test_attention_refuses_what_it_would_ignore() -> None:
    tensor = torch.zeros(1, 2, 3, 4)
    layout = Layout.of([3], CPU)
    with pytest.raises(UnsupportedModelError, match="position_bias"):
        packed_attention(
            torch.nn.Identity(), tensor, tensor, tensor, None, packed_layout=layout, position_bias=1
        )


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 120))
def test_micro_batches_hold_every_sequence_once(lengths: list[int], budget: int) -> None:
    batches = split_by_tokens(lengths, budget)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or sum(lengths[i] for i in batch) <= budget


@pytest.mark.parametrize("prompt", [1, 6])
def test_a_shared_prompt_changes_no_gradient(prompt: int, model_path: Callable[[str], str]) -> None:
    """The group's gradient is the sum of those of its samples, each with a prompt of its own."""
    policy = Policy(model_path("llama"), dtype="float64", device=CPU)
    group = _group(prompt)
    batch = PackedBatch.of(group, CPU)
    assert batch.tokens.shape[1] == prompt + sum(len(response) - 1 for _, response in group)
    weight = torch.linspace(-1.0, 2.0, len(batch.targets), dtype=torch.float64)
    (policy.score(batch).logprobs * weight).sum().backward()
    together = [p.grad.clone() for p in policy.model.parameters()]
    policy.model.zero_grad()
    parts = weight.split([len(response) for _, response in group])
    for pair, part in zip(group, parts, strict=True):
        (policy.score(PackedBatch.of([pair], CPU)).logprobs * part).sum().backward()
    for got, parameter in zip(together, policy.model.parameters(), strict=True):
        torch.testing.assert_close(got, parameter.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["llama", "mistral_window", "gemma2"])
def test_attention_in_several_blocks_changes_nothing(
    name: str, model_path: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Policy(model_path(name), dtype="float64", device=CPU)
    pairs = [*_group(), *_pairs(3), *_group(3)]
    found = []
    for worthwhile, several in ((10**9, False), (1, True)):
        monkeypatch.setattr(packing, "WORTHWHILE", worthwhile)
        batch = PackedBatch.of(pairs, CPU)
        assert (len(batch.layout.blocks) > 1) is several
        scores = policy.score(batch)
        weight = torch.linspace(-1.0, 2.0, len(batch.targets), dtype=torch.float64)
        grads = torch.autograd.grad((scores.logprobs * weight).sum(), policy.model.parameters())
        found.append([scores.logprobs.detach(), *grads])
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


_KIN = st.tuples(st.integers(0, 3), st.lists(st.integers(1, 9), min_size=1, max_size=4))


@given(st.lists(_KIN, min_size=1, max_size=4), st.sampled_from([1, 1024]))
def test_layout_round_trip(kin: list[tuple[int, list[int]]], worthwhile: int) -> None:
    """Families of sequences, each with what it shares and the rest of each sequence."""
    lengths = [shared + rest for shared, rests in kin for rest in rests]
    with mock.patch.object(packing, "WORTHWHILE", worthwhile):
        layout = Layout.of(lengths, CPU, [Family(len(rests), shared) for shared, rests in kin])
    expected: list[list[int]] = []
    places: list[int] = []
    count = 0
    for shared, rests in kin:
        prefix = [*range(count, count + shared)]
        places += range(shared)
        count += shared
        for rest in rests:
            expected.append([*prefix, *range(count, count + rest)])
            places += range(shared, shared + rest)
            count += rest
    tokens = torch.arange(count)
    assert tokens[layout.spread][layout.gather].tolist() == tokens.tolist()
    assert int(layout.own.sum()) == count
    spread = tokens[layout.spread]
    rows = [
        row
        for block in layout.blocks
        for row in spread[block.slots].view(block.last - block.first, block.longest).tolist()
    ]
    assert [row[: len(e)] for row, e in zip(rows, expected, strict=True)] == expected
    assert layout.positions[0].tolist() == places
    seen = [
        [*range(place, place + shared), *range(start, end)]
        for start, end, place, shared in layout.segments
    ]
    assert sorted(one for one in seen if one not in expected) == sorted(
        [*range(place, place + shared)]
        for place, shared, first, last in layout.families
        if [*range(place, place + shared)] not in expected
    )


def test_tensor_float_32_spares_rotary_angles(model_path: Callable[[str], str]) -> None:
    """A position is a factor of a float32 product there, and TensorFloat-32 has 11 bits for it."""
    model = AutoModelForCausalLM.from_pretrained(model_path("llama"))
    found: dict[str, str] = {}

    def note(name: str, module: torch.nn.Module) -> None:
        plain = module.forward

        def noting(*arguments: object, **more: object) -> object:
            found[name] = torch.get_float32_matmul_precision()
            return plain(*arguments, **more)

        module.forward = noting  # type: ignore[method-assign]

    note("rotary", model.model.rotary_emb)
    note("head", model.lm_head)
    try:
        multiply_in_tf32([model, model.model])  # the second time, in part
        model(torch.arange(4)[None])
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert found == {"rotary": "highest", "head": "high"}
