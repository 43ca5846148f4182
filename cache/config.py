"""Settings of the cache of earlier rollouts."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_MATCH_LIMIT = 40
"""A sequence's head must fit in its first block (`asyncrl.cache.tree.arena.SPAN`)."""

DRAFT_TOKENS = 16
"""What `max_draft_tokens: auto` is, unless a run's start finds that drafts do not pay."""

DEFAULT_LENIENCE = math.exp(0.5)
"""SPEC-RL's value for GRPO (arXiv 2509.23232)."""


class CacheConfig(BaseModel):
    """What is kept of earlier rollouts, and how far ahead is drafted from them.

    These settings change speed, never what is sampled, with one exception that has to be asked
    for: `reuse: lenient`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    enabled: bool = True
    """Whether rollouts are kept and drafted from. Without them the torch engine still drafts from
    a sample's own tokens that verification rejected; vLLM then runs without a drafter."""
    max_bytes: int = Field(default=1 << 30, ge=1 << 14, le=(1 << 33) - 512)
    """Bytes that the cached rollouts of one process may take. The least recently used prompts are
    dropped first."""
    max_bytes_per_prompt: int = Field(default=32 << 20, ge=1 << 13, le=(1 << 33) - 512)
    """Bytes that the rollouts of one prompt may take; its oldest rollouts are dropped first."""
    max_draft_tokens: Annotated[int, Field(ge=0, le=128)] | Literal["auto"] = "auto"
    """Tokens drafted for a sample in one decode step, at most. auto: 16; on GPUs 0 with SGLang, and
    with vLLM unless the run's steps see each prompt at least twice: without a drafter vLLM
    schedules asynchronously. The run says what is chosen, and config.yaml has it."""
    min_match: int = Field(default=1, ge=1, le=MAX_MATCH_LIMIT)
    """Recent tokens that must match an earlier rollout before anything is drafted."""
    max_match: int = Field(default=8, ge=1, le=MAX_MATCH_LIMIT)
    """Recent tokens that are compared; a match of this length counts as certain context."""
    min_probability: float = Field(default=0.1, ge=0.0, le=1.0)
    """Probability at which a draft ends: the estimate that the whole draft is accepted must not
    fall below this."""
    version_half_life: float = Field(default=128.0, gt=0.0, le=1e9)
    """Age in policy versions at which the vote of a rollout counts half. It never counts less than
    a sixteenth, and rollouts of one version count alike."""
    max_candidates: int = Field(default=24, ge=1, le=256)
    """Earlier occurrences of the recent tokens that vote on the next one, at most."""
    doubt: float = Field(default=0.1, ge=0.0, le=1e6)
    """Votes, in units of one new rollout, for a token never seen here, until the estimates have
    learned better. A larger value makes drafts shorter at first."""
    calibrate: bool = True
    """Whether estimated probabilities are corrected by the outcomes of earlier drafts. false: they
    follow from the votes alone."""

    reuse: Literal["drafts", "lenient"] = "drafts"
    """What rollouts of earlier epochs are used for. drafts: proposals, which is exact. lenient:
    SPEC-RL's rule, where samples begin with the tokens of the epoch before, each kept with
    probability min(1, lenience p/q). BIASED: the samples do not follow the policy
    (docs/exactness.md)."""
    lenience: float = Field(default=DEFAULT_LENIENCE, gt=0.0, le=1e6)
    """Factor l of SPEC-RL's rule, only with reuse: lenient. The larger, the more tokens are kept
    and the larger the bias. SPEC-RL uses e^0.5 for GRPO, e^0.3 for PPO, e^0.15 for DAPO."""
    lenient_max_bytes: int = Field(default=1 << 30, ge=1 << 14, le=1 << 44)
    """Bytes of rollouts that one process keeps for reuse: lenient, in addition to max_bytes. The
    least recently used are dropped first."""

    @property
    def draft_tokens(self) -> int:
        """`max_draft_tokens` as a number."""
        return DRAFT_TOKENS if self.max_draft_tokens == "auto" else self.max_draft_tokens

    @model_validator(mode="after")
    def _check_reuse(self) -> CacheConfig:
        if self.reuse == "drafts" and self.lenience != DEFAULT_LENIENCE:
            raise ValueError(
                f"lenience ({self.lenience:g}) has no effect with reuse: drafts, which is exact; "
                "leave it out, or set reuse: lenient if you accept biased samples"
            )
        if self.reuse == "lenient" and not self.enabled:
            raise ValueError(
                "reuse: lenient needs rollouts of earlier epochs, and enabled: false keeps none; "
                "set enabled: true (max_draft_tokens: 0 turns off drafting only)"
            )
        return self

    @model_validator(mode="after")
    def _check_sizes(self) -> CacheConfig:
        if self.min_match > self.max_match:
            raise ValueError(
                f"min_match ({self.min_match}) is greater than max_match ({self.max_match}); "
                "the shortest match must not be longer than the longest"
            )
        if self.max_bytes_per_prompt > self.max_bytes:
            # One prompt may take everything: that is what a user means who lowers max_bytes only.
            object.__setattr__(self, "max_bytes_per_prompt", self.max_bytes)
        return self
