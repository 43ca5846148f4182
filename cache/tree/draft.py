"""Drafting for the rows of a decode step, as chains or as trees.

Chains take the winning token at each place. The candidates that voted for the winner vote on the
next token. When all of them have reached the end of their sequences, the search starts again from
the row's tokens and the draft so far.

In token trees every token with a vote is a branch, and the most probable path grows first. A
*guess* is a token with the candidates that vote for it, a range of one array. Grouping the
candidates of a guess by their next token, in place, gives the guesses that follow it. The nodes of
the draft are the guesses that have *grown*. The expected number of accepted tokens is the sum of
path probabilities, and none exceeds its parent's, so the greedy choice gives the best tree of its
size (arXiv 2406.16858, 2406.17276).
"""

from typing import NamedTuple

import numpy as np

from asyncrl.cache.tree.arena import END, OWN, RING_AT, TREE, LongArray
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

BLEND = 0.1
"""Votes that all candidates with a shorter match share when few have a long one: alternatives."""


class Guesses(NamedTuple):
    """Working space for one row: `[K]` of K guesses in order of creation, and K candidates."""

    tokens: IntArray
    parents: IntArray
    """The guess before it, -1 for the row's last token."""
    nodes: IntArray
    """Its index in the draft, once it has grown."""
    starts: IntArray
    """Its candidates are positions[starts[k] : stops[k]]."""
    stops: IntArray
    matches: IntArray
    """Length of the longest match among them."""
    paths: FloatArray
    """Path probability."""
    queue: IntArray
    """`[max_draft_tokens]` guesses that may grow, likeliest last."""
    candidates: Candidates


kernel = kernels_of("cache/tree")


@kernel
def working_space(rules: Rules) -> Guesses:
    """Allocate space for every guess within the budget: each node's candidates vote once."""
    size = (rules.max_draft_tokens + 1) * rules.max_candidates
    return Guesses(
        np.empty(size, np.int32),
        np.empty(size, np.int32),
        np.empty(size, np.int32),
        np.empty(size, np.int32),
        np.empty(size, np.int32),
        np.empty(size, np.int32),
        np.empty(size, np.float32),
        np.empty(rules.max_draft_tokens, np.int32),
        Candidates(np.empty(size, np.int64), np.empty(size, np.int32), np.empty(size, np.float32)),
    )


@kernel
def group(
    arena: IntArray, positions: LongArray, weights: FloatArray, start: int, stop: int
) -> tuple[int, float]:
    """Move positions with the first one's token to the front; return their stop and weight."""
    token = arena[positions[start]]
    weight = float(weights[start])
    end = start + 1
    for item in range(start + 1, stop):
        if arena[positions[item]] == token:
            weight += weights[item]
            positions[item], positions[end] = positions[end], positions[item]
            weights[item], weights[end] = weights[end], weights[item]
            end += 1
    return end, weight


@kernel
def enqueue(queue: IntArray, size: int, room: int, paths: FloatArray, guess: int) -> int:
    """Insert a guess in order and keep only the best `room`; return the new size."""
    path = paths[guess]
    if size < room:
        at = size
        while at > 0 and paths[queue[at - 1]] > path:
            queue[at] = queue[at - 1]
            at -= 1
        queue[at] = guess
        return size + 1
    if size and paths[queue[0]] < path:
        at = 0
        while at + 1 < size and paths[queue[at + 1]] < path:
            queue[at] = queue[at + 1]
            at += 1
        queue[at] = guess
    return size


@kernel
def trail(past: IntArray, guesses: Guesses, guess: int, out: IntArray) -> None:
    """Write the last tokens up to a guess to `out` `[max_match]`."""
    at = len(out) - 1
    while guess >= 0 and at >= 0:
        out[at] = guesses.tokens[guess]
        guess = guesses.parents[guess]
        at -= 1
    behind = len(out) - 1
    while at >= 0:
        out[at] = past[behind]
        at -= 1
        behind -= 1


@kernel
def depth_of_guess(guesses: Guesses, guess: int) -> int:
    """Return the length of the path that ends with a guess; 0 for -1, the row's last token."""
    depth = 0
    while guess >= 0:
        depth += 1
        guess = guesses.parents[guess]
    return depth


