"""The contexts of a trajectory: the sequences that a model has seen while it generated it.

A sample whose history only grows is one context: its prompt and its response. If the history is
rewritten, a new context begins (`Trajectory.contexts`): its prompt consists of the observed tokens
from there to the next generated one.

    tokens     g g o o g g | o o o o g g      g generated, o observed
    contexts   prompt, g g o o g g            contexts == (6,)
                             o o o o, g g

A generated token belongs to exactly one context, so it is trained on once.

Example:
    >>> from asyncrl.rollout.trajectory import SampleId, Segment
    >>> marks = [Provenance.SAMPLED, Provenance.OBSERVED, Provenance.SAMPLED, Provenance.OBSERVED]
    >>> one = Trajectory(
    ...     id=SampleId(0, 0), prompt_id="p", prompt_tokens=np.array([1, 2], np.int32),
    ...     tokens=np.array([3, 4, 5, 6], np.int32), behaviour_logprobs=np.zeros(4, np.float32),
    ...     provenance=np.array(marks, np.uint8), segments=(Segment(0, 0, 4),),
    ...     finish_reason="length",
    ... )
    >>> [(c.prompt.tolist(), c.response.tolist(), c.trained.tolist()) for c in contexts_of(one)]
    [([1, 2], [3, 4, 5], [True, False, True])]
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncrl.rollout.trajectory import (
    BoolArray,
    IntArray,
    KeptTokens,
    Provenance,
    ScalarT,
    Trajectory,
    TrajectoryBuilder,
)


class Context(NamedTuple):
    """A sequence in which tokens were generated. R is the length of its response."""

    prompt: IntArray
    """`[P]`, at least 1."""
    response: IntArray
    """`[R]` up to the last trained token; nothing is conditioned on what was observed after it."""
    trained: BoolArray
    """`[R]` the tokens that the policy has drawn, including the last one."""
    start: int
    """Index of the response's first token in the trajectory."""


def contexts_of(trajectory: Trajectory, *, one_more: bool = False) -> list[Context]:
    """Return all contexts with a trained token, in order.

    If `one_more`, a token 0 is added after the trajectory's last one, which counts as trained: its
    state is the one after the end.
    """
    tokens, trained = trajectory.tokens, trajectory.trained
    if one_more:
        tokens = np.append(tokens, np.zeros(1, tokens.dtype))
        trained = np.append(trained, np.ones(1, np.bool_))
    places = np.flatnonzero(trained)
    bounds = [0, *trajectory.contexts, len(tokens)]
    found: list[Context] = []
    for begin, end in pairwise(bounds):
        own = places[(places >= begin) & (places < end)]
        if not len(own):
            continue
        first, last = int(own[0]) if begin else 0, int(own[-1]) + 1
        prompt = tokens[begin:first] if begin else trajectory.prompt_tokens
        found.append(Context(prompt, tokens[first:last], trained[first:last], first))
    return found


