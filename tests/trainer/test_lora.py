"""LoRA: what is trained, published, decoded with, saved and exported is one policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch_cores
from enumerated_policies import (
    Case,
    core_of,
    enumerate_distribution,
    is_detected,
    p_value,
    sample,
)
from false_alarms import Claims
from lora_learners import LORA, Groups, learner_of, trained
from policy_loop import PolicyLoop
from tiny_models import make_qwen3, save
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from asyncrl.errors import UserError
from asyncrl.tasks.exported_model import export_run, model_of
from asyncrl.trainer.base.errors import CheckpointError
from asyncrl.trainer.base.lora_config import LoraConfig
from asyncrl.trainer.checkpoint.export import export, export_adapter
from asyncrl.trainer.checkpoint.format.files import path_of
from asyncrl.trainer.learner import Learner
from asyncrl.trainer.model.policy import _close
from asyncrl.trainer_process.policy_check import logprobs_of
from asyncrl.wire.weights import adapter as arithmetic
from asyncrl.wire.weights.adapter import Pair, merged
from asyncrl.wire.weights.fingerprint import fingerprint
from asyncrl.wire.weights.layout import LoraSpec
from asyncrl.wire.weights.writer import WeightPublisher

CLAIMS = Claims(__file__)
ModelPath = Callable[[str], str]


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(make_qwen3(seed=5, scale=3.0), tmp_path_factory.mktemp("tied"))


@pytest.fixture
def loop(tied: str, tmp_path: Path) -> Iterator[PolicyLoop]:
    made = PolicyLoop(tied, tmp_path, lora=LORA, learning_rate=0.02)
    yield made
    made.close()


def merged_by_hand(learner: Learner, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The HF state dict of the policy, by a matrix product."""
    own = AutoModelForCausalLM.from_pretrained(learner._model_path).state_dict()
    pairs = arithmetic.pairs_of(learner.tensors())
    return {
        name: (one.to(dtype) + LORA.scaling * pairs[name].b.to(dtype) @ pairs[name].a.to(dtype))
        if name in pairs
        else one.to(dtype)
        for name, one in own.items()
        if name != "lm_head.weight"  # tied
    }


