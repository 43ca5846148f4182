"""Attention without padding against attention with padding: values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncrl.trainer.base.errors import UnsupportedModelError
from asyncrl.trainer.model import varlen
from asyncrl.trainer.model.packing import Family, Layout, packed_attention
from asyncrl.trainer.model.policy import Policy

FAMILIES = [
    pytest.param([7, 3, 5], (), id="own prompts"),
    pytest.param([9, 6, 4, 4], (Family(4, 4),), id="one prompt, the last two have it alone"),
    pytest.param([9, 6, 11, 3, 8, 8], (Family(2, 5), Family(1), Family(3, 2)), id="several groups"),
]


def definition(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool = False,
) -> Tensor:
    """What `torch.nn.attention.varlen.varlen_attn` computes, one segment after the other."""
    left, right = window_size
    assert right == 0
    assert enable_gqa == (query.shape[1] != key.shape[1])
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    ends_q, ends_k = cu_seq_q.tolist(), cu_seq_k.tolist()
    assert (ends_q[-1], ends_k[-1]) == (len(query), len(key))
    assert max_q == max(b - a for a, b in pairwise(ends_q))
    assert max_k == max(b - a for a, b in pairwise(ends_k))
    repeats = query.shape[1] // key.shape[1]
    out = []
    for q0, q1, k0, k1 in zip(ends_q, ends_q[1:], ends_k, ends_k[1:], strict=False):
        queries = query[q0:q1].transpose(0, 1)
        keys, values = (
            one[k0:k1].transpose(0, 1).repeat_interleave(repeats, 0) for one in (key, value)
        )
        scores = queries @ keys.transpose(1, 2) * (scale or query.shape[-1] ** -0.5)
        at = torch.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0)
        column = torch.arange(k1 - k0)
        seen = (column <= at) & ((left < 0) | (column >= at - left))
        out.append((scores.masked_fill(~seen, -torch.inf).softmax(-1) @ values).transpose(0, 1))
    return torch.cat(out)


def _both_ways(
    monkeypatch: pytest.MonkeyPatch,
    layout: Layout,
    window: int | None,
    kind: torch.dtype,
    device: str,
) -> list[list[Tensor]]:
    """Output and gradients, with padding and without."""
    tokens = layout.positions.shape[1]
    generator = torch.Generator().manual_seed(0)
    found = []
    for without in (False, True):
        monkeypatch.setattr(varlen, "serves", lambda _query, without=without: without)
        generator.manual_seed(0)
        heads = [
            torch.randn(1, count, tokens, 16, generator=generator, dtype=torch.float64)
            .to(device, kind)
            .requires_grad_()
            for count in (4, 2, 2)
        ]
        module: Any = torch.nn.Identity()
        out, _ = packed_attention(
            module, *heads, None, scaling=0.3, sliding_window=window, packed_layout=layout
        )
        direction = torch.randn(out.shape, generator=generator, dtype=torch.float64)
        grads = torch.autograd.grad(out, heads, direction.to(device, kind))
        found.append([out.detach(), *grads])
    return found


@pytest.mark.parametrize(("lengths", "families"), FAMILIES)
@pytest.mark.parametrize("window", [None, 3, 1])
@pytest.mark.parametrize("grouped", [True, False])
def test_both_ways_are_equal_by_the_kernels_definition(
    monkeypatch: pytest.MonkeyPatch,
    lengths: list[int],
    families: tuple[Family, ...],
    window: int | None,
    grouped: bool,
) -> None:
    """Also with the kernel of torch 2.11, which knows no groups of heads."""
    monkeypatch.setattr(varlen, "varlen_attn", definition)
    monkeypatch.setattr(varlen, "_GROUPED", grouped)
    layout = Layout.of(lengths, torch.device("cpu"), families)
    padded, without = _both_ways(monkeypatch, layout, window, torch.float64, "cpu")
    for one, other in zip(padded, without, strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-10)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
@pytest.mark.parametrize(("lengths", "families"), FAMILIES)
@pytest.mark.parametrize("window", [None, 3])
def test_the_real_kernel_computes_its_definition(
    monkeypatch: pytest.MonkeyPatch,
    lengths: list[int],
    families: tuple[Family, ...],
    window: int | None,
) -> None:
    layout = Layout.of(lengths, torch.device("cuda"), families)
    padded, without = _both_ways(monkeypatch, layout, window, torch.bfloat16, "cuda")
    for one, other in zip(padded, without, strict=True):
        torch.testing.assert_close(one, other, atol=0.05, rtol=0.05)


def test_a_cpu_and_float32_take_the_padded_way() -> None:
    assert not varlen.serves(torch.zeros(1, 2, 3, 4, dtype=torch.bfloat16))
    assert not varlen.serves(torch.zeros(1, 2, 3, 4, device="meta"))


def leaking(*arguments: Any, **more: Any) -> Tensor:
    """A kernel that lets each query attend to the sequences before its own, too."""
    query, key, value, query_ends, _, _, _ = arguments
    whole = [torch.tensor([0, len(one)], dtype=torch.int32) for one in (query, key)]
    del query_ends
    return definition(query, key, value, *whole, len(query), len(key), **more)


@pytest.mark.parametrize("name", ["qwen3", "mixtral", "mistral_window"])
def test_the_kernel_of_16_bits_is_compared_at_the_start(
    monkeypatch: pytest.MonkeyPatch, model_path: Callable[[str], str], name: str
) -> None:
    """It only computes under autocast, so what float32 shows says nothing about it."""
    computed: list[Any] = []

    def counted(*arguments: Any, **more: Any) -> Tensor:
        computed.append(arguments[0].dtype)
        return definition(*arguments, **more)

    monkeypatch.setattr(varlen, "serves", lambda _query: torch.is_autocast_enabled("cpu"))
    monkeypatch.setattr(varlen, "varlen_attn", counted)
    Policy(model_path(name), dtype="bfloat16", device=torch.device("cpu"))
    assert set(computed) == {torch.bfloat16}
    monkeypatch.setattr(varlen, "varlen_attn", leaking)
    with pytest.raises(
        UnsupportedModelError, match=r"in bfloat16 on cpu: by [01]\.\d+ of their size"
    ):
        Policy(model_path(name), dtype="bfloat16", device=torch.device("cpu"))
    Policy(model_path(name), dtype="float32", device=torch.device("cpu"))
