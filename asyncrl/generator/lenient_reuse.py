"""Optional, biased reuse of earlier epochs' rollouts, by SPEC-RL's rule.

With `cache.reuse: lenient`, sample i of a prompt begins with the tokens that sample i of this
prompt had when it was last trained on. Each token x is kept with probability min(1, l p(x)/q(x)),
where p is the current policy and q the one that drew x. The first rejected token is replaced by a
draw from p, and generation continues from there (arXiv 2509.23232).

Kept tokens carry p's log-probability and version: their staleness is 0. They do not follow p, which
was trained on these draws; the residual is missing, and l distorts the rest (docs/exactness.md).

Each generator remembers what it delivered. After a move or a resume a sample begins empty.
"""

from collections import OrderedDict
from typing import Self

import numpy as np

from asyncrl.cache.config import CacheConfig
from asyncrl.rollout.trajectory import FloatArray, IntArray, KeptTokens, Trajectory

TOKEN_BYTES = 8
"""Bytes of a remembered token: its id and its log-probability. The rule needs no top-K."""
MAX_BYTES = 1 << 30
ENTRY_BYTES = 512
"""Python's overhead per remembered trajectory, rounded up; a test measures it."""


class LenientReuse:
    """Remembers the last trajectory of each sample of each prompt, within a memory budget.

    `lenience` is l of the rule, > 0. `max_bytes` includes overheads; the least recently used goes.
    """

    def __init__(self, *, lenience: float, max_bytes: int) -> None:
        self._lenience = lenience
        self._max_bytes = max_bytes
        self._remembered: OrderedDict[tuple[str, int], tuple[IntArray, FloatArray]] = OrderedDict()
        self.nbytes = 0
        self.dropped = 0

    @classmethod
    def from_config(cls, config: CacheConfig) -> Self | None:
        """Create it as configured; None by default, where earlier rollouts only serve as drafts."""
        if config.reuse != "lenient":
            return None
        return cls(lenience=config.lenience, max_bytes=MAX_BYTES)

    def __len__(self) -> int:
        return len(self._remembered)

    def remember(self, trajectory: Trajectory) -> None:
        """Remember a trajectory instead of the previous one of this sample.

        Those with observed tokens are skipped: a new environment would answer differently.
        """
        if trajectory.finish_reason == "abort":
            return
        key = (trajectory.prompt_id, trajectory.id.sample)
        self._forget(key)
        if not trajectory.trained.all():
            return
        size = _size(len(trajectory.tokens))
        if size > self._max_bytes:
            self.dropped += 1
            return
        # Copied, because the arrays may be views of larger ones.
        tokens, logprobs = trajectory.tokens.copy(), trajectory.behaviour_logprobs.copy()
        tokens.setflags(write=False)
        logprobs.setflags(write=False)
        self._remembered[key] = (tokens, logprobs)
        self.nbytes += size
        while self.nbytes > self._max_bytes:
            self._forget(next(iter(self._remembered)))
            self.dropped += 1

    def tokens_to_verify(self, prompt_id: str, sample: int) -> KeptTokens | None:
        """Return the tokens that this sample begins with, if any are remembered."""
        found = self._remembered.get((prompt_id, sample))
        if found is None:
            return None
        self._remembered.move_to_end((prompt_id, sample))
        tokens, logprobs = found
        count, seeds = len(tokens), np.zeros(len(tokens), np.uint64)
        no_top_k = np.empty((count, 0), np.int32), np.empty((count, 0), np.float32)
        return KeptTokens(tokens, logprobs, *no_top_k, seeds, lenience=self._lenience)

    def _forget(self, key: tuple[str, int]) -> None:
        old = self._remembered.pop(key, None)
        if old is not None:
            self.nbytes -= _size(len(old[0]))


def _size(tokens: int) -> int:
    return ENTRY_BYTES + TOKEN_BYTES * tokens


def lenient_warning(config: CacheConfig) -> str | None:
    """Return the warning of a run with lenient reuse, if configured."""
    if config.reuse != "lenient":
        return None
    return (
        f"WARNING: cache.reuse: lenient (lenience {config.lenience:.3g}) is BIASED. Samples begin "
        "with tokens of earlier epochs that this policy was trained on, and keep them more often "
        "than the policy generates them. They do not follow the policy that trains on them, "
        "although their staleness is 0. Total variation measured where everything can be "
        "enumerated: 0.099 at lenience 1, 0.137 at e^0.5 (docs/exactness.md). The exact default is "
        "cache.reuse: drafts."
    )
