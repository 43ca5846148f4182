"""Settings of the cache of earlier rollouts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_MATCH_LIMIT = 40
"""A sequence's head must fit in its first block (`asyncrl.cache.tree.arena.SPAN`)."""

DRAFT_TOKENS = 16
"""Value of `max_draft_tokens: auto`, unless a run's start finds that drafts do not pay."""


@dataclass(frozen=True)
class TreeRules:
    """Rules for searching and bounding a tree. A run has the defaults (`RUN_RULES`)."""

    max_match: int = 8
    """Recent tokens that are compared, 1 to 40; a match of this length counts as certain."""
    max_candidates: int = 24
    """Most earlier occurrences of the recent tokens that vote on the next one."""
    version_half_life: float = 128.0
    """Age in policy versions at which the vote of a rollout counts half. It never counts less than
    a sixteenth, and rollouts of one version count alike."""
    doubt: float = 0.1
    """Votes, in units of one new rollout, for a token never seen here, until the estimates have
    learned better."""
    calibrate: bool = True
    """Correct estimated probabilities by the outcomes of earlier drafts."""
    bytes_per_prompt: int = 32 << 20
    """Bytes that the rollouts of one prompt may take; its oldest rollouts are dropped first."""


RUN_RULES = TreeRules()


class CacheConfig(BaseModel):
    """The store of earlier rollouts, and drafting from it.

    These settings change speed, never what is sampled, except for `reuse: lenient`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    enabled: bool = True
    """Keep rollouts and draft from them. Otherwise the torch engine still drafts from a sample's
    own tokens that verification rejected; vLLM then runs without a drafter."""
    max_bytes: int = Field(default=1 << 30, ge=1 << 14, le=(1 << 33) - 512)
    """Bytes that the cached rollouts of one process may take. The least recently used prompts are
    dropped first."""
    max_draft_tokens: Annotated[int, Field(ge=0, le=128)] | Literal["auto"] = "auto"
    """Most tokens drafted for a sample in one decode step. auto: 16; on GPUs 0 with SGLang, and
    with vLLM unless the run's steps see each prompt at least twice: without a drafter vLLM
    schedules asynchronously. The run logs the choice, and config.yaml has it."""
    min_match: int = Field(default=1, ge=1, le=8)
    """Recent tokens, of the 8 that are compared, that must match an earlier rollout before anything
    is drafted."""
    min_probability: float = Field(default=0.1, ge=0.0, le=1.0)
    """Probability at which a draft ends: the estimate that the whole draft is accepted must not
    fall below this."""

    reuse: Literal["drafts", "lenient"] = "drafts"
    """Use of rollouts of earlier epochs. drafts: proposals, which is exact. lenient: SPEC-RL's
    rule, where samples begin with the tokens of the previous epoch, each kept with probability
    min(1, lenience p/q). BIASED: the samples do not follow the policy (docs/exactness.md)."""
    lenience: float = Field(default=math.exp(0.5), gt=0.0, le=1e6)  # arXiv 2509.23232
    """Factor l of SPEC-RL's rule. The larger, the more tokens are kept and the larger the bias.
    SPEC-RL uses e^0.5 for GRPO, e^0.3 for PPO, e^0.15 for DAPO."""

    @property
    def draft_tokens(self) -> int:
        """`max_draft_tokens` as a number."""
        return DRAFT_TOKENS if self.max_draft_tokens == "auto" else self.max_draft_tokens

    @model_validator(mode="after")
    def _check_reuse(self) -> CacheConfig:
        if self.reuse == "lenient" and not self.enabled:
            raise ValueError(
                "reuse: lenient needs rollouts of earlier epochs, and enabled: false keeps none; "
                "set enabled: true (max_draft_tokens: 0 turns off drafting only)"
            )
        return self
