"""The cost of sharing rollouts between two generators, in processor time and bytes."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np

from asyncrl.cache.config import CacheConfig
from asyncrl.cache.sharing.exchange import SharedCache
from asyncrl.cache.tree.rollout_tree import RolloutCache
from asyncrl.rollout.trajectory import IntArray
from benchmarks.cache.work import GROUP, PROMPT

RING = 4 << 20


def measure(samples: list[IntArray]) -> dict[str, float]:
    """One member finishes rollouts, another inserts them; both in this process, in turns."""
    place = "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108
    with tempfile.TemporaryDirectory(dir=place) as directory:
        one, other = (
            SharedCache(RolloutCache(CacheConfig()), Path(directory) / "x", name, ring_bytes=RING)
            for name in ("one", "other")
        )
        plain = RolloutCache(CacheConfig())
        one.poll()
        publish = receive = ordinary = 0.0
        for first in range(0, len(samples), GROUP):
            group = samples[first : first + GROUP]
            rows = [one.open(f"prompt {first}", PROMPT) for _ in group]
            for row, tokens in zip(rows, group, strict=True):
                one.extend(np.array([row]), tokens, np.array([0, len(tokens)]))
            start = time.process_time()
            for row in rows:
                one.close(row)
            middle = time.process_time()
            while other.poll():
                pass
            end = time.process_time()
            for tokens in group:
                plain.insert(f"prompt {first}", PROMPT, tokens)
            ordinary += time.process_time() - end
            receive += end - middle
            publish += middle - start
        start = time.process_time()
        for _ in range(1000):
            other.poll()
        idle = time.process_time() - start
        sent, got = one.exchange_stats(), other.exchange_stats()
        one.leave()
        other.leave()
    assert got.received_tokens == sent.published_tokens == sum(map(len, samples))
    scale = 1e6 / sent.published_tokens
    return {
        "publish_us_per_token": publish * scale,
        "receive_us_per_token": receive * scale,
        "insert_us_per_token": ordinary * scale,
        "idle_poll_us": idle * 1e3,
        "bytes_per_token": sent.published_bytes / sent.published_tokens,
    }
