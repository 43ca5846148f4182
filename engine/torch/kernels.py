"""Compiles or loads all kernels before the first step, so that no step waits for a compiler."""

from __future__ import annotations

import numpy as np
import torch

from asyncrl.cache.tree import rollout_tree as tree
from asyncrl.engine.drafting.proposals import warm_up as warm_up_proposals
from asyncrl.engine.drafting.step_times import warm_up as warm_up_step_times
from asyncrl.engine.drafting.trees import plant
from asyncrl.engine.sampling.logits import warm_up as warm_up_drawing
from asyncrl.engine.torch.model import SlotModel
from asyncrl.engine.torch.step_kernels import (
    GeneratedTokens,
    advance_rows,
    append_draws,
    choose_draws,
    pack,
    pick_tokens,
    place_draws,
)
from asyncrl.rollout.acceptance import accept_tree, warm_up_verification


@torch.inference_mode()
def warm_up(model: SlotModel, *, listed: int, drafting: bool) -> None:
    """Load or compile the kernels that a core uses: a few seconds once per machine.

    Takes half a minute on a GPU. `listed` is K of the core's draws; `drafting`: there is a cache.
    """
    if drafting:
        tree.warm_up()
        warm_up_step_times()
    none, two = np.array([-1, -1], np.int32), np.array([2], np.int32)
    one = np.array([0, 1], np.int32)
    forked = tree.Drafts(one, none, np.array([0, 2], np.int32), np.ones(2, np.float32))
    trees = plant(forked, two, two, 2)
    trees.hidden()
    accept_tree(np.zeros(3, np.int64), trees.tokens, trees.parents, trees.offsets)
    warm_up_proposals()
    warm_up_verification()
    first = np.zeros(1, np.int32)
    warm_up_drawing(model.forward_fresh(first, first + 1, np.zeros(1, np.int64)), listed)
    _warm_up_step()


def _warm_up_step() -> None:
    """Compile the loops of `asyncrl.engine.torch.step_kernels`, for two rows with a draw each."""
    zero, none = np.zeros(2, np.int32), np.empty(0, np.int32)
    seeds, flags = np.zeros(2, np.uint64), np.zeros(2, np.bool_)
    row, starts, _, _, noise = place_draws(zero + 1, none, zero, seeds, seeds)
    chosen, at, step = (np.empty(2, np.int64) for _ in range(3))
    kept, total, stops = zero.copy(), zero.copy(), np.full((2, 1), -1, np.int64)
    choose_draws(zero, starts, 0, none, row, stops, zero, zero + 1, chosen, at, step, kept, flags)
    lists = np.zeros((2, 1), np.int32), np.zeros((2, 1), np.float32)
    buffers = GeneratedTokens.empty(2, 1, top_k=1)
    append_draws(
        chosen, at, step, zero, flags, row, lists[1][:, 0].copy(), *lists, noise,
        np.zeros((2, 1), np.int32), total, zero.copy(), buffers,
    )  # fmt: skip
    advance_rows(
        kept, flags, flags, total, zero + 2, zero.copy(), zero.copy(), flags, 1, row, chosen
    )
    pack(buffers, starts, kept)
    pick_tokens(starts, row, kept, flags, zero.copy(), np.zeros(3, np.int32))
