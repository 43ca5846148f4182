"""Requests that wait for a slot, in order of `(priority, order, arrival)`, lowest first."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

import numpy as np

from asyncrl.engine.errors import EngineError
from asyncrl.engine.protocol import GenerateRequest
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
