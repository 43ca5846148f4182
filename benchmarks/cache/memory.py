"""Memory per cached token, measured from outside: the growth of a new process.

    python -m benchmarks.cache.memory tree|arctic PROMPTS EPOCHS LENGTH

`benchmarks.cache` runs this once for each cache, with the same rollouts. The rollouts are created
before the first measurement, and the numbers come from the system (`/proc/self/statm`).
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

from asyncrl.cache.config import CacheConfig
from asyncrl.cache.tree.rollout_tree import RolloutCache, warm_up
from asyncrl.rollout.trajectory import IntArray
from benchmarks.cache.baselines import MAX_REQUESTS, VLLM_DEPTH, arctic
from benchmarks.cache.work import GROUP, PROMPT, rollouts


def resident_bytes() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def tree(samples: list[IntArray], prompts: int) -> dict[str, float]:
    """Asyncrl's cache: bytes by the system's count and by its own."""
    warm_up()
    before = resident_bytes()
    cache = RolloutCache(CacheConfig(max_bytes=1 << 30))
    for index, tokens in enumerate(samples):
        cache.insert(f"prompt {index % (prompts * GROUP) // GROUP}", PROMPT, tokens)
    grown = resident_bytes() - before
    stats = cache.stats()
    return {"resident": grown, "own_count": stats.bytes, "tokens": stats.tokens}


def suffix(samples: list[IntArray], prompts: int) -> dict[str, float]:  # noqa: ARG001
    """ArcticInference's with vLLM's settings: by the system's count and by its own estimate."""
    found = arctic()
    if found is None:
        raise SystemExit("arctic-inference is not installed")
    make = found[0]
    make(max_tree_depth=VLLM_DEPTH).start_request(0, PROMPT)  # triggers its lazy imports
    before = resident_bytes()
    cache = make(max_tree_depth=VLLM_DEPTH, max_cached_requests=MAX_REQUESTS)
    total = 0
    for request, tokens in enumerate(samples):
        cache.start_request(request, PROMPT)
        cache.add_active_response(request, tokens)
        cache.stop_request(request)
        total += len(tokens)
    grown = resident_bytes() - before
    estimate = cache._global_tree.estimate_memory()  # noqa: SLF001 - a cross-check, not used in a ratio
    return {"resident": grown, "own_count": estimate, "tokens": total}


def measure(who: str, prompts: int, epochs: int, length: int) -> dict[str, float]:
    """Bytes per token, measured in a new process."""
    command = [sys.executable, "-m", __name__, who, str(prompts), str(epochs), str(length)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    raw = json.loads(done.stdout)
    return {
        "tokens": raw["tokens"],
        "bytes_per_token": raw["resident"] / raw["tokens"],
        "bytes_per_token_own_count": raw["own_count"] / raw["tokens"],
    }


if __name__ == "__main__":
    WHO, PROMPTS, EPOCHS, LENGTH = sys.argv[1], *map(int, sys.argv[2:])
    SAMPLES = [tokens for epoch in rollouts(PROMPTS, EPOCHS, LENGTH) for tokens in epoch]
    print(json.dumps({"tree": tree, "arctic": suffix}[WHO](SAMPLES, PROMPTS)))
