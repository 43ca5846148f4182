"""Hands tensors of a test to an engine as a trainer does: published, staged, installed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from asyncrl.engine.protocol import Engine, TokenChunk
from asyncrl.wire.weights.writer import published

if TYPE_CHECKING:
    import torch

    from asyncrl.engine.torch.core import DecodeCore

Tensors = Iterable[tuple[str, "torch.Tensor"]]


def swap_weights(core: DecodeCore, tensors: Tensors, policy_version: int) -> list[TokenChunk]:
    """What the core had not reported of the old version."""
    with published(tensors, policy_version) as manifest:
        core.stage_weights(manifest)
    return core.install_weights(policy_version)


async def give_weights(engine: Engine, tensors: Tensors, policy_version: int) -> None:
    with published(tensors, policy_version) as manifest:
        await engine.stage_weights(manifest)
    await engine.install_weights(policy_version)
