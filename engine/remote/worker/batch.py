"""The requests of an engine's batch as arrays, one entry a row.

A request's parameters are read once, when it first appears, into a separate column. When the list
of rows has changed, the rows are picked from the columns; an ordinary step costs a comparison of
two lists.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container

import numpy as np
from numpy.typing import NDArray

from asyncrl.engine.remote.worker.entries import Columns, Entry
from asyncrl.engine.sampling.drawing import UNREPORTED_K, noise_seeds
from asyncrl.engine.sampling.truncation import SamplingColumns
from asyncrl.rollout.trajectory import SeedArray


class Batch(ABC):
    """Follows an engine's batch, whose state a subclass reads; draws have lists of `listed` ids."""

    def __init__(self, listed: int = UNREPORTED_K) -> None:
        self.listed = listed
        self.policy_version = 0
        """Version of the loaded weights; set by `advance`."""
        self.ids: list[str] = []
        self.seed: SeedArray = np.empty(0, np.uint64)
        """`[B]`"""
        self.noise_seed: SeedArray = np.empty(0, np.uint64)
        """`[B]` seeds of draws outside the lists (`engine.sampling.drawing.noise_seeds`)."""
        self.sampling = SamplingColumns.unset(0)
        self.start: NDArray[np.int64] = np.empty(0, np.int64)
        self.ticket: NDArray[np.int64] = np.empty(0, np.int64)
        self.top_k_logprobs = 0
        """Length of the reported lists: the most that any row asks for."""
        self.changes = 0
        self._known = Columns()

    @abstractmethod
    def read(self, request_id: str) -> Entry:
        """Read a request that the engine knows."""

    def follow(self, ids: list[str], alive: Container[str]) -> None:
        """Copy the engine's rows `ids` `[B]`, cheap if they have not changed.

        `alive` are the requests that the engine knows, with a row or without.
        """
        if ids == self.ids:
            return
        self.ids = list(ids)
        self.changes += 1
        known = self._known
        for name in [name for name in known.entries if name not in alive]:
            known.remove(name)
        for name in ids:
            if name not in known.entries:
                self.entry(name)
        columns = np.array([known.column[name] for name in ids], np.int64)
        self.seed, self.start = known.seed[columns], known.start[columns]
        self.ticket = known.ticket[columns]
        self.noise_seed = noise_seeds(self.seed, self.policy_version)
        self.sampling = known.sampling.at(columns)
        self.top_k_logprobs = int(known.top_k_logprobs[columns].max(initial=0))

    def advance(self, policy_version: int) -> None:
        """Draw under this version from now on."""
        self.policy_version = policy_version
        self.noise_seed = noise_seeds(self.seed, policy_version)

    def entry(self, request_id: str) -> Entry:
        """Return the entry of a request that the engine knows, reading it once."""
        entry = self._known.entries.get(request_id)
        if entry is None:
            entry = self.read(request_id)
            self._known.add(request_id, entry)
        return entry
