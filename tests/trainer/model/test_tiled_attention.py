"""Attention by tiles against torch's, on padded sequences."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from asyncrl.trainer.model import tiled_attention
from asyncrl.trainer.model.packing import Family, Layout


def whole_sequences(parts: list[Tensor], layout: Layout, scale: float | None) -> Tensor:
    """`[1, T, H, D]`: each segment with what it shares, by torch's attention."""
    query, key, value = parts
    out = []
    for start, end, place, shared in layout.segments:
        rows = torch.cat([torch.arange(place, place + shared), torch.arange(start, end)])
        mine = (one[:, :, rows] for one in (query, key, value))
        found = scaled_dot_product_attention(*mine, is_causal=True, scale=scale, enable_gqa=True)
        out.append(found[:, :, shared:].transpose(1, 2))
    return torch.cat(out, 1)


@pytest.mark.parametrize(
    ("lengths", "families", "heads", "kv_heads", "scale"),
    [
        ([200, 137, 65, 64], [Family(4, 30)], 4, 2, None),
        ([129, 1, 70, 3], [Family(2), Family(2, 2)], 3, 3, 0.3),
        ([64, 64, 5, 5], [Family(2, 64), Family(2, 4)], 6, 1, None),
    ],
)
def test_tiles_are_whole_attention(
    lengths: list[int],
    families: list[Family],
    heads: int,
    kv_heads: int,
    scale: float | None,
) -> None:
    layout = Layout.of(lengths, torch.device("cpu"), families)
    tokens = layout.positions.shape[1]
    generator = torch.Generator().manual_seed(len(lengths))
    parts = [
        torch.randn(1, count, tokens, 8, dtype=torch.float64, generator=generator)
        for count in (heads, kv_heads, kv_heads)
    ]
    # As models pass them: heads are a transposed view.
    parts = [one.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for one in parts]
    given = torch.randn(1, tokens, heads, 8, dtype=torch.float64, generator=generator)
    results = [
        tiled_attention.attend(*parts, layout.segments, scale=scale),
        whole_sequences(parts, layout, scale),
    ]
    for found, expected in zip(
        *[(one, *torch.autograd.grad(one, parts, given)) for one in results], strict=True
    ):
        np.testing.assert_allclose(found.detach(), expected.detach(), rtol=0, atol=1e-12)


def test_short_segments_and_other_types_are_not_served() -> None:
    segments = [(0, 100, 0, 0), (100, 128, 100, 0)]
    row = torch.zeros(1, 2, 128, 8)
    assert tiled_attention.serves(row, segments)
    assert not tiled_attention.serves(row.bfloat16(), segments)
    assert not tiled_attention.serves(row, [*segments, (128, 129, 128, 0)])
    with torch.autocast("cpu", torch.bfloat16):
        assert not tiled_attention.serves(row, segments)
