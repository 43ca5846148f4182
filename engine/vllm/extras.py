"""What the generator's process adds to vLLM's own requests, results and configuration.

vLLM carries these values between its two processes without looking at them. Both sides read and
write them here only. Imports neither vLLM nor torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from rollout.trajectory import IntArray

SECTION = "asyncrl"
"""Key of our part in vLLM's `additional_config` and in a request's `extra_args`."""


class DrafterSettings(msgspec.Struct, frozen=True):
    """What the drafter is built from, in `additional_config`."""

    cache: dict[str, Any]
    """A `CacheConfig` as JSON."""
    place: str
    """A `CachePlace` as `cache.place.to_json` gives it."""
    fixed_step_tokens: int | None
    """`VllmConfig.max_step_tokens`: fill steps with drafts to this many tokens. None: draft what
    pays."""
    max_step_tokens: int
    """vLLM's own limit of tokens in a step."""

    def to_config(self) -> dict[str, Any]:
        """The value of `additional_config`."""
        return {SECTION: msgspec.to_builtins(self)}

    @classmethod
    def from_config(cls, additional_config: dict[str, Any]) -> DrafterSettings:
        """Read what `to_config` made."""
        return msgspec.convert(additional_config[SECTION], cls)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestExtra:
    """What a request carries in `SamplingParams.extra_args`."""

    seed: int
    """Of its draws, 0 to 2**64 - 1."""
    generated: int = 0
    """Response tokens that its prompt ends with."""
    cache_key: str = ""
    """Names the tree that it drafts from and feeds; "" for none."""
    draft: IntArray = field(default_factory=lambda: np.empty(0, np.int32))
    """`[D]` an earlier continuation, drafted from first."""
    top_k: int = 0
    """Of sampling. vLLM does not sample, and would warn about min-p with drafts."""
    min_p: float = 0.0
    """Of sampling."""
    scored: int = 0
    """Last tokens of the prompt to score, in a scoring request."""
    known: IntArray | None = None
    """`[scored, K]` ids whose log-probabilities are wanted along with the most probable ones; tail
    draws leave these out instead."""

    def to_extra_args(self) -> dict[str, Any]:
        """Plain values that msgpack takes."""
        known = self.known
        return {
            SECTION: {
                "seed": self.seed,
                "generated": self.generated,
                "cache_key": self.cache_key,
                "draft": self.draft.astype("<i4").tobytes(),
                "top_k": self.top_k,
                "min_p": self.min_p,
                "scored": self.scored,
                "known": None if known is None else known.astype("<i4").tobytes(),
            }
        }

    @classmethod
    def from_extra_args(cls, extra_args: dict[str, Any] | None) -> RequestExtra:
        """Read what `to_extra_args` made.

        Raises:
            KeyError: the request does not carry our section, so this engine did not send it.
        """
        section = dict((extra_args or {})[SECTION])
        draft, known = section.pop("draft"), section.pop("known")
        return cls(
            **section,
            draft=np.frombuffer(draft, "<i4").astype(np.int32),
            known=None
            if known is None
            else np.frombuffer(known, "<i4").reshape(section["scored"], -1),
        )


@dataclass(frozen=True, slots=True)
class ScoreColumns:
    """Columns of the table that comes back for a scored request, one row for each scored token.

    own token | K most probable | tail draw | K' tokens that the request named (`known`)
    """

    k: int
    """K."""
    known: int = 0
    """K'."""
    own: int = 0

    @property
    def top_k(self) -> slice:
        """The K most probable tokens."""
        return slice(1, 1 + self.k)

    @property
    def tail(self) -> int:
        """The draw from what lies outside the listed tokens."""
        return 1 + self.k

    @property
    def named(self) -> slice:
        """The tokens that the request named."""
        return slice(2 + self.k, 2 + self.k + self.known)

    @property
    def width(self) -> int:
        """Of the table."""
        return 2 + self.k + self.known
