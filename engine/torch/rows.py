"""Requests that wait for a slot, and those that run: a table of arrays, one row per request.

Waiting ones are in order of `(priority, order, arrival)`, lowest first. The first n rows are in
use. When a request ends, the last row and its KV slot move into its place (`release`).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncrl.engine.errors import EngineError
from asyncrl.engine.protocol import GenerateRequest
from asyncrl.engine.sampling.drawing import noise_seeds
from asyncrl.engine.sampling.truncation import SamplingColumns
from asyncrl.rollout.trajectory import IntArray


def context_of(request: GenerateRequest) -> IntArray:
    """Return `[P + S]` prompt and prefix: the tokens before the first draw."""
    both = request.prompt_tokens
    if len(request.prefix_tokens):
        both = np.concatenate([both, request.prefix_tokens])
    return both.astype(np.int32, copy=False)


def fed_context(request: GenerateRequest) -> IntArray:
    """Return `[P + S + L]` prompt, prefix and kept tokens, which a new row feeds."""
    context = context_of(request)
    return context if request.kept is None else np.concatenate([context, request.kept.tokens])


def logits_of(request: GenerateRequest) -> int:
    """Return the number of positions whose logits are needed when the request gets a slot."""
    return 1 if request.kept is None else 1 + len(request.kept)


class Waiting:
    """A priority queue of requests that can also be dropped by id."""

    def __init__(self) -> None:
        self._requests: dict[str, GenerateRequest] = {}
        self._heap: list[tuple[int, int, int, str]] = []
        self._arrivals = itertools.count()
        self._arrival_of: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def add(self, request: GenerateRequest) -> None:
        """Queue a request; its id must not be queued."""
        name, arrival = request.request_id, next(self._arrivals)
        self._requests[name] = request
        self._arrival_of[name] = arrival
        heapq.heappush(self._heap, (request.priority, request.order, arrival, name))

    def drop(self, request_id: str) -> GenerateRequest | None:
        """Remove a request; None if it was not waiting. Its heap entry is skipped later."""
        self._arrival_of.pop(request_id, None)
        return self._requests.pop(request_id, None)

    def drain(self) -> list[GenerateRequest]:
        """Remove and return all requests."""
        out = list(self._requests.values())
        self._requests.clear()
        self._arrival_of.clear()
        self._heap.clear()
        return out

    def take(
        self,
        free: int,
        budget: int,
        positions: int,
        known: Callable[[GenerateRequest], int] = lambda _: 0,
    ) -> list[GenerateRequest]:
        """Remove and return up to `free` requests with at most `budget` tokens of context.

        The first is taken in any case. A context that several share counts once, unless it has kept
        tokens. `positions` limits those whose logits are needed; `known` returns the tokens that
        need not be fed.
        """
        contexts: set[bytes] = set()
        out: list[GenerateRequest] = []
        while self._heap and len(out) < free:
            _, _, arrival, name = self._heap[0]
            if self._arrival_of.get(name) == arrival:
                request = self._requests[name]
                context = fed_context(request)
                key = context.tobytes()
                shared = request.kept is None and key in contexts
                cost, logits = len(context) - known(request), logits_of(request)
                cost = 0 if shared else cost
                if out and (cost > budget or logits > positions):
                    break
                budget -= cost
                positions -= logits
                if request.kept is None:
                    contexts.add(key)
                out.append(request)
                self.drop(name)
            heapq.heappop(self._heap)
        return out

    def check(self) -> None:
        """Raise EngineError if a waiting request could never be taken."""
        queued = {(name, arrival) for _, _, arrival, name in self._heap}
        if not set(self._arrival_of.items()) <= queued:
            raise EngineError("a waiting request is missing from the queue and would never run")


_NO_TOKENS: IntArray = np.empty(0, np.int32)


class Rows:
    """State of every running request. S slots, W context width."""

    def __init__(self, slots: int, width: int) -> None:
        self.slots = slots
        self.n = 0
        self.requests: list[GenerateRequest] = []
        self._row_of: dict[str, int] = {}
        self.tokens = np.zeros((slots, width), np.int32)
        """`[S, W]` prompt, prefix and response; the last token is the next one to feed."""
        self.total = np.zeros(slots, np.int32)
        self.prompt = np.zeros(slots, np.int32)
        self.limit = np.zeros(slots, np.int32)
        self.priority = np.zeros(slots, np.int32)
        """`[S]` of the requests; 0: a step waits for them."""
        self.kv_length = np.zeros(slots, np.int32)
        self.kv_installation = np.zeros(slots, np.int64)
        """`[S]` installation of weights under which the slot's KV was begun."""
        self.seed = np.zeros(slots, np.uint64)
        self.noise_seed = np.zeros(slots, np.uint64)
        """`[S]` seeds of draws outside the lists (`engine.sampling.drawing.noise_seeds`)."""
        self._policy_version = 0
        self.sampling = SamplingColumns.unset(slots)
        self.stops = np.full((slots, 1), -1, np.int64)
        self.stop_state = np.zeros(slots, np.int32)
        """`[S]` state of the request's stop rule, after the context."""
        self.with_stop_rule = 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._row_of

    def row_of(self, request_id: str) -> int:
        """Return the row of a running request. Raises KeyError if it is not running."""
        return self._row_of[request_id]

    def left(self) -> NDArray[np.int32]:
        """Return `[n]` tokens that each row may still generate."""
        return self.limit[: self.n] - self.total[: self.n]

    def advance(self, policy_version: int) -> None:
        """Draw under this version from now on."""
        self._policy_version = policy_version
        self.noise_seed[: self.n] = noise_seeds(self.seed[: self.n], policy_version)

    def take(
        self, requests: Sequence[GenerateRequest], *, seeds: Sequence[int], installation: int
    ) -> range:
        """Give the next rows to requests, in order. Raises EngineError if there are too few."""
        given = range(self.n, self.n + len(requests))
        if given.stop > self.slots:
            name = requests[self.slots - self.n].request_id
            raise EngineError(f"no free slot for request {name!r}")
        new = slice(given.start, given.stop)
        self.prompt[new] = [len(one.prompt_tokens) for one in requests]
        self.total[new] = self.prompt[new] + [len(one.prefix_tokens) for one in requests]
        ends = [one.sampling.last_token(one.turn_start) for one in requests]
        self.limit[new] = self.prompt[new] + ends
        self.priority[new] = [one.priority for one in requests]
        self.kv_length[new] = 0
        self.kv_installation[new] = installation
        self.seed[new] = np.array(seeds, np.uint64)
        self.noise_seed[new] = noise_seeds(self.seed[new], self._policy_version)
        for row, request in zip(given, requests, strict=True):
            self._fill(row, request)
        self.n = given.stop
        return given

    def _fill(self, row: int, request: GenerateRequest) -> None:
        start, end = int(self.prompt[row]), int(self.total[row])
        sampling = request.sampling
        self.tokens[row, :start] = request.prompt_tokens
        if end > start:
            self.tokens[row, start:end] = request.prefix_tokens
        if request.kept is not None:
            # They lie after the context, where they are scored. They are not part of it yet.
            self.tokens[row, end : end + len(request.kept)] = request.kept.tokens
        self.sampling.set(row, sampling)
        self._set_stops(row, sampling.stop_tokens)
        rule = sampling.stop_rule
        if rule is not None:
            turn = request.prefix_tokens[request.turn_start :]
            _, self.stop_state[row] = rule.follow(rule.start, turn)
            self.with_stop_rule += 1
        self.requests.append(request)
        self._row_of[request.request_id] = row

    def contexts(self, new: NewRows) -> IntArray:
        """Return `[sum(new.lengths)]` tokens that the leaders feed, one after another."""
        if not new.leaders:
            return _NO_TOKENS
        leaders = slice(new.decoding, new.decoding + len(new.leaders))
        place = np.arange(self.tokens.shape[1])
        fed = place < (new.starts + new.lengths)[:, None]
        if new.resumed:
            fed &= place >= new.starts[:, None]
        return self.tokens[leaders][fed]

    def release(self, row: int) -> int | None:
        """End a row; return the row that has moved into its place, or None."""
        if not 0 <= row < self.n:
            raise EngineError(f"row {row} released twice")
        last = self.n - 1
        self.with_stop_rule -= self.requests[row].sampling.stop_rule is not None
        del self._row_of[self.requests[row].request_id]
        moved = self.requests.pop()
        self.n = last
        if row == last:
            return None
        self.requests[row] = moved
        self._row_of[moved.request_id] = row
        for column in vars(self).values():
            if isinstance(column, np.ndarray):
                column[row] = column[last]
        self.sampling.move(last, row)
        return last

    def check(self) -> None:
        """Raise EngineError unless free + held == slots, and names and rows agree."""
        named = sorted(self._row_of.values())
        held = len(self.requests)
        if held != self.n or named != list(range(self.n)) or not 0 <= self.n <= self.slots:
            raise EngineError(f"slots: {self.n} in use, {held} held, rows named {named}")

    def _set_stops(self, row: int, stops: tuple[int, ...]) -> None:
        missing = len(stops) - self.stops.shape[1]
        if missing > 0:
            more = np.full((self.slots, missing), -1, np.int64)
            self.stops = np.concatenate([self.stops, more], axis=1)
        self.stops[row] = -1
        self.stops[row, : len(stops)] = stops


@dataclass(frozen=True, slots=True)
class NewRows:
    """The new rows of a step whose contexts are not in the KV slots yet."""

    decoding: int
    """Rows before them, which decode."""
    leaders: range
    """Rows whose contexts are fed: first the resumed ones, then others sorted by length."""
    followers: list[tuple[int, int]]
    """(row, index of its leader): rows that share their leader's KV and logits."""
    lengths: IntArray
    """`[leaders]` tokens that each leader feeds: its context and its kept tokens."""
    starts: IntArray
    """`[leaders]` tokens of the context whose KV is in the slot; they are not fed."""
    resumed: int
    wanted: IntArray
    """`[leaders]` number of last positions that need logits: one, and one for each kept token."""

    @classmethod
    def none(cls, decoding: int) -> NewRows:
        """Return the new rows of a step that takes nothing in."""
        return cls(decoding, range(0), [], _NO_TOKENS, _NO_TOKENS, 0, _NO_TOKENS)
