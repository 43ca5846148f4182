"""Time of drawing and of verification per token, next to that of the head that makes the logits.

All parts run in turns on the same distributions; the statistic is the median of their times.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from asyncrl.engine.sampling.drawing import Streams, draw, identify, top_k, warm_up
from asyncrl.rollout.acceptance import symbols_of, verify_kept
from benchmarks.harness import in_turns

VOCABULARIES = (32_000, 151_936)
HIDDEN = 1024
"""Width of the head's input, that of Qwen3-0.6B, whose vocabulary is the larger one."""
ROWS = 64


@dataclass(frozen=True)
class Cost:
    """Microseconds per token; medians over the rounds."""

    vocabulary: int
    k: int
    parts: dict[str, float]
    """`head`: the product; `softmax`; `draw`: the draw with its list; `list`: the list alone;
    `verify`: judging one kept token, given its distribution."""


def distributions(vocabulary: int, rows: int, seed: int) -> Tensor:
    """`[rows, V]` log-probabilities with some 5% outside the 64 largest, as a language has.

    The r-th largest probability is proportional to (r + 2.7)^-2; which token it is, is random.
    """
    generator = torch.Generator().manual_seed(seed)
    falling = -2.0 * torch.log(torch.arange(vocabulary) + 2.7)
    out = torch.empty(rows, vocabulary)
    for row in out:
        row[torch.randperm(vocabulary, generator=generator)] = falling
    out += 0.05 * torch.randn(out.shape, generator=generator)
    return torch.log_softmax(out, -1)


def measure(vocabulary: int, k: int, rounds: int) -> Cost:
    """Run all parts in turns, `rounds` times."""
    warm_up()
    logprobs = distributions(vocabulary, ROWS, 0)
    newer = torch.log_softmax(logprobs + 0.02 * torch.randn_like(logprobs), -1)
    hidden, head = torch.randn(ROWS, HIDDEN), torch.randn(HIDDEN, vocabulary)
    seeds, positions = np.arange(ROWS, dtype=np.uint64), np.arange(ROWS, dtype=np.int64)
    streams = Streams(seeds, positions, seeds + np.uint64(ROWS))
    actions: dict[str, Callable[[], object]] = {
        "head": lambda: hidden @ head,
        "softmax": lambda: torch.log_softmax(logprobs, -1),
        "draw": lambda: draw(logprobs, k, streams),
        "list": lambda: top_k(logprobs, k),
        "verify": _Verification(logprobs, newer, k, streams).judge,
    }

    def timed(action: Callable[[], object], _round: int) -> float:
        began = time.perf_counter()
        action()
        return 1e6 * (time.perf_counter() - began) / ROWS

    turns = {part: partial(timed, action) for part, action in actions.items()}
    in_turns(turns, 1)  # warms up
    times = in_turns(turns, rounds)
    return Cost(vocabulary, k, {part: statistics.median(values) for part, values in times.items()})


class _Verification:
    """One kept token per row, drawn from the old distributions and judged by the new ones."""

    def __init__(self, old: Tensor, new: Tensor, k: int, streams: Streams) -> None:
        drawn = draw(old, k, streams)
        self._new, self._k, self._streams = new, k, streams
        self._tokens = drawn.tokens.numpy().astype(np.int32)
        self._ids = drawn.listed.ids.numpy()
        self._old_listed = drawn.listed.logprobs.numpy()

    def judge(self) -> object:
        """As the torch engine does it: look up the list, name tail tokens again, apply the rule."""
        columns = torch.from_numpy(self._ids).long()
        listed = self._new.gather(1, columns).numpy()
        symbols = symbols_of(self._tokens, self._ids)
        tail = np.flatnonzero(symbols == self._k)
        renamed = np.zeros(len(symbols), np.bool_)
        positions, noise = self._streams.positions[tail], self._streams.noise_seeds[tail]
        names = identify(self._new, tail, self._ids[tail], positions, noise)
        renamed[tail] = names != self._tokens[tail]
        return verify_kept(
            symbols,
            self._old_listed,
            listed,
            offsets=[0, len(symbols)],
            uniforms=np.full((len(symbols), 2), 0.5),
            renamed=renamed,
        )
