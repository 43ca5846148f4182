"""Settings of the vLLM engine, and what follows from them."""

from typing import Any, Self

from pydantic import Field, PrivateAttr

from asyncrl.engine.process_config import ProcessConfig

_SHARE_OF_GPU = 0.85
_CPU_KV_GIB = 0.5
_GIB = 1 << 30


class VllmConfig(ProcessConfig):
    """Settings of vLLM's start and of the number of tokens in its steps."""

    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """Fraction of a GPU's memory that vLLM may take, and that must be free when it starts. null:
    0.85; on a GPU shared with the trainer, what the trainer leaves (docs/trainer.md)."""
    enforce_eager: bool | None = None
    """Run without compiling the model. null: yes on a CPU (ready sooner, as fast on small models),
    no on a GPU."""

    _lora_rank: int = PrivateAttr(0)

    @property
    def lora_rank(self) -> int:
        """Rank of an adapter that is kept apart from the model; 0: there is none."""
        return self._lora_rank

    def with_adapter(self, rank: int) -> Self:
        """Return a copy with an adapter of this rank (`trainer.lora.serve: adapter`)."""
        changed = self.model_copy()
        changed._lora_rank = rank  # noqa: SLF001 - a copy
        return changed

    @property
    def share_of_gpu(self) -> float:
        """`gpu_memory_utilization`, or its default."""
        return self.gpu_memory_utilization or _SHARE_OF_GPU

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
