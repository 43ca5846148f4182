"""Requests that wait for a slot: best priority first, then in order of arrival."""

from __future__ import annotations

import heapq
import itertools

import numpy as np

from cache.trajectory import IntArray
from engine.errors import EngineError
from engine.protocol import GenerateRequest


def context_of(request: GenerateRequest) -> IntArray:
    """`[P + S]` prompt and prefix: what is known before the first draw."""
    both = np.concatenate([request.prompt_tokens, request.prefix_tokens])
    return both.astype(np.int32, copy=False)


class Waiting:
    """A priority queue of requests that can also be dropped by id."""

    def __init__(self) -> None:
        self._requests: dict[str, GenerateRequest] = {}
        self._heap: list[tuple[int, int, str]] = []
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
        heapq.heappush(self._heap, (request.priority, arrival, name))

    def drop(self, request_id: str) -> bool:
        """Forget a request; False when it was not waiting. Its heap entry is skipped later."""
        self._arrival_of.pop(request_id, None)
        return self._requests.pop(request_id, None) is not None

    def drain(self) -> list[GenerateRequest]:
        """Take everything out."""
        out = list(self._requests.values())
        self._requests.clear()
        self._arrival_of.clear()
        self._heap.clear()
        return out

    def take(self, free: int, budget: int) -> list[GenerateRequest]:
        """Up to `free` requests whose distinct contexts hold at most `budget` tokens.

        The first is taken whatever its length; a context shared by several counts once.
        """
        contexts: set[bytes] = set()
        out: list[GenerateRequest] = []
        while self._heap and len(out) < free:
            _, arrival, name = self._heap[0]
            if self._arrival_of.get(name) == arrival:
                context = context_of(self._requests[name])
                key = context.tobytes()
                cost = 0 if key in contexts else len(context)
                if out and cost > budget:
                    break
                budget -= cost
                contexts.add(key)
                out.append(self._requests[name])
                self.drop(name)
            heapq.heappop(self._heap)
        return out

    def check(self) -> None:
        """Raise EngineError when a waiting request could never be taken."""
        queued = {(name, arrival) for _, arrival, name in self._heap}
        if not set(self._arrival_of.items()) <= queued:
            raise EngineError("a waiting request is in no queue")
