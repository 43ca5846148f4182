"""Scores given tokens and verifies kept ones in the prefills of SGLang's model runner.

The hidden states that go into the output layer are taken, and only the scored positions are looked
up, in slabs, with the processed distribution. A prompt may come in chunks, and from the beginning
again after a retraction. Positions whose KV is found in the radix cache have no hidden states, so a
scoring request takes its prefix from there only up to its first scored position (`PrefillRequest`
in `worker.parts`). Imports no SGLang.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from asyncrl.engine.remote.worker.scoring import Scorer
from asyncrl.engine.sglang.worker.requests import SchedulerBatch
from asyncrl.engine.sglang.worker.steps import Reporting


class Prefill(NamedTuple):
    """The tokens that a step takes in, for each row of its batch."""

    prefixes: list[int]
    """`[B]` tokens that had KV before."""
    lengths: list[int]
    """`[B]` tokens that are fed."""


class PrefillScoring:
    """The scored requests whose prompts are being taken in; `reporting` receives their tables."""

    def __init__(self, batch: SchedulerBatch, scorer: Scorer, reporting: Reporting) -> None:
        self._batch = batch
        self._scorer = scorer
        self._reporting = reporting
        self._prefill: Prefill | None = None

    @property
    def wanted(self) -> bool:
        """True if the hidden states of the next step are needed."""
        return self._prefill is not None

    def begin(self, prefill: Prefill | None) -> None:
        """Note the prefill of the next step; None if it takes in no prompt."""
        scores = prefill is not None and any(
            self._batch.entry(name).extra.scored for name in self._batch.ids
        )
        self._prefill = prefill if scores else None

    def compute(self, hidden: torch.Tensor) -> None:
        """Read the scored positions of the step's `hidden` `[T, H]`; report complete requests."""
        prefill, self._prefill = self._prefill, None
        if prefill is None:
            return
        self._scorer.forget(self._reporting.requests.entries)
        begins = np.cumsum(prefill.lengths) - prefill.lengths
        taken = zip(
            self._batch.ids, prefill.prefixes, prefill.lengths, begins.tolist(), strict=True
        )
        rows = [
            (name, entry, entry.extra.top_k_logprobs, prefix, length, begin)
            for name, prefix, length, begin in taken
            if (entry := self._batch.entry(name)).extra.scored
        ]
        version = self._batch.policy_version
        for name, (ids, logprobs) in self._scorer.score(hidden, rows, version).items():
            if self._reporting.requests.serves(name):
                self._reporting.outbox.add_scored(name, ids, logprobs, version)
