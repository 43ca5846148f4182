"""The CUDA graphs that vLLM captures, chosen for one token a row and drafts of any lengths.

With speculation vLLM 0.32 replays a full graph only if each row has exactly 1 +
num_speculative_tokens tokens (`v1/worker/gpu_model_runner.py`:3653, `_is_uniform_decode`), which
ours never have, and rounds capture sizes up to multiples of that number
(`config/compilation.py`:1489). So with drafts only piecewise graphs are captured, which fit any
step with as many tokens. Without a drafter vLLM's own choice is right; only the sizes have to reach
our number of slots. Never run on a GPU.
"""

from __future__ import annotations

from typing import Any

_FINE, _COARSE = 256, 1024
_DRAFTED = 256
"""Draft tokens that graphs cover, on top of one token a row: beyond some 200 to 300 tokens a step
is bound by arithmetic, and launching kernels costs nothing."""


def graph_config(*, drafts: int, slots: int, max_step_tokens: int) -> dict[str, Any]:
    """Return our part of vLLM's `compilation_config` for at most `drafts` draft tokens a row."""
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
