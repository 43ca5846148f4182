"""Settings of the embedded torch engine."""

from pydantic import BaseModel, ConfigDict, Field

from asyncrl.wire.transport.paths import MAX_TOKENS


class TorchConfig(BaseModel):
    """Settings of the embedded torch engine's steps."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    max_step_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    """Largest number of tokens that a decoding step feeds, drafts included. Rows beyond it still
    run, without drafts. null: no limit but memory. Within the limit each step drafts what pays, by
    the engine's measured step times."""
    draft_trees: bool = True
    """Draft token trees, with several candidates for a position where the cache knows several.
    false: one chain of tokens per row."""
    max_prefill_tokens: int = Field(default=4096, ge=1, le=MAX_TOKENS)
    """Largest number of prompt tokens, and kept tokens to verify, that one step takes in, and of
    tokens in one scoring pass. A single longer prompt still runs, alone."""
    chunk_tokens: int = Field(default=16, ge=1, le=MAX_TOKENS)
    """Smallest number of tokens in a chunk that a request reports. The first token is reported at
    once, and everything is reported at the request's end, before a pause and before new weights. 1
    streams every step, at a cost."""
    fused: bool = True
    """Run models of the Llama, Mistral, Qwen2 and Qwen3 families, on a CPU in float32, in compiled
    loops instead of transformers' forward pass. Other models, and those too large for that, use
    transformers' in any case; the engine's log says which."""