def seed_of_context(seed: int, context: int) -> int:
    """Return the seed of a context's random numbers, 0 to 2**63 - 1 but for the first one.

    Each context counts its places from 0, so with one seed for all it would be drawn and judged
    with the numbers of the first.
    """
    if not context:
        return seed
    digest = hashlib.blake2b(f"context {context} {seed}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def longest_response(trajectory: Trajectory) -> int:
    """Count tokens of the longest context beyond the first prompt's length, observed ones included.

    `sampling.max_tokens` bounds it: every context fits where one context would.
    """
    bounds = [0, *trajectory.contexts, len(trajectory.tokens)]
    longest = bounds[1]
    for begin, end in pairwise(bounds[1:]):
        drawn = np.flatnonzero(trajectory.trained[begin:end])
        prompt = int(drawn[0]) if len(drawn) else end - begin
        beyond = max(0, prompt - len(trajectory.prompt_tokens))
        longest = max(longest, beyond + end - begin - prompt)
    return longest


@dataclass(frozen=True, slots=True)
class Verification:
    """Tokens to verify, a context at a time, and the results so far.

    If all of a context is accepted, the next one stands as it was, since its prompt depends on
    accepted tokens only. After a rejection, later contexts are dropped.
    """

    kept: KeptTokens
    builder: TrajectoryBuilder
    """Begun anew for this verification."""

    def to_verify_now(self) -> KeptTokens | None:
        """Return the context that has just begun, up to its last generated token; None: nothing."""
        start = self.builder.context_start
        if len(self.builder) != start or not self._is_whole:
            return None
        part = self._part_of(start)
        return part if len(part) else None

    def draft(self) -> IntArray:
        """Return `[D]` tokens that followed in the present context before."""
        return self._part_of(len(self.builder)).tokens

    def begin_next(self) -> bool:
        """Begin the next context if the present one was accepted; return True if it was begun."""
        done, kept = len(self.builder), self.kept
        later = [place for place in kept.contexts if place >= done]
        if not later or not self._is_whole or not kept.observed[done : later[0]].all():
            return False
        begin = later[0]
        end = min([place for place in later if place > begin], default=len(kept))
        drawn = np.flatnonzero(~kept.observed[begin:end])
        self.builder.append_observed(kept.tokens[done:begin])
        self.builder.begin_context(kept.tokens[begin : begin + drawn[0] if len(drawn) else end])
        return True

    def judged(self) -> tuple[int, int]:
        """Return the numbers of accepted and rejected generated tokens in the present context."""
        start, drawn = self.builder.context_start, ~self.kept.observed
        accepted = self.builder.count(Provenance.VERIFIED) - int(drawn[:start].sum())
        whole = accepted == int((~self._part_of(start).observed).sum())
        end = start + len(self._part_of(start)) if whole else len(self.kept)
        return accepted, int(drawn[start:end].sum()) - accepted

    def unjudged(self) -> KeptTokens | None:
        """Return the tokens of contexts that were not submitted yet; None: there are none."""
        done = len(self.builder)
        if not self.builder.contexts or done != self.builder.context_start or not self._is_whole:
            return None
        return self.kept.part(done, len(self.kept)) if done < len(self.kept) else None

    @property
    def _is_whole(self) -> bool:
        """True if no token was rejected: each rejection draws another one."""
        return not any(
            self.builder.count(kind) for kind in (Provenance.SAMPLED, Provenance.DRAFTED)
        )

    def _part_of(self, start: int) -> KeptTokens:
        end = min([place for place in self.kept.contexts if place >= start], default=len(self.kept))
        drawn = np.flatnonzero(~self.kept.observed[start:end])
        if end < len(self.kept):  # observed tokens at its end are not a turn of this context
            end = start + int(drawn[-1]) + 1 if len(drawn) else start
        whole = start == 0 and end == len(self.kept)
        return self.kept if whole else self.kept.part(start, max(start, end))


def stacked(arrays: Sequence[NDArray[ScalarT]], fill: float) -> NDArray[ScalarT]:
    """Concatenate `[N]` arrays, or `[N, K]` tables, padded to the longest rows."""
    if arrays[0].ndim > 1:
        k = max(one.shape[1] for one in arrays)
        pads = [((0, 0), (0, k - one.shape[1])) for one in arrays]
        arrays = [
            np.pad(one, pad, constant_values=fill) for one, pad in zip(arrays, pads, strict=True)
        ]
    return np.concatenate(arrays)


def joined(first: KeptTokens, rest: KeptTokens) -> KeptTokens:
    """Concatenate tokens to verify; lists are padded to one length."""
    fills = dict.fromkeys(("tokens", "logprobs", "noise_seeds", "observed", "topk_ids"), -1.0)
    both: dict[str, Any] = {
        name: stacked([getattr(first, name), getattr(rest, name)], fill)
        for name, fill in {**fills, "topk_logprobs": -np.inf}.items()
    }
    later = tuple(len(first) + place for place in rest.contexts)
    return replace(first, contexts=first.contexts + later, **both)
