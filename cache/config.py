"""Settings of the cache of earlier rollouts."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_MATCH_LIMIT = 40
"""The head of a sequence must fit in its first block (`cache.arena.SPAN`)."""

DEFAULT_LENIENCE = math.exp(0.5)
"""SPEC-RL's for GRPO (arXiv 2509.23232)."""


class CacheConfig(BaseModel):
    """What is kept, and how far ahead is drafted from it.

    Changes speed, never what is sampled, with one exception that has to be asked for:
    `reuse: lenient`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    enabled: bool = True
    """False: nothing is kept and nothing is drafted."""
    max_bytes: int = Field(default=1 << 30, ge=1 << 14, le=(1 << 33) - 512)
    """Most bytes that the cached rollouts of one process may take. Least recently used prompts are
    dropped first."""
    max_bytes_per_prompt: int = Field(default=32 << 20, ge=1 << 13)
    """Most bytes for one prompt; its oldest rollouts are dropped first."""
    max_draft_tokens: int = Field(default=16, ge=0, le=128)
    """Most tokens drafted for a row in one step."""
    min_match: int = Field(default=1, ge=1)
    """Fewest recent tokens that must match before anything is drafted."""
    max_match: int = Field(default=8, ge=1, le=MAX_MATCH_LIMIT)
    """Recent tokens that are compared; a match this long counts as certain context."""
    min_probability: float = Field(default=0.1, ge=0.0, le=1.0)
    """A draft ends before the token at which the estimated probability that all of it is accepted
    falls below this."""
    version_half_life: float = Field(default=128.0, gt=0.0)
    """Policy versions after which what a rollout said counts half, but never less than a sixteenth.
    Rollouts of one version count alike."""
    max_candidates: int = Field(default=24, ge=1, le=256)
    """Most earlier occurrences that vote on a continuation."""
    doubt: float = Field(default=0.1, ge=0.0)
    """Votes, in units of one fresh rollout, that are counted for 'something never seen here', until
    experience knows better. Larger: shorter drafts at first."""
    calibrate: bool = True
    """Correct the estimated probabilities by what became of earlier drafts. False: they follow from
    the votes alone."""

    reuse: Literal["drafts", "lenient"] = "drafts"
    """What rollouts of earlier epochs are used for. drafts: proposals, exact. lenient: SPEC-RL's
    rule, samples begin with the tokens of the epoch before, each kept with min(1, lenience p/q).
    BIASED: what is sampled does not follow the policy (docs/exactness.md)."""
    lenience: float = Field(default=DEFAULT_LENIENCE, gt=0.0, le=1e6, allow_inf_nan=False)
    """The larger, the more is kept and the less it follows the policy. Only with reuse: lenient;
    SPEC-RL has e^0.5 for GRPO, e^0.3 for PPO, e^0.15 for DAPO."""
    lenient_max_bytes: int = Field(default=1 << 30, ge=1 << 14)
    """Most bytes that one process keeps rollouts in for reuse: lenient, beside max_bytes. The least
    recently used are dropped first."""

    @model_validator(mode="after")
    def _lenience_is_wanted(self) -> CacheConfig:
        if self.reuse == "drafts" and self.lenience != DEFAULT_LENIENCE:
            raise ValueError(
                f"lenience ({self.lenience:g}) does nothing with reuse: drafts, which is exact; "
                "leave it out, or set reuse: lenient if a biased sample is what you want"
            )
        if self.reuse == "lenient" and not self.enabled:
            raise ValueError(
                "reuse: lenient needs rollouts of earlier epochs, and enabled: false keeps none; "
                "set enabled: true (max_draft_tokens: 0 turns off drafting alone)"
            )
        return self

    @model_validator(mode="after")
    def _fits(self) -> CacheConfig:
        if self.min_match > self.max_match:
            raise ValueError(
                f"min_match ({self.min_match}) is greater than max_match ({self.max_match}); "
                "the shortest match must not be longer than the longest"
            )
        if self.max_bytes_per_prompt > self.max_bytes:
            # One prompt may take everything; a user who lowers max_bytes alone means just that.
            object.__setattr__(self, "max_bytes_per_prompt", self.max_bytes)
        return self
