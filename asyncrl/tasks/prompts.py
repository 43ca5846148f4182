"""The interface of tasks: training prompts, held-out prompts, and the order of visits.

Example:
    >>> [prompt_order(4, seed=0, position=p) for p in range(8)]  # each epoch has its own order
    [2, 0, 1, 3, 3, 0, 2, 1]
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.rollout.trajectory import IntArray
from asyncrl.wire.records.evaluations import HELD_OUT


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question, ready for an engine."""

    prompt_id: str
    """Unique among the task's prompts; the same in every epoch and after a resume."""
    tokens: IntArray
    """`[P]` token ids, chat template included; read-only."""
    text: str
    """The text that was tokenised: the question with system prompt and chat template."""
    example: dict[str, Any]
    """The rewards' input, JSON-able: `prompt` (the plain question), `answer`, and for a dataset
    `row`, the user's example. `asyncrl.rewards.values` makes a function's arguments from it."""


@dataclass(frozen=True, slots=True)
class Task:
    """Prompts, and what is needed to sample responses to them and score these."""

    train: Sequence[Prompt]
    """Training prompts, at least one."""
    evaluation: Sequence[Prompt]
    """Held-out prompts, disjoint from `train`; may be empty."""
    stop_tokens: tuple[int, ...]
    """Ids that end a response."""
    tokenizer: Any
    """The model's HF tokenizer."""
    left_out: int = 0
    """Number of prompts left out as too long."""
    evaluation_sets: Mapping[str, Sequence[Prompt]] = field(default_factory=dict)
    """Prompts of `evaluation.sets`, by name. They may overlap with `train`, with a warning."""


def held_out_sets(task: Task) -> dict[str, Sequence[Prompt]]:
    """Return all held-out prompts by the name of their set, the task's own first."""
    own = {HELD_OUT: task.evaluation} if task.evaluation else {}
    return {**own, **task.evaluation_sets}


def prompt_order(n: int, seed: int, position: int) -> int:
    """Return the index of the prompt that the `position`-th group of a run visits.

    Every epoch of n positions visits each prompt once. The order depends only on the seed and the
    epoch, so a resumed run continues where it stopped. Recent epochs are cached. Raises ValueError
    if n < 1 or position < 0.
    """
    if n < 1 or position < 0:
        raise ValueError(f"no prompt at position {position} of {n} prompts")
    epoch, place = divmod(position, n)
    return int(_epoch_order(n, seed, epoch)[place])


@functools.lru_cache(maxsize=4)
def _epoch_order(n: int, seed: int, epoch: int) -> NDArray[np.int64]:
    # numpy's SeedSequence refuses negative seeds, which a user may choose.
    entropy = (seed % 2**64, epoch)
    return np.random.default_rng(entropy).permutation(n)
