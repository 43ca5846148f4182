"""Experts of a mixture: how SGLang is given them, and where they are compared. No SGLang here."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from asyncrl.engine.sglang.worker.weights import SglangHeldWeights, expert_by_expert
from asyncrl.wire.weights.fingerprint import fingerprint
from asyncrl.wire.weights.layout import Fingerprint


def experts(seed: int = 0) -> dict[str, torch.Tensor]:
    """A layer of four experts as in the HF state dict of Qwen3-MoE."""
    torch.manual_seed(seed)
    return {
        "mlp.experts.gate_up_proj": torch.randn(4, 6, 5),
        "mlp.experts.down_proj": torch.randn(4, 5, 3),
    }


def in_sglang(weights: dict[str, torch.Tensor], backend: str, **flags: bool) -> nn.Module:
    """The same layer in SGLang, with the names and shapes of its `FusedMoE`."""
    model, mlp, layer = nn.Module(), nn.Module(), nn.Module()
    gate_up, down = weights.values()
    if flags.get("w13_swiglu_interleaved"):
        gate_up = torch.stack(gate_up.chunk(2, 1), 2).flatten(1, 2)
    layer.w13_weight, layer.w2_weight = nn.Parameter(gate_up.clone()), nn.Parameter(down.clone())
    method = type("UnquantizedFusedMoEMethod", (), flags)()
    method.get_moe_runner_backend = lambda _: SimpleNamespace(name=backend)
    layer.quant_method = method
    mlp.experts, model.mlp = layer, mlp
    return model


def held_of(model: nn.Module, weights: dict[str, torch.Tensor]) -> Fingerprint:
    shapes = {name: tuple(one.shape) for name, one in weights.items()}
    *_, found = SglangHeldWeights(model, shapes, packed={}).fingerprint(1 << 20)
    assert found is not None
    return found


def test_experts_are_given_one_by_one_under_the_names_of_checkpoints() -> None:
    weights = experts() | {"mlp.gate.weight": torch.randn(4, 5)}
    given = dict(expert_by_expert(weights.items()))
    assert len(given) == 1 + 3 * 4
    gate_up, down, router = weights.values()
    for index in range(4):
        name = f"mlp.experts.{index}"
        assert given[f"{name}.gate_proj.weight"].equal(gate_up[index, :3])
        assert given[f"{name}.up_proj.weight"].equal(gate_up[index, 3:])
        assert given[f"{name}.down_proj.weight"].equal(down[index])
    assert given["mlp.gate.weight"] is router


@pytest.mark.parametrize("flags", [{}, {"w13_swiglu_interleaved": True}])
def test_experts_are_compared(flags: dict[str, bool]) -> None:
    weights = experts()
    expected = fingerprint(weights.items())
    model = in_sglang(weights, "TRITON", **flags)
    assert held_of(model, weights).tensors == expected.tensors
    with torch.no_grad():
        model.mlp.experts.w13_weight[3, 4, 2] += 1e-6
    found = held_of(model, weights).tensors
    assert [name for name in found if found[name] != expected.tensors[name]] == [
        next(iter(weights))
    ]


def test_experts_in_the_layout_of_another_kernel_are_left_out() -> None:
    assert not held_of(in_sglang(experts(), "FLASHINFER_TRTLLM"), experts()).tensors
