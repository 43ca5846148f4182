"""How fast the cache writes and drafts, and how well, beside a plain Python drafter.

    python -m benchmarks.cache [--quick] [--json FILE]

The rollouts are synthetic: per prompt a text with branch points that rejoin it, 1% of the tokens
at random, so that drafting must find its way back. The rival is what one writes in an hour: a
dictionary from the last n tokens to counts of what followed, longest n first. (The comparison with
ArcticInference belongs to a later version of this file.) One thread; processor time, so that
neighbours on a shared machine disturb less (starting a process is wall time).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from typing import Any, Protocol

import numpy as np

from benchmarks.report import write_json
from cache.config import CacheConfig
from cache.trajectory import IntArray
from cache.tree import RolloutCache, warm_up

PROMPT = np.arange(900_000, 900_020, dtype=np.int32)
GROUP, BUDGET, ACCEPTED = 8, 32, 5


class Drafter(Protocol):
    """What both contestants can do."""

    def open(self, key: str, context: IntArray) -> int:
        """As `RolloutCache.open`."""

    def close(self, row: int) -> None:
        """As `RolloutCache.close`."""

    def extend(self, rows: IntArray, tokens: IntArray, offsets: IntArray) -> None:
        """As `RolloutCache.extend`."""

    def draft(self, rows: IntArray, budgets: IntArray) -> Any:
        """As `RolloutCache.draft`."""


class NaiveDrafter:
    """Majority vote over what followed the last n tokens, n = 8, 4, 2."""

    ORDERS = (8, 4, 2)

    def __init__(self) -> None:
        self.counts: dict[tuple[Any, ...], Counter[int]] = defaultdict(Counter)
        self.rows: dict[int, tuple[str, list[int]]] = {}
        self.next = 0

    def open(self, key: str, context: IntArray) -> int:
        """A row is the key and all tokens so far."""
        self.next += 1
        self.rows[self.next] = (key, context[-8:].tolist())
        return self.next

    def close(self, row: int) -> None:
        """Forget the row; its counts stay."""
        del self.rows[row]

    def extend(self, rows: IntArray, tokens: IntArray, offsets: IntArray) -> None:
        """Count what followed each of the last n-grams."""
        for at, row in enumerate(rows.tolist()):
            key, past = self.rows[row]
            for token in tokens[offsets[at] : offsets[at + 1]].tolist():
                for order in self.ORDERS:
                    self.counts[key, *past[-order:]][token] += 1
                past.append(token)

    def draft(self, rows: IntArray, budgets: IntArray) -> Any:
        """Take the most frequent follower of the longest known n-gram, again and again."""
        tokens: list[int] = []
        offsets = [0]
        for row, budget in zip(rows.tolist(), budgets.tolist(), strict=True):
            key, past = self.rows[row]
            ahead = past[-8:]
            for _ in range(budget):
                found = (self.counts.get((key, *ahead[-order:])) for order in self.ORDERS)
                votes = next((counter for counter in found if counter), None)
                if votes is None:
                    break
                ahead.append(votes.most_common(1)[0][0])
                tokens.append(ahead[-1])
            offsets.append(len(tokens))
        return argparse.Namespace(tokens=np.array(tokens, np.int32), offsets=offsets)


def rollouts(prompts: int, epochs: int, length: int) -> list[list[IntArray]]:
    """`[epoch][prompt * GROUP + sample]` token arrays; all epochs from the same policy."""
    rng = np.random.default_rng(0)
    out: list[list[IntArray]] = [[] for _ in range(epochs)]
    for _ in range(prompts):
        text = rng.integers(0, 5000, length)
        jumps = {
            state: (
                np.clip(state + rng.integers(-4, 20, 3), 0, length - 1),
                rng.dirichlet([2, 1, 0.5]),
            )
            for state in np.flatnonzero(rng.random(length - 5) < 0.1).tolist()
        }
        for epoch in range(epochs):
            for _ in range(GROUP):
                tokens: list[int] = []
                state = 0
                while len(tokens) < length:
                    strange = rng.random() < 0.01
                    tokens.append(int(rng.integers(5000) if strange else text[state]))
                    targets, odds = jumps.get(state, ([min(state + 1, length - 1)], [1.0]))
                    state = int(rng.choice(targets, p=odds))
                out[epoch].append(np.array(tokens, np.int32))
    return out


def insert_speed(drafter: Drafter, samples: list[IntArray]) -> float:
    """Tokens per second, one rollout after the other."""
    start = time.process_time()
    for index, tokens in enumerate(samples):
        row = drafter.open(f"prompt {index // GROUP}", PROMPT)
        drafter.extend(np.array([row]), tokens, np.array([0, len(tokens)]))
        drafter.close(row)
    return sum(map(len, samples)) / (time.process_time() - start)


def step_speed(drafter: Drafter, samples: list[IntArray], steps: int) -> dict[str, float]:
    """Microseconds per row-step: every row adds 5 tokens and asks for up to 32."""
    rows = np.array([drafter.open(f"prompt {i // GROUP}", PROMPT) for i in range(len(samples))])
    offsets = np.arange(len(rows) + 1) * ACCEPTED
    budgets = np.full(len(rows), BUDGET)
    extending = drafting = drafted = 0.0
    for step in range(steps):
        tokens = np.concatenate([s[step * ACCEPTED : (step + 1) * ACCEPTED] for s in samples])
        start = time.process_time()
        drafter.extend(rows, tokens, offsets)
        middle = time.process_time()
        drafts = drafter.draft(rows, budgets)
        end = time.process_time()
        extending += middle - start
        drafting += end - middle
        drafted += len(drafts.tokens)
    for row in rows.tolist():
        drafter.close(row)
    scale = 1e6 / (steps * len(rows))
    return {
        "extend_us": extending * scale,
        "draft_us": drafting * scale,
        "total_us": (extending + drafting) * scale,
        "drafted_tokens": drafted / (steps * len(rows)),
    }


def replay(drafter: Drafter, samples: list[IntArray], budget: int) -> dict[str, float]:
    """Decode given rollouts with drafts: tokens per forward pass of a row, share accepted."""
    steps = drafted = 0
    for first in range(0, len(samples), GROUP):
        live = {
            drafter.open(f"prompt {first // GROUP}", PROMPT): (tokens, 0)
            for tokens in samples[first : first + GROUP]
        }
        while live:
            rows = np.array(list(live))
            left = np.array([len(tokens) - at - 1 for tokens, at in live.values()])
            drafts = drafter.draft(rows, np.minimum(left, budget))
            chunks = []
            for index, (row, (tokens, at)) in enumerate(list(live.items())):
                draft = drafts.tokens[drafts.offsets[index] : drafts.offsets[index + 1]]
                agree = tokens[at : at + len(draft)] == draft
                kept = int(agree.cumprod().sum())
                chunks.append(tokens[at : at + kept + 1])
                live[row] = (tokens, at + kept + 1)
                drafted += len(draft)
            steps += len(rows)
            offsets = np.cumsum([0, *map(len, chunks)])
            drafter.extend(rows, np.concatenate(chunks), offsets)
            for row in [row for row, (tokens, at) in live.items() if at == len(tokens)]:
                drafter.close(row)
                del live[row]
    total = sum(map(len, samples))
    return {"tokens_per_step": total / steps, "accepted_share": (total - steps) / max(1, drafted)}


def load_seconds(directory: str) -> float:
    """Seconds until the kernels are usable in a new process (imports included)."""
    environment = os.environ | {"NUMBA_CACHE_DIR": directory}
    start = time.perf_counter()
    code = "from cache.tree import warm_up; warm_up()"
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=300)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description="speed of the cache of earlier rollouts")
    parser.add_argument("--quick", action="store_true", help="fewer rollouts, under half a minute")
    parser.add_argument("--json", metavar="FILE", help="write the numbers here")
    options = parser.parse_args()
    length, steps, prompts = (400, 40, 4) if options.quick else (1000, 150, 16)
    with tempfile.TemporaryDirectory() as directory:
        raw: dict[str, Any] = {
            "cold_start_s": load_seconds(directory),
            "warm_start_s": load_seconds(directory),
        }
    warm_up()
    config = CacheConfig(max_draft_tokens=BUDGET, min_probability=0.0)
    batch = rollouts(32, 2, length)
    held = rollouts(prompts, 2, length)
    for name, make in (("tree", lambda: RolloutCache(config)), ("naive", NaiveDrafter)):
        drafter: Any = make()
        numbers: dict[str, Any] = {"insert_tokens_per_s": insert_speed(drafter, batch[0])}
        if isinstance(drafter, RolloutCache):
            stats = drafter.stats()
            numbers["bytes_per_token"] = stats.bytes / stats.tokens
        numbers["step_256_rows"] = step_speed(drafter, batch[1], steps)
        numbers["step_1_row"] = step_speed(drafter, batch[1][:1], steps)
        drafter = RolloutCache(CacheConfig()) if name == "tree" else make()
        numbers["first_epoch"] = replay(drafter, held[0], 16)
        numbers["second_epoch"] = replay(drafter, held[1], 16)
        raw[name] = numbers
    tree, naive = raw["tree"], raw["naive"]
    ratios = {
        "insert_vs_naive": tree["insert_tokens_per_s"] / naive["insert_tokens_per_s"],
        "step_vs_naive": naive["step_256_rows"]["total_us"] / tree["step_256_rows"]["total_us"],
        "tokens_per_step_vs_naive": tree["second_epoch"]["tokens_per_step"]
        / naive["second_epoch"]["tokens_per_step"],
        "accepted_share_vs_naive": tree["second_epoch"]["accepted_share"]
        / naive["second_epoch"]["accepted_share"],
    }
    show(raw, ratios)
    if options.json:
        write_json(options.json, "cache", raw, ratios)


def show(raw: dict[str, Any], ratios: dict[str, float]) -> None:
    for name, value in raw.items():
        if isinstance(value, dict):
            print(name)
            for key, number in value.items():
                if isinstance(number, dict):
                    number = "  ".join(f"{k} {v:.2f}" for k, v in number.items())
                    print(f"  {key:22} {number}")
                else:
                    print(f"  {key:22} {number:,.1f}")
        else:
            print(f"{name:24} {value:.2f}")
    for name, ratio in ratios.items():
        print(f"{name:28} {ratio:.2f}")


if __name__ == "__main__":
    main()
