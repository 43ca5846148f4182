"""Drafting for the rows of a decode step, as chains or as trees."""

from __future__ import annotations

import numpy as np

from asyncrl.cache.tree.arena import END, OWN, RING_AT, TREE, LongArray
from asyncrl.cache.tree.branch import draft_tree, working_space
from asyncrl.cache.tree.chain import draft_chain
from asyncrl.cache.tree.estimate import Experience
from asyncrl.cache.tree.jit import kernel
from asyncrl.cache.tree.match import Candidates, RowState, Rules, Search, last_index
from asyncrl.rollout.trajectory import FloatArray, IntArray


@kernel
def past_of(ring: IntArray, at: int, past: IntArray) -> None:
    """Write a row's last tokens, oldest first, to the front of `past`."""
    size = len(ring)
    past[: size - at] = ring[at:]
    past[size - at : size] = ring[:at]


@kernel
def draft(
    arena: IntArray,
    trees: LongArray,
    cursors: LongArray,
    rings: IntArray,
    rows: IntArray,
    budgets: IntArray,
    min_probability: float,
    rules: Rules,
    policy_version: int,
    experience: Experience,
    branching: bool,
    offsets: IntArray,
    tokens: IntArray,
    parents: IntArray,
    probabilities: FloatArray,
) -> int:
    """Draft for `[B]` rows; fills `offsets` `[B+1]` and the front of the arrays after it.

    Row i drafts at most budgets[i] tokens whose path probability is at least `min_probability`:
    a token tree if `branching`, otherwise a chain.

    Returns:
        the number of tokens drafted.
    """
    search = Search(arena, trees, rules, policy_version)
    past = np.empty(rules.max_match + rules.max_draft_tokens, np.int32)
    recent = np.empty(rules.max_match, np.int32)
    guesses = working_space(rules)
    candidates = Candidates(
        guesses.candidates.positions[: rules.max_candidates],
        guesses.candidates.lengths[: rules.max_candidates],
        guesses.candidates.weights[: rules.max_candidates],
    )
    total = 0
    offsets[0] = 0
    for item in range(len(rows)):
        row = rows[item]
        tree = cursors[row, TREE]
        experience.waiting[row] = 0
        budget = min(budgets[item], rules.max_draft_tokens)
        if tree >= 0 and budget > 0:
            past_of(rings[row], cursors[row, RING_AT], past)
            own = cursors[row, OWN]
            state = RowState(row, tree, own, last_index(arena, own, cursors[row, END]))
            free = slice(total, len(tokens))
            if branching:
                total += draft_tree(
                    search, state, budget, min_probability, experience, past, recent, guesses,
                    tokens[free], parents[free], probabilities[free],
                )  # fmt: skip
            else:
                total += draft_chain(
                    search, state, budget, min_probability, experience, past, candidates,
                    tokens[free], parents[free], probabilities[free],
                )  # fmt: skip
        offsets[item + 1] = total
    return total
