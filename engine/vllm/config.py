"""Settings of the vLLM engine, and what follows from them."""

from typing import Any, Self

from pydantic import Field, PrivateAttr

from asyncrl.engine.process_config import ProcessConfig
from asyncrl.wire.transport.paths import MAX_TOKENS

_SHARE_OF_GPU = 0.85
_CPU_KV_GIB = 0.5
_GIB = 1 << 30


class VllmConfig(ProcessConfig):
    """Settings of vLLM's start and of the number of tokens in its steps.

    The length of drafts is a setting of the cache (`cache.max_draft_tokens`). With the cache
    disabled vLLM runs without speculation.
    """

    kv_cache_gib: float | None = Field(default=None, gt=0, le=4096)
    """Memory for KV, in GiB, on each GPU of a generator. null: 0.5 on a CPU; on a GPU what
    gpu_memory_utilization leaves."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """Fraction of a GPU's memory that vLLM may take, and that must be free when it starts. null:
    0.85; on a GPU shared with the trainer, what the trainer leaves (docs/trainer.md)."""
    enforce_eager: bool | None = None
    """Run without compiling the model. null: yes on a CPU (ready sooner, as fast on small models),
    no on a GPU."""
    enable_prefix_caching: bool = True
    """Share the KV of equal prompts. Never across versions of the weights."""
    max_step_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    """null: each step drafts what pays, by the measured step times and acceptance. A number: steps
    are filled with drafts to this many tokens regardless of cost; rows beyond it run without
    drafts."""
    max_prefill_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    """Prompt tokens, including kept tokens that are scored, that one step may take in; longer ones
    are split. null: 4096, on a CPU 512, because more exceeds its caches and costs up to twice as
    much a token."""
    chunk_tokens: int = Field(default=512, ge=1, le=MAX_TOKENS)
    """A request reports its tokens in chunks of at least this many. The first token is reported at
    once, and the rest at its end, at an interruption, at a pause and before new weights. 1 streams
    every message, at a cost."""
    tensor_parallel_size: int = Field(default=1, ge=1, le=64)
    """GPUs of one generator, which split every layer among them."""
    log_level: str = Field(default="ERROR", pattern="^(DEBUG|INFO|WARNING|ERROR)$")
    """Log level on stderr. INFO and above also goes to a file, whose end is quoted when vLLM
    fails."""

    _lora_rank: int = PrivateAttr(0)

    @property
    def lora_rank(self) -> int:
        """Rank of an adapter that is kept apart from the model; 0: there is none."""
        return self._lora_rank

    def with_adapter(self, rank: int) -> Self:
        """Return a copy with an adapter of this rank (`trainer.lora.serve: adapter`)."""
        changed = self.model_copy()
        changed._lora_rank = rank  # noqa: SLF001 - a copy of its own
        return changed

    @property
    def share_of_gpu(self) -> float:
        """`gpu_memory_utilization`, or its default."""
        own = self.gpu_memory_utilization
        return _SHARE_OF_GPU if own is None else own

    def memory_arguments(self, *, on_cpu: bool) -> dict[str, float]:
        """Return the arguments of vLLM's that limit its memory.

        With `kv_cache_memory_bytes` it measures nothing, but still wants the share to be free at
        its start (its default is 0.92).
        """
        if on_cpu:
            return {"kv_cache_memory_bytes": int((self.kv_cache_gib or _CPU_KV_GIB) * _GIB)}
        given: dict[str, float] = {}
        if self.kv_cache_gib is not None:
            given["kv_cache_memory_bytes"] = int(self.kv_cache_gib * _GIB)
        if self.kv_cache_gib is None or self.gpu_memory_utilization is not None:
            given["gpu_memory_utilization"] = self.share_of_gpu
        return given


_FINE, _COARSE = 256, 1024
_DRAFTED = 256
"""Draft tokens that graphs cover, on top of one token a row: beyond some 200 to 300 tokens a step
is bound by arithmetic, and launching kernels costs nothing."""


def graph_config(*, drafts: int, slots: int, max_step_tokens: int) -> dict[str, Any]:
    """Return our part of vLLM's `compilation_config` for at most `drafts` draft tokens a row.

    With speculation vLLM 0.32 replays a full graph only if each row has exactly 1 +
    num_speculative_tokens tokens (`v1/worker/gpu_model_runner.py`:3653, `_is_uniform_decode`),
    which ours never have, and rounds capture sizes up to multiples of that number
    (`config/compilation.py`:1489). So with drafts only piecewise graphs are captured, which fit any
    step with as many tokens. Without a drafter vLLM's own choice is right; only the sizes have to
    reach our number of slots. Never run on a GPU.
    """
    largest = min(slots + (_DRAFTED if drafts else 0), max_step_tokens)
    chosen: dict[str, Any] = {"cudagraph_capture_sizes": capture_sizes(largest)}
    if drafts:
        chosen["cudagraph_mode"] = "PIECEWISE"
    return chosen


def capture_sizes(largest: int) -> list[int]:
    """Return numbers of tokens up to `largest`; at most 1/8 is padding from 64 on."""
    sizes = [size for size in (1, 2, 4) if size < largest]
    sizes += range(8, min(largest, _FINE), 8)
    sizes += range(_FINE, min(largest, _COARSE), 32)
    sizes += range(_COARSE, largest, 128)
    return [*sizes, largest]
