"""Rollouts of earlier epochs as the beginning of new ones: SPEC-RL's rule, biased, on request.

    earlier = EarlierRollouts.of(config.cache)  # None unless cache.reuse is lenient
    earlier.remember(trajectory)  # as it is delivered
    kept = earlier.kept("add-17", sample=3)  # as that sample starts; None: write it anew

With `cache.reuse: lenient` sample i of a prompt begins with what sample i of that prompt was when
it was last trained on. Each of its tokens x is kept with probability min(1, l p(x)/q(x)), p being
the policy of now and q the one that the token followed then; the first that is not kept is drawn
from p, and so is what follows (arXiv 2509.23232). Tokens that are kept carry p's log-probability
and p's version, so staleness is 0, and they still do not follow p: the policy was trained on these
very draws, the residual is missing, and l bends the rest (docs/exactness.md).

Each generator keeps what it delivered itself, in memory: a sample that another generator writes in
the next epoch, or that comes after a resume, is written anew. That costs speed only.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Self

import numpy as np

from cache.config import CacheConfig
from rollout.trajectory import FloatArray, IntArray, KeptTokens, Trajectory

TOKEN_BYTES = 8
"""An id and a log-probability. The rule needs no top-K, so none is kept."""
ENTRY_BYTES = 512
"""Python's part of an entry, rounded up (measured by its test)."""


class EarlierRollouts:
    """The last trajectory of each sample of each prompt, within a budget.

    Args:
        lenience: l > 0 of the rule.
        max_bytes: most memory, overheads included; the least recently used is dropped first.
    """

    def __init__(self, *, lenience: float, max_bytes: int) -> None:
        self._lenience = lenience
        self._max_bytes = max_bytes
        self._kept: OrderedDict[tuple[str, int], tuple[IntArray, FloatArray]] = OrderedDict()
        self.nbytes = 0
        """In use, by the reckoning above."""
        self.dropped = 0
        """Trajectories that had to go for want of room, or were larger than all of it."""

    @classmethod
    def of(cls, config: CacheConfig) -> Self | None:
        """As configured; None where earlier rollouts are drafts only, which is the default."""
        if config.reuse != "lenient":
            return None
        return cls(lenience=config.lenience, max_bytes=config.lenient_max_bytes)

    def __len__(self) -> int:
        return len(self._kept)

    def remember(self, trajectory: Trajectory) -> None:
        """Keep a finished trajectory in place of the one that this sample had before."""
        if trajectory.finish_reason == "abort":
            return
        key = (trajectory.prompt_id, trajectory.id.sample)
        self._forget(key)
        size = _size(len(trajectory.tokens))
        if size > self._max_bytes:
            self.dropped += 1
            return
        # Copies: the trajectory's arrays may be views of something larger.
        tokens, logprobs = trajectory.tokens.copy(), trajectory.behaviour_logprobs.copy()
        tokens.setflags(write=False)
        logprobs.setflags(write=False)
        self._kept[key] = (tokens, logprobs)
        self.nbytes += size
        while self.nbytes > self._max_bytes:
            self._forget(next(iter(self._kept)))
            self.dropped += 1

    def kept(self, prompt_id: str, sample: int) -> KeptTokens | None:
        """What this sample is to begin with; None when nothing is known of it."""
        found = self._kept.get((prompt_id, sample))
        if found is None:
            return None
        self._kept.move_to_end((prompt_id, sample))
        tokens, logprobs = found
        none = (len(tokens), 0)
        return KeptTokens(
            tokens,
            logprobs,
            np.empty(none, np.int32),
            np.empty(none, np.float32),
            lenience=self._lenience,
        )

    def _forget(self, key: tuple[str, int]) -> None:
        old = self._kept.pop(key, None)
        if old is not None:
            self.nbytes -= _size(len(old[0]))


def _size(tokens: int) -> int:
    return ENTRY_BYTES + TOKEN_BYTES * tokens


def lenient_warning(config: CacheConfig) -> str | None:
    """What a run that reuses leniently says at its start, loudly; None for the exact default."""
    if config.reuse != "lenient":
        return None
    return (
        f"WARNING: cache.reuse: lenient (lenience {config.lenience:.3g}) is BIASED. Samples begin "
        "with tokens of earlier epochs that this policy was trained on, kept more often than it "
        "would say them: they do not follow the policy that trains on them, although their "
        "staleness is 0. Measured total variation where everything can be enumerated: 0.099 at "
        "lenience 1, 0.137 at e^0.5 (docs/exactness.md). The exact default is cache.reuse: drafts."
    )
