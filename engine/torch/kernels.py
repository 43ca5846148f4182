"""Compiles or loads all kernels before the first step, so that no step waits for a compiler."""

from __future__ import annotations

import numpy as np

import cache.tree
from engine.torch.trees import plant
from rollout.acceptance import TopKDistributions, accept_tree, verify_kept


def warm_up(*, drafting: bool) -> None:
    """Load the kernels that a core uses, or compile them (a few seconds, once per machine).

    Args:
        drafting: whether there is a cache to draft from.
    """
    if drafting:
        cache.tree.warm_up()
    none, two = np.array([-1, -1], np.int32), np.array([2], np.int32)
    one = np.array([0, 1], np.int32)
    forked = cache.tree.Drafts(one, none, np.array([0, 2], np.int32), np.ones(2, np.float32))
    trees = plant(forked, two, two, 2)
    trees.hidden()
    accept_tree(np.zeros(3, np.int64), trees.tokens, trees.parents, trees.offsets)
    known = TopKDistributions(np.zeros(2, np.float32), one[:, None], np.zeros((2, 1), np.float32))
    verify_kept(
        one,
        known,
        known,
        tail_ids=none,
        tail_logprobs=np.full(2, -np.inf),
        offsets=np.array([0, 2], np.int32),
        uniforms=np.zeros((2, 2)),
    )
