"""Compiles or loads all kernels before the first step, so that no step waits for a compiler."""

from __future__ import annotations

import numpy as np

import cache.tree
from engine.drafting.step_times import warm_up as warm_up_step_times
from engine.drawing import warm_up as warm_up_drawing
from engine.torch.trees import plant
from rollout.acceptance import accept_tree, warm_up_verification


def warm_up(*, drafting: bool) -> None:
    """Load the kernels that a core uses, or compile them (a few seconds, once per machine).

    Args:
        drafting: whether there is a cache to draft from.
    """
    if drafting:
        cache.tree.warm_up()
        warm_up_step_times()
    none, two = np.array([-1, -1], np.int32), np.array([2], np.int32)
    one = np.array([0, 1], np.int32)
    forked = cache.tree.Drafts(one, none, np.array([0, 2], np.int32), np.ones(2, np.float32))
    trees = plant(forked, two, two, 2)
    trees.hidden()
    accept_tree(np.zeros(3, np.int64), trees.tokens, trees.parents, trees.offsets)
    warm_up_verification()
    warm_up_drawing()
