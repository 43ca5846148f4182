"""Drafting for the rows of a decode step, as chains or as trees.

Drafting chains: the winning token at each place, one after the other.

The candidates that voted for the winner are kept, and they vote on the next token. When all of them
have reached the end of their sequences (a sibling that is only a few tokens ahead), the search
starts again from the row's tokens and the draft so far. `asyncrl.cache.tree.branch` follows several
tokens.
"""

from __future__ import annotations

import numpy as np

from asyncrl.cache.tree.arena import END, OWN, RING_AT, TREE, LongArray
from asyncrl.cache.tree.branch import draft_tree, working_space
from asyncrl.cache.tree.estimate import Experience, base_of, corrected, kind_of
from asyncrl.cache.tree.match import (
    Candidates,
    RowState,
    Rules,
    Search,
    collect,
    last_index,
    move_on,
)
from asyncrl.rollout.jit import kernels_of
from asyncrl.rollout.trajectory import FloatArray, IntArray

kernel = kernels_of("cache/tree")


@kernel
def vote(
    arena: IntArray, positions: LongArray, weights: FloatArray, count: int
) -> tuple[int, int, float, float]:
    """Move all candidates one token ahead and keep those that vote for the winning token.

    Returns:
        the number kept (0: all are at the end of their sequences), the token, its weight, and the
        weight of all votes.
    """
    alive, total, united = move_on(arena, positions, weights, 0, count)
    if united:
        return alive, arena[positions[0]], total, total
    best = -1
    best_weight = 0.0
    for item in range(alive):
        # Once the other tokens cannot win any more, they need not be counted.
        token = arena[positions[item]]
        if token == best or 2.0 * best_weight > total:
            continue
        weight = 0.0
        for other in range(item, alive):
            if arena[positions[other]] == token:
                weight += weights[other]
        if weight > best_weight:
            best_weight = weight
            best = token
    kept = 0
    for item in range(alive):
        if arena[positions[item]] == best:
            positions[kept] = positions[item]
            weights[kept] = weights[item]
            kept += 1
    return kept, best, best_weight, total


@kernel
def draft_chain(
    search: Search,
    row: RowState,
    budget: int,
    min_probability: float,
    experience: Experience,
    past: IntArray,
    candidates: Candidates,
    tokens: IntArray,
    parents: IntArray,
    probabilities: FloatArray,
) -> int:
    """Draft up to `budget` tokens after past[:max_match]; returns how many.

    `past` `[max_match + max_draft_tokens]` is filled with the draft as it grows.
    """
    arena = search.arena
    max_match = search.rules.max_match
    positions = candidates.positions
    weights = candidates.weights
    guessed = experience.tokens[row.row]
    guess_parents = experience.parents[row.row]
    bases = experience.bases[row.row]
    kinds = experience.kinds[row.row]
    drafted = 0
    path = 1.0
    while drafted < budget:
        count, matched = collect(search, row, drafted, past, max_match + drafted, 0.0, candidates)
        if count == 0:
            break
        while drafted < budget:
            count, token, weight, total = vote(arena, positions, weights, count)
            if count == 0:
                break
            base = base_of(weight, total, experience.doubts[matched])
            kind = kind_of(weight, total, matched, max_match)
            path *= corrected(base, experience.odds[kind])
            # The guess that ends the draft is remembered too, or its kind could never recover.
            guessed[drafted] = token
            guess_parents[drafted] = drafted - 1
            bases[drafted] = base
            kinds[drafted] = kind
            experience.waiting[row.row] = drafted + 1
            if path < min_probability:
                return drafted
            tokens[drafted] = token
            parents[drafted] = drafted - 1
            probabilities[drafted] = path
            past[max_match + drafted] = token
            drafted += 1
            if matched < max_match:
                matched += 1
    return drafted


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
