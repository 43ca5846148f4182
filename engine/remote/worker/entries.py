"""The worker's record of requests: an entry for each, and their parameters as columns.

A request's parameters are read once, when it first appears, into a separate column. When the list
of rows has changed, the rows are picked from the columns; an ordinary step costs a comparison of
two lists.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncrl.engine.protocol import SamplingParams
from asyncrl.engine.remote.extras import RequestExtra
from asyncrl.engine.sampling.drawing import UNREPORTED_K, noise_seeds
from asyncrl.engine.sampling.truncation import SamplingColumns
from asyncrl.rollout.trajectory import IntArray, SeedArray


@dataclass(frozen=True, slots=True)
class Entry:
    """One request."""

    extra: RequestExtra
    sampling: SamplingParams
    """The settings by which tokens are drawn; the others have their defaults."""
    start: int
    """Start of its response among its tokens: the length of the prompt proper."""
    context: IntArray
    """`[C]` its first tokens: the prompt and what it resumes from."""
    limit: int
    stop_tokens: tuple[int, ...]

    @classmethod
    def of(
        cls,
        extra: RequestExtra,
        context: IntArray,
        *,
        max_tokens: int,
        temperature: float,
        top_p: float,
        stop_tokens: tuple[int, ...],
    ) -> Entry:
        """Make the entry of a request that may generate `max_tokens` more tokens."""
        return cls(
            extra=extra,
            sampling=SamplingParams(
                max_tokens,
                temperature=temperature,
                top_p=top_p,
                top_k=extra.top_k,
                min_p=extra.min_p,
            ),
            start=len(context) - extra.generated,
            context=context,
            limit=len(context) + max_tokens,
            stop_tokens=stop_tokens,
        )


class Columns:
    """The parameters of all requests that the engine knows, a column each."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.seed: SeedArray = np.empty(0, np.uint64)
        self.start: NDArray[np.int64] = np.empty(0, np.int64)
        self.ticket: NDArray[np.int64] = np.empty(0, np.int64)
        self.top_k_logprobs: NDArray[np.int64] = np.empty(0, np.int64)
        self.sampling = SamplingColumns.unset(0)
        self.column: dict[str, int] = {}
        self._free: list[int] = []

    def add(self, name: str, entry: Entry) -> None:
        """Write a new request into a free column."""
        if not self._free:
            self._grow()
        self.entries[name] = entry
        self.column[name] = self._free.pop()
        self._write(name)

    def remove(self, name: str) -> None:
        """Free the column of a request."""
        del self.entries[name]
        self._free.append(self.column.pop(name))

    def _write(self, name: str) -> None:
        column, entry = self.column[name], self.entries[name]
        self.seed[column] = entry.extra.seed
        self.start[column] = entry.start
        self.ticket[column] = entry.extra.ticket
        # Tokens drawn by a request that only scores are thrown away.
        self.top_k_logprobs[column] = 0 if entry.extra.scored else entry.extra.top_k_logprobs
        self.sampling.set(column, entry.sampling)

    def _grow(self) -> None:
        have = len(self.seed)
        size = max(16, 2 * have)
        self.seed, self.start = np.empty(size, np.uint64), np.empty(size, np.int64)
        self.ticket, self.top_k_logprobs = np.empty(size, np.int64), np.empty(size, np.int64)
        self.sampling = SamplingColumns.unset(size)
        self._free = list(range(size - 1, have - 1, -1))
        for name in self.column:
            self._write(name)


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
