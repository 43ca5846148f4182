"""The work that `benchmarks.cache` gives to every drafter: the same rollouts, the same calls.

The rollouts are synthetic: each prompt has a text with branches that rejoin it, and 1% of the
tokens are random, so drafting has to re-synchronise. All epochs come from one policy.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import numpy as np

from asyncrl.rollout.trajectory import IntArray

PROMPT = np.arange(900_000, 900_020, dtype=np.int32)
GROUP, BUDGET, ACCEPTED = 8, 32, 5


class Drafter(Protocol):
    """The part of `asyncrl.cache.tree.rollout_tree.RolloutCache` that engines use."""

    def open(self, key: str, context: IntArray) -> int:
        """As `RolloutCache.open`."""

    def close(self, row: int) -> None:
        """As `RolloutCache.close`."""

    def extend(self, rows: IntArray, tokens: IntArray, offsets: IntArray) -> None:
        """As `RolloutCache.extend`."""

    def draft(self, rows: IntArray, budgets: IntArray) -> Any:
        """As `RolloutCache.draft`."""


def rollouts(prompts: int, epochs: int, length: int, seed: int = 0) -> list[list[IntArray]]:
    """`[epoch][prompt * GROUP + sample]` token arrays `[length]`."""
    rng = np.random.default_rng(seed)
    texts = rng.integers(0, 5000, (prompts, length), dtype=np.int32)
    forks = rng.random((prompts, length)) < 0.1
    forks[:, -5:] = False
    targets = np.arange(length)[None, :, None] + rng.integers(-4, 20, (prompts, length, 3))
    targets = np.where(forks[:, :, None], targets, np.arange(1, length + 1)[None, :, None])
    targets = np.clip(targets, 0, length - 1).astype(np.int32)
    odds = rng.dirichlet([2, 1, 0.5], (prompts, length)).cumsum(-1)
    prompt = np.tile(np.repeat(np.arange(prompts), GROUP), epochs)
    state = np.zeros(len(prompt), np.int64)
    out = np.empty((len(prompt), length), np.int32)
    for at in range(length):
        strange = rng.random(len(prompt)) < 0.01
        out[:, at] = np.where(strange, rng.integers(5000, size=len(prompt)), texts[prompt, state])
        choice = (rng.random(len(prompt))[:, None] > odds[prompt, state, :2]).sum(-1)
        state = targets[prompt, state, choice].astype(np.int64)
    return [list(part) for part in np.split(out, epochs)]


def insert_speed(drafter: Drafter, samples: list[IntArray]) -> float:
    """Tokens per second, one rollout after the other."""
    start = time.process_time()
    for index, tokens in enumerate(samples):
        row = drafter.open(f"prompt {index // GROUP}", PROMPT)
        drafter.extend(np.array([row]), tokens, np.array([0, len(tokens)]))
        drafter.close(row)
    return sum(map(len, samples)) / (time.process_time() - start)


def step_speed(drafter: Drafter, samples: list[IntArray], steps: int) -> dict[str, float]:
    """Microseconds per row and step: every row adds 5 tokens and asks for up to 32."""
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
    return step_numbers(extending, drafting, drafted, steps * len(rows))


def step_numbers(
    extending: float, drafting: float, drafted: float, row_steps: int
) -> dict[str, float]:
    """Seconds and tokens of all row-steps as numbers per row-step."""
    scale = 1e6 / row_steps
    return {
        "extend_us": extending * scale,
        "draft_us": drafting * scale,
        "total_us": (extending + drafting) * scale,
        "drafted_tokens": drafted / row_steps,
    }


def replay(drafter: Drafter, samples: list[IntArray], budget: int) -> dict[str, float]:
    """Decode given rollouts with drafts; returns tokens per row-step and the share accepted."""
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
