"""Scores given tokens and verifies kept ones in the prefills of SGLang's model runner.

SGLang computes `input_token_logprobs` from raw logits. Here the hidden states that go into the
output layer are taken, and only the scored positions are looked up, in slabs, with the processed
distribution. Kept tokens are judged here: only the outcomes travel.

A prompt may come in chunks, and from the beginning again after a retraction. Positions whose KV is
found in the radix cache have no hidden states, so a scoring request takes no more of its prefix
from there than lies before its first scored position (`PrefillRequest` in `worker.scheduler`).
Imports no SGLang.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from asyncrl.engine.remote.worker.scored import ScoredPart, ScoredRequest
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
        self._requests: dict[str, ScoredRequest] = {}
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
        alive = self._batch.alive
        self._requests = {name: one for name, one in self._requests.items() if name in alive}
        parts: list[ScoredPart] = []
        done: list[str] = []
        begins = np.cumsum(prefill.lengths) - prefill.lengths
        rows = zip(self._batch.ids, prefill.prefixes, prefill.lengths, begins.tolist(), strict=True)
        for name, prefix, length, begin in rows:
            entry = self._batch.entry(name)
            if not entry.extra.scored:
                continue
            if name not in self._requests:
                self._requests[name] = ScoredRequest(entry, entry.extra.top_k_logprobs)
            part, complete = self._requests[name].part(prefix, length, begin)
            parts.append(part)
            if complete:
                done.append(name)
        self._scorer.read(hidden, parts)
        finished = {name: self._requests.pop(name) for name in done}
        version = self._batch.policy_version
        for name, (ids, logprobs) in self._scorer.tables(finished, version).items():
            if self._reporting.requests.serves(name):
                self._reporting.outbox.add_scored(name, ids, logprobs, version)
