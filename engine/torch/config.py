"""Settings of the embedded torch engine."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class TorchConfig(BaseModel):
    """How the embedded torch engine shapes its steps."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    max_step_tokens: int | None = Field(default=None, ge=1)
    """Tokens that a decoding step may feed, drafts included; rows beyond it still run, without
    drafts. None: as many as pay, by the engine's own step times, within a bound of memory."""
    draft_trees: bool = True
    """Draft several candidates for a position where the cache knows several, as a tree; False: one
    chain of tokens for each row."""
    max_prefill_tokens: int = Field(default=4096, ge=1)
    """Prompt tokens (and kept ones to verify) that one step may take in, and tokens that one
    scoring pass holds; a single longer prompt still goes, alone."""
    chunk_tokens: int = Field(default=16, ge=1)
    """A request reports its tokens in chunks of at least this many (the first at once; always at
    its end, before a pause and before new weights). 1 streams every step, at a cost."""
