"""The trap: a policy trained on the very draws that it then re-verifies.

Per replication a softmax policy draws two sequences, rewards push it one step (REINFORCE), and
what the *new* policy would say is asked for. Counted is the pair of what the policy was trained on
and what came out, against

    P(batch) * p_batch(out),

the law of a fresh sample of the policy that the batch made. Batch and policies are enumerated.

    trap-minpq      the first drawn sequence again, accepted with min(1, p/q): repeats the past
    trap-drafts     the same sequence as a draft only, fresh randomness (the default): exact
    trap-untrained  a third sequence, drawn but not trained on, accepted with min(1, p/q): exact
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from benchmarks.exactness.model import Codes, Doubles, Policy, cells, draw, listed
from rollout.acceptance import accept_chain, verify_kept

VOCABULARY, LENGTH, STEP = 3, 2, 1.5
SEQUENCES = VOCABULARY**LENGTH
_TEXTS = np.stack(np.divmod(np.arange(SEQUENCES), VOCABULARY), axis=1)


@dataclass(frozen=True)
class Trained:
    """The policy before, and one for every ordered pair of sequences it can have drawn."""

    before: Policy
    root: Doubles
    """`[B, V]` p(first token) of the policy that batch b made, B = 9 * 9."""
    then: Doubles
    """`[B, V, V]` p(second | first)."""

    def law(self) -> Doubles:
        """`[B * 9]` the law of (batch, fresh sample of the policy that it made)."""
        first = self.before.law()
        batches = (first[:, None] * first).ravel()
        after = (self.root[:, :, None] * self.then).reshape(len(batches), SEQUENCES)
        return (batches[:, None] * after).ravel()

    def along(self, batch: Codes, text: Codes) -> Doubles:
        """`[n, 2, V]` the distributions of batch i's policy at both positions of text i."""
        return np.stack([self.root[batch], self.then[batch, text[:, 0]]], axis=1)


@cache
def trained() -> Trained:
    """One REINFORCE step of size STEP for every batch, from random logits and rewards."""
    rng = np.random.default_rng(5)
    logits = [rng.normal(size=(1, VOCABULARY)), rng.normal(size=(VOCABULARY, VOCABULARY))]
    rewards = rng.normal(size=SEQUENCES)
    tables = [np.exp(a) / np.exp(a).sum(1, keepdims=True) for a in logits]
    roots, thens = [], []
    for batch in np.ndindex(SEQUENCES, SEQUENCES):
        changed = [a.copy() for a in logits]
        for one in batch:
            first, second = _TEXTS[one]
            # d log p(x) / d logits = onehot(x) - p; the advantage is the reward itself.
            for table, where, token in ((0, 0, first), (1, first, second)):
                onehot = np.arange(VOCABULARY) == token
                slope = onehot - tables[table][where]
                changed[table][where] += STEP * rewards[one] * slope / len(batch)
        roots.append(np.exp(changed[0][0]) / np.exp(changed[0][0]).sum())
        thens.append(np.exp(changed[1]) / np.exp(changed[1]).sum(1, keepdims=True))
    return Trained(Policy(tuple(tables)), np.stack(roots), np.stack(thens))


Trap = Callable[[np.random.Generator, int], tuple[Codes, dict[str, float]]]


def min_pq(rng: np.random.Generator, count: int) -> tuple[Codes, dict[str, float]]:
    """Verify the first sequence of the batch by the rule for untrained tokens."""
    first, second = trained().before.sample(rng, count), trained().before.sample(rng, count)
    batch = _batch(first, second)
    return _outcome(batch, _verified(rng, batch, first), first)


def untrained(rng: np.random.Generator, count: int) -> tuple[Codes, dict[str, float]]:
    """Verify a third sequence of the same policy, which the step did not see."""
    first, second, third = (trained().before.sample(rng, count) for _ in range(3))
    batch = _batch(first, second)
    return _outcome(batch, _verified(rng, batch, third), third)


def drafts(rng: np.random.Generator, count: int) -> tuple[Codes, dict[str, float]]:
    """The first sequence of the batch as a draft, judged by fresh draws."""
    first, second = trained().before.sample(rng, count), trained().before.sample(rng, count)
    batch = _batch(first, second)
    samples = np.zeros((count, LENGTH + 1), np.int32)
    for at in range(LENGTH):
        samples[:, at] = draw(rng, trained().along(batch, first)[:, at])
    lengths = np.full(count, LENGTH, np.int32)
    kept = accept_chain(samples, first.astype(np.int32), lengths)
    text = np.where(np.arange(LENGTH) <= kept[:, None], samples[:, :LENGTH], 0)
    return _outcome(batch, _finish(rng, batch, text, kept + 1), first)


def _batch(first: Codes, second: Codes) -> Codes:
    return cells(first, VOCABULARY) * SEQUENCES + cells(second, VOCABULARY)


def _verified(rng: np.random.Generator, batch: Codes, text: Codes) -> Codes:
    """min(1, p/q) and its residual with nothing left out: the lists hold all tokens."""
    count, tokens = len(text), text.ravel()
    before = trained().before.along(text).reshape(-1, VOCABULARY)
    after = trained().along(batch, text).reshape(-1, VOCABULARY)
    verdicts = verify_kept(
        tokens,
        listed(tokens, before, VOCABULARY),
        listed(tokens, after, VOCABULARY),
        tail_ids=np.full(len(tokens), -1),
        tail_logprobs=np.full(len(tokens), -np.inf),
        offsets=np.arange(count + 1) * LENGTH,
        uniforms=rng.random((len(tokens), 2)),
        block=False,
    )
    out, placed = text.copy(), np.flatnonzero(verdicts.token >= 0)
    out[placed, verdicts.accepted[placed]] = verdicts.token[placed]
    return _finish(rng, batch, out, verdicts.accepted + (verdicts.token >= 0))


def _finish(rng: np.random.Generator, batch: Codes, text: Codes, done: Codes) -> Codes:
    text = text.copy()
    for at in range(LENGTH):
        text[:, at] = np.where(
            at < done, text[:, at], draw(rng, trained().along(batch, text)[:, at])
        )
    return text


def _outcome(batch: Codes, out: Codes, past: Codes) -> tuple[Codes, dict[str, float]]:
    """Cells of (batch, out); how often the past came again, and how often it should have."""
    at = cells(past, VOCABULARY)
    fresh = trained().law().reshape(-1, SEQUENCES)
    fresh = fresh / fresh.sum(1, keepdims=True)
    came = cells(out, VOCABULARY)
    notes = {"repeated": float((came == at).sum()), "repeated_fresh": float(fresh[batch, at].sum())}
    return batch * SEQUENCES + came, notes


TRAPS: dict[str, tuple[Trap, bool]] = {
    "trap-minpq": (min_pq, False),
    "trap-drafts": (drafts, True),
    "trap-untrained": (untrained, True),
}
"""Sampler of each mode, and whether it is exact."""
