"""Settings that vLLM and SGLang share, which run in separate processes."""

from typing import ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from asyncrl.wire.transport.paths import MAX_TOKENS, START_SECONDS

_SHARE_OF_START = 0.9
"""The library's part of the limit of its generator's start; the rest is imports and attaching."""


class ProcessConfig(BaseModel):
    """Settings and fixed limits of a library in a separate process."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    kv_cache_gib: float | None = Field(default=None, gt=0, le=4096)
    """Memory for KV, in GiB, on each GPU of a generator. null: 0.5 on a CPU; on a GPU what
    gpu_memory_utilization (SGLang: mem_fraction_static) leaves."""
    enable_prefix_caching: bool = True
    """Share the KV of equal prefixes. Never across versions of the weights."""
    max_step_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    """null: each step drafts what pays, by the measured step times and acceptance. A number: steps
    are filled with drafts to this many tokens regardless of cost; rows beyond it run without. The
    cache limits a draft (cache.max_draft_tokens); with cache.enabled: false nothing is drafted."""
    max_prefill_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    """Prompt tokens, including kept tokens that are scored, that one step may take in; longer ones
    are split. null: 4096, on a CPU 512, because more exceeds its caches."""
    chunk_tokens: int = Field(default=512, ge=1, le=MAX_TOKENS)
    """A request reports its tokens in chunks of at least this many. The first token is reported at
    once, and the rest at its end, at an interruption, at a pause and before new weights. 1 streams
    every message, at a cost."""
    tensor_parallel_size: int = Field(default=1, ge=1, le=64)
    """GPUs of one generator, which split every layer among them."""
    log_level: str = Field(default="ERROR", pattern="^(DEBUG|INFO|WARNING|ERROR)$")
    """Log level on stderr. INFO and above also goes to a file, whose end is quoted when the library
    fails."""

    steps_per_message: ClassVar[int] = 4
    """Generated tokens are sent after this many steps or 0.1 s: a message costs the generator's
    process more than its content. Responses end up to this many steps later."""
    call_seconds: ClassVar[float] = 120.0
    """Longest wait for it to pause or resume; a slower step of SGLang ends it, too. Staging and
    installing weights may take longer (`asyncrl.engine.weights`)."""

    _start_limit: float = PrivateAttr(_SHARE_OF_START * START_SECONDS)

    @property
    def start_limit(self) -> float:
        """Longest wait in seconds for it to become ready; less than its generator's limit."""
        return self._start_limit

    def started_within(self, seconds: float) -> Self:
        """Return a copy whose process is killed if it is not ready after `seconds`."""
        changed = self.model_copy()
        changed._start_limit = max(1.0, _SHARE_OF_START * seconds)  # noqa: SLF001 - a copy of its own
        return changed