def test_the_merged_matrix_has_the_same_bits_however_it_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base, a, b = torch.randn(37, 29), torch.randn(5, 29), torch.randn(37, 5)
    for dtype in (torch.float32, torch.bfloat16):
        total = np.zeros((37, 29), np.float32)
        for k in range(5):
            total += b.numpy()[:, k, None] * a.numpy()[k]
        expected = (torch.from_numpy(total * np.float32(0.3)) + base.to(dtype).float()).to(dtype)
        for elements in (1, 100, 1 << 16):
            monkeypatch.setitem(arithmetic._ELEMENTS, "cpu", elements)
            assert torch.equal(merged(base, Pair(a, b), 0.3, dtype), expected)
    assert torch.equal(merged(base, Pair(a, 0 * b), 0.3, torch.bfloat16), base.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_engines_decode_with_what_was_trained(
    dtype: torch.dtype, tied: str, tmp_path: Path
) -> None:
    """Fingerprints, log-probabilities and the published bytes, over several versions."""
    loop = PolicyLoop(tied, tmp_path, lora=LORA, learning_rate=0.02, dtype=dtype)
    for _ in range(3):
        assert loop.step() == []
    loop.step()
    if dtype == torch.float32:
        assert max(loop.means) < 1e-5, "of the trainer's and the engine's log-probabilities"
    policy = loop.learner.policy
    assert policy.adapter is not None
    sample = loop._draw(99)
    own = np.concatenate(logprobs_of(policy, sample))
    engine = np.concatenate([one.behaviour_logprobs for one in sample])
    with policy.adapter.initial(), torch.no_grad():
        base = np.concatenate(logprobs_of(policy, sample))
    limit = 1e-4 if dtype == torch.float32 else 0.3
    assert np.abs(own - engine).max() < limit
    assert np.abs(base - engine).max() > 2 * limit
    whole = sum(one.nbytes for one in policy.model.state_dict().values())
    assert loop.publisher._nbytes < whole / 2
    loop.close()


@pytest.mark.parametrize("recomputed", [False, True])
def test_a_model_held_in_bfloat16_is_trained(
    *, recomputed: bool, model_path: ModelPath, group_of: Groups
) -> None:
    """Rounding is not taken for a model that cannot be packed, and the adapter learns the same."""
    path, sample = model_path("qwen3"), group_of(9, np.random.default_rng(9))

    def scores(steps: int, **settings: Any) -> np.ndarray:
        learner = trained(learner_of(path, **settings), group_of, steps)
        assert learner.policy.has_plain_head
        assert {one.dtype for _, one in learner.tensors()} == {torch.float32}
        with torch.no_grad():
            return np.concatenate(logprobs_of(learner.policy, sample))

    low = scores(2, dtype="bfloat16", gradient_checkpointing=recomputed)
    moved = np.abs(scores(2) - scores(0)).mean()
    assert np.abs(low - scores(2)).mean() < 0.2 * moved


def test_logits_of_other_sequences_are_no_rounding() -> None:
    wanted = torch.randn(20, 32, generator=torch.Generator().manual_seed(1))
    for kind in (torch.float32, torch.bfloat16):
        right = wanted.to(kind)
        assert _close(right, right)
        wrong = right.clone()
        wrong[18:] = right[:2]
        assert not _close(wrong, right)
    assert _close(wanted.bfloat16(), (1.003 * wanted).bfloat16())
    assert not _close(1.003 * wanted, wanted)


def test_an_engine_samples_from_the_merged_model(tmp_path: Path) -> None:
    """Chi-square over all responses of at most four tokens (`false_alarms`)."""
    case, base = Case(), make_qwen3(seed=3)
    core = core_of(torch_cores.load(save(base, tmp_path), slots=64, max_len=16), None)
    pairs: dict[str, Pair] = {}
    generator = torch.Generator().manual_seed(1)
    for name, weight in base.state_dict(keep_vars=True).items():
        if name.endswith("_proj.weight"):
            a = torch.randn(2, weight.shape[1], generator=generator)
            b = 0.1 * torch.randn(weight.shape[0], 2, generator=generator)
            pairs[name] = Pair(a, b)
    before = enumerate_distribution(base, case)
    tensors = [
        named
        for name, pair in pairs.items()
        for named in zip(arithmetic.names_of(name.removesuffix(".weight")), pair, strict=True)
    ]
    with WeightPublisher(tmp_path, "run", lora=LoraSpec(2, 1.5)) as publisher:
        core.stage_weights(publisher.publish(tensors, 1))
    core.install_weights(1)
    with torch.no_grad():
        for name, weight in base.named_parameters():
            if name in pairs:
                weight.add_(1.5 * pairs[name].b @ pairs[name].a)
    responses = sample(core, case, 4000, 0)
    assert CLAIMS.fit(p_value(responses, enumerate_distribution(base, case)))
    assert is_detected(responses, before), "of the model without adapter"


def test_an_engine_that_adds_another_scaling_is_found(
    loop: PolicyLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert loop.step() == []
    loop.publisher._lora = LoraSpec(LORA.rank, LORA.scaling * 1.0001)
    found = loop.step()
    assert "decodes with other weights than the trainer has for version 2" in found[0].text


def test_gradients_are_those_of_the_merged_model(model_path: ModelPath, group_of: Groups) -> None:
    """In float64, against transformers' own forward pass with W + s B A."""
    path = model_path("llama")
    learner = trained(learner_of(path, dtype="float64"), group_of)
    policy, pairs = learner.policy, arithmetic.pairs_of(learner.tensors())
    group = group_of(7, np.random.default_rng(7))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    leaves = {n: Pair(p.a.clone().requires_grad_(), p.b.clone().requires_grad_())
              for n, p in pairs.items()}  # fmt: skip
    weights = dict(model.named_parameters())
    weights |= {n: weights[n] + LORA.scaling * p.b @ p.a for n, p in leaves.items()}
    total = torch.zeros((), dtype=torch.float64)
    for one in group:
        tokens = torch.from_numpy(np.concatenate([one.prompt_tokens, one.tokens])).long()
        logits = functional_call(model, weights, (tokens[None, :-1],), {"use_cache": False}).logits
        logprobs = logits[0, len(one.prompt_tokens) - 1 :].log_softmax(-1)
        total = total + logprobs.gather(1, tokens[len(one.prompt_tokens) :, None]).sum()
    total.backward()
    scores, _ = learner._models.score(group)
    # transformers has its norms in float32
    torch.testing.assert_close(scores.logprobs.sum(), total, rtol=1e-8, atol=1e-8)
    scores.logprobs.sum().backward()
    own = {name: one.grad for name, one in policy.model.named_parameters() if one.requires_grad}
    assert len(own) == 2 * len(leaves)
    for name, pair in leaves.items():
        a, b = arithmetic.names_of(name.removesuffix(".weight"))
        torch.testing.assert_close(own[a], pair.a.grad, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(own[b], pair.b.grad, rtol=1e-5, atol=1e-6)


def test_only_the_adapter_has_gradients_and_moments(
    model_path: ModelPath, group_of: Groups
) -> None:
    learner = trained(learner_of(model_path("qwen3"), kl_coefficient=0.1), group_of)
    policy = learner.policy
    assert policy.adapter is not None
    before = policy.adapter.base_digest()
    optimizer = learner._update.optimizer
    sizes = sum(one.numel() for _, one in learner.tensors())
    assert sum(s["exp_avg"].numel() for s in optimizer.state.values()) == sizes
    assert {one.grad is None for _, one in policy.adapter.base()} == {True}
    trained(learner, group_of)
    assert policy.adapter.base_digest() == before
    assert all(bool(one.any()) for _, one in learner.tensors())


@pytest.mark.parametrize("started", [False, True])
def test_the_reference_is_the_initial_policy(
    started: bool, model_path: ModelPath, group_of: Groups, tmp_path: Path
) -> None:
    """Without the adapter, or with the one that training started from."""
    lora, path = LORA, model_path("qwen3")
    if started:
        first = trained(learner_of(path), group_of)
        first.save(path_of(tmp_path / "checkpoints", 1))
        export_adapter(path_of(tmp_path / "checkpoints", 1), tmp_path / "adapter")
        lora = LORA.model_copy(update={"adapter": str(tmp_path / "adapter")})
    learner = learner_of(path, kl_coefficient=0.1, lora=lora)
    group = group_of(3, np.random.default_rng(3))
    with torch.no_grad():
        initial = learner._models.score(group)[0].logprobs
    if started:
        expected = np.concatenate(logprobs_of(first.policy, group))
        np.testing.assert_allclose(initial.numpy(), expected, atol=1e-5)
    trained(learner, group_of)
    scores, _ = learner._models.score(group)
    reference = learner._models.reference_logprobs(group)
    assert reference is not None
    assert torch.equal(reference, initial)
    assert not torch.allclose(scores.logprobs, initial, atol=1e-3)
    scores.logprobs.sum().backward()  # what the backward pass needs was not changed


def test_a_run_continues_bit_for_bit_from_the_adapter_alone(
    model_path: ModelPath, group_of: Groups, tmp_path: Path
) -> None:
    path, at = model_path("qwen3"), path_of(tmp_path / "checkpoints", 1)
    learner = trained(learner_of(path), group_of)
    learner.save(at)
    trained(learner, group_of)
    other = learner_of(path)
    other.restore(at)
    assert other.initial_weights == learner.initial_weights
    trained(other, group_of)
    for (name, one), (_, same) in zip(learner.tensors(), other.tensors(), strict=True):
        assert torch.equal(one, same), name
    held = sum(one.stat().st_size for one in (at / "state").rglob("*.safetensors"))
    assert held < 100_000 + 12 * sum(one.numel() for _, one in learner.tensors())
    with pytest.raises(CheckpointError, match="adapter of another model"):
        learner_of(model_path("qwen3_again")).restore(at)


@pytest.fixture
def model_path(model_path: ModelPath, tmp_path: Path) -> ModelPath:
    """Also `qwen3_again`: a model of the same sizes with other numbers."""

    def make(name: str) -> str:
        if name != "qwen3_again":
            return model_path(name)
        model = AutoModelForCausalLM.from_pretrained(model_path("qwen3"))
        with torch.no_grad():
            model.model.norm.weight.mul_(1.01)
        model.save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    return make


def test_exports_are_the_policy_and_load_elsewhere(
    model_path: ModelPath, group_of: Groups, tmp_path: Path
) -> None:
    """The adapter in peft, the merged model in transformers; of another base it is refused."""
    import peft  # by the one worker that has this test

    path, run = model_path("qwen3_again"), tmp_path / "run"
    learner = trained(learner_of(path), group_of)
    published = learner.fingerprint(torch.bfloat16)
    learner.save(path_of(run / "checkpoints", 1))
    (run / "config.yaml").write_text("run: {name: run}\n")
    place, is_new = export_run(run, None, None, None)
    assert (place.name, is_new) == ("step-000001-adapter", True)
    assert export_run(run, None, None, None) == (place, False)
    whole, _ = export_run(run, None, None, "bfloat16", merge=True)
    tokens = torch.arange(1, 9)[None]
    base = AutoModelForCausalLM.from_pretrained(path)
    without = base(tokens).logits
    adapted = peft.PeftModel.from_pretrained(base, place).eval()
    expected = functional_call(
        AutoModelForCausalLM.from_pretrained(path), merged_by_hand(learner, torch.float32), tokens
    ).logits
    torch.testing.assert_close(adapted(tokens).logits, expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(without, expected, atol=1e-2)
    exported = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.bfloat16)
    found = fingerprint(exported.state_dict(keep_vars=True).items())
    assert found.whole == published.whole
    assert model_of(path_of(run / "checkpoints", 1), print).name == "step-000001"
    with torch.no_grad():
        base = AutoModelForCausalLM.from_pretrained(path)
        base.model.layers[0].mlp.up_proj.weight[0, 0] += 1
        base.save_pretrained(path)
    with pytest.raises(CheckpointError, match="The base model has changed since"):
        export(path_of(run / "checkpoints", 1), tmp_path / "changed")
    plain = learner_of(path, lora=LoraConfig())
    plain.save(path_of(tmp_path / "plain" / "checkpoints", 0))
    (tmp_path / "plain" / "config.yaml").write_text("run: {name: plain}\n")
    with pytest.raises(UserError, match="--merge"):
        export_run(tmp_path / "plain", None, None, None, merge=True)