@kernel
def fork(
    search: Search,
    row: RowState,
    experience: Experience,
    guesses: Guesses,
    made: int,
    parent: int,
    start: int,
    stop: int,
    total: float,
    united: bool,
    matched: int,
) -> int:
    """Make the guesses that follow guess `parent` (-1: the row's last token).

    Their candidates are positions[start:stop], already moved to their next token: `total` is the
    weight of all votes, `united` tells if all are for one token, and `matched` is the length of the
    longest match. `made` guesses exist so far. Returns the new number of guesses.
    """
    positions = guesses.candidates.positions
    max_match = search.rules.max_match
    first = made
    certain = 0.0
    width = experience.tokens.shape[1]
    while start < stop:
        end, weight = stop, total
        if not united:
            end, weight = group(search.arena, positions, guesses.candidates.weights, start, stop)
        token = search.arena[positions[start]]
        base = base_of(weight, total, experience.doubts[matched])
        kind = kind_of(weight, total, matched, max_match)
        probability = corrected(base, experience.odds[kind])
        guesses.tokens[made] = token
        guesses.parents[made] = parent
        guesses.starts[made] = start
        guesses.stops[made] = end
        guesses.matches[made] = matched + 1 if matched < max_match else matched
        guesses.paths[made] = probability
        certain += probability
        if made < width:
            experience.tokens[row.row, made] = token
            experience.parents[row.row, made] = parent
            experience.bases[row.row, made] = base
            experience.kinds[row.row, made] = kind
            experience.waiting[row.row] = made + 1
        made += 1
        start = end
    # Corrected one by one, the probabilities of siblings may add up to more than 1.
    scale = (guesses.paths[parent] if parent >= 0 else 1.0) / max(certain, 1.0)
    for guess in range(first, made):
        guesses.paths[guess] *= scale
    return made


@kernel
def draft_tree(
    search: Search,
    row: RowState,
    budget: int,
    min_probability: float,
    experience: Experience,
    past: IntArray,
    recent: IntArray,
    guesses: Guesses,
    tokens: IntArray,
    parents: IntArray,
    probabilities: FloatArray,
) -> int:
    """Draft up to `budget` nodes after past[:max_match]; return their number."""
    positions, lengths, weights = guesses.candidates
    drafted = made = waiting = top = 0
    parent = -1
    start = stop = matched = 0
    while True:
        stop, total, united = move_on(search.arena, positions, weights, start, stop)
        if start == stop:
            trail(past, guesses, parent, recent)
            depth = depth_of_guess(guesses, parent)
            room = slice(top, top + search.rules.max_candidates)
            free = Candidates(positions[room], lengths[room], weights[room])
            count, matched = collect(search, row, depth, recent, len(recent), BLEND, free)
            start = top
            top += count
            stop, total, united = move_on(search.arena, positions, weights, start, top)
        first = made
        made = fork(
            search, row, experience, guesses, made, parent, start, stop, total, united, matched
        )
        for guess in range(first, made):
            if guesses.paths[guess] >= min_probability:
                waiting = enqueue(guesses.queue, waiting, budget - drafted, guesses.paths, guess)
        if waiting == 0:
            return drafted
        waiting -= 1
        parent = guesses.queue[waiting]
        above = guesses.parents[parent]
        tokens[drafted] = guesses.tokens[parent]
        parents[drafted] = guesses.nodes[above] if above >= 0 else -1
        probabilities[drafted] = guesses.paths[parent]
        guesses.nodes[parent] = drafted
        drafted += 1
        if drafted == budget:
            return drafted
        start, stop = guesses.starts[parent], guesses.stops[parent]
        matched = guesses.matches[parent]


@kernel
def vote(
    arena: IntArray, positions: LongArray, weights: FloatArray, count: int
) -> tuple[int, int, float, float]:
    """Move all candidates one token ahead and keep those that vote for the winning token.

    Returns the number kept (0: all have ended), the token, its weight, and that of all votes.
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
    """Draft up to `budget` tokens after past[:max_match]; return their number.

    `past` `[max_match + max_draft_tokens]` is filled with the draft as it grows.
    """
    arena, max_match = search.arena, search.rules.max_match
    positions, weights = candidates.positions, candidates.weights
    guessed, guess_parents = experience.tokens[row.row], experience.parents[row.row]
    bases, kinds = experience.bases[row.row], experience.kinds[row.row]
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
    """Draft for `[B]` rows; fill `offsets` `[B+1]` and the front of the arrays after it.

    Row i drafts at most budgets[i] tokens whose path probability is at least `min_probability`: a
    token tree if `branching`, otherwise a chain. Returns the number of tokens drafted.
    """
    search = Search(arena, trees, rules, policy_version)
    past = np.empty(rules.max_match + rules.max_draft_tokens, np.int32)
    recent = np.empty(rules.max_match, np.int32)
    guesses = working_space(rules)
    space, wanted = guesses.candidates, slice(rules.max_candidates)
    candidates = Candidates(space.positions[wanted], space.lengths[wanted], space.weights[wanted])
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
