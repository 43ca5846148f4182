"""Compiled blocks compute what transformers' do, and no micro-batch compiles anything again."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import nn

from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.trainer.base.errors import UnsupportedModelError
from asyncrl.trainer.cpu import layers as cpu_layers
from asyncrl.trainer.model import compiled
from asyncrl.trainer.model.packing import PackedBatch
from asyncrl.trainer.model.policy import Policy

CPU = torch.device("cpu")
ModelPath = Callable[[str], str]


def _batch(seed: int, count: int) -> PackedBatch:
    rng = np.random.default_rng(seed)

    def tokens(length: int) -> np.ndarray:
        return rng.integers(0, 32, length).astype(np.int32)

    prompt = tokens(4)
    pairs = [(prompt, tokens(int(rng.integers(2, 12)))) for _ in range(count)]
    return PackedBatch.of([*pairs, (tokens(3), tokens(5))], CPU)


def _scores(policy: Policy, batch: PackedBatch) -> list[torch.Tensor]:
    scores = policy.score(batch)
    trained = list(policy.model.parameters())
    grads = torch.autograd.grad(scores.logprobs.sum(), trained)
    return [scores.logprobs.detach(), scores.entropy, *grads]


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> None:
    torch.compiler.reset()


@pytest.mark.parametrize(("name", "checkpointing"), [("qwen3", False), ("gemma2", True)])
def test_compiled_blocks_are_the_same_for_every_micro_batch(
    name: str,
    checkpointing: bool,
    model_path: ModelPath,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With what the compiler traces, forward and backward, but without its kernels.

    Those take half a minute to compile. Every run compares what they compute when it starts
    (`compile_blocks`, tested below). Every second layer of gemma2 has a window.
    """
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    path = model_path(name)
    plain = Policy(path, dtype="float32", device=CPU, fused=False)
    policy = Policy(
        path, dtype="float32", device=CPU, compiled=True, gradient_checkpointing=checkpointing
    )
    names = [name for name, _ in policy.model.named_parameters()]
    assert names == [name for name, _ in plain.model.named_parameters()]
    assert not policy.is_fused
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed, count in ((0, 2), (1, 5), (2, 3)):
            batch = _batch(seed, count)
            for got, want in zip(_scores(policy, batch), _scores(plain, batch), strict=True):
                torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
    assert not torch._dynamo.utils.counters["stats"], "nothing is compiled after the start"


@pytest.mark.parametrize("block", [1, 1 << 40], ids=["second first", "first first"])
def test_gradients_lie_in_memory_as_the_compiler_was_told(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large matrices are multiplied in another order, which leaves a transposed view."""
    monkeypatch.setattr(cpu_layers, "TRANSPOSED_BLOCK", block)
    x, weight, grad = torch.randn(32, 8), torch.randn(24, 8), torch.randn(32, 24)
    for_x, for_weight = torch.ops.asyncrl.linear_backward(grad, x, weight)
    torch.testing.assert_close(for_x, grad @ weight, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(for_weight, grad.t() @ x, atol=1e-5, rtol=1e-4)
    assert for_x.is_contiguous()
    assert for_weight.is_contiguous()


def test_what_cannot_be_compiled_is_refused_by_name(
    model_path: ModelPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValidationError, match="selective does not work with compile: true"):
        TrainerConfig(compile=True, gradient_checkpointing="selective")
    with pytest.raises(ValidationError, match="compile: true does not work with sharding: full"):
        TrainerConfig(compile=True, sharding="full", ranks=2)
    with pytest.raises(ValidationError, match="router_loss_coefficient does not work"):
        TrainerConfig(compile=True, router_loss_coefficient=0.1)

    def broken(_graph: object, _inputs: object) -> object:
        raise RuntimeError("no C++ compiler\nmore")

    path = model_path("qwen3")
    monkeypatch.setattr(compiled, "BACKEND", broken)
    with pytest.raises(UnsupportedModelError, match=r"set trainer.compile: false .*no C"):
        Policy(path, dtype="float32", device=CPU, compiled=True)

    def wrong(graph: torch.fx.GraphModule, _inputs: object) -> Callable[..., object]:
        def call(*args: object) -> object:
            return [2 * one if isinstance(one, torch.Tensor) else one for one in graph(*args)]

        return call

    torch.compiler.reset()
    monkeypatch.setattr(compiled, "BACKEND", wrong)
    with pytest.raises(UnsupportedModelError, match="computes other results when compiled"):
        Policy(path, dtype="float32", device=CPU, compiled=True)
    with pytest.raises(UnsupportedModelError, match="has no blocks to compile"):
        compiled.compile_blocks(nn.Linear(2, 2), "x", lambda: torch.zeros(1), torch.float32)
