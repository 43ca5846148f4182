"""Names ordered by a changing integer key; finds the lowest at once."""

from __future__ import annotations

import heapq


class MinIndex:
    """Names with integer keys; `first()` has the lowest key, the longest unchanged among equals.

    A heap in which a changed key leaves its old entry behind. Old entries are dropped when they
    reach the top, or all at once when they outnumber the live ones. O(log n) amortised, O(n)
    memory.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, str]] = []
        self._live: dict[str, tuple[int, int]] = {}
        self._count = 0

    def __contains__(self, name: str) -> bool:
        return name in self._live

    def __len__(self) -> int:
        return len(self._live)

    def set(self, name: str, key: int) -> None:
        """Add a name, or change its key."""
        live = self._live
        old = live.get(name)
        if old is not None and old[0] == key:
            return
        self._count += 1
        live[name] = (key, self._count)
        heapq.heappush(self._heap, (key, self._count, name))
        if len(self._heap) > 2 * len(live) + 64:
            self._heap = [(k, count, n) for n, (k, count) in live.items()]
            heapq.heapify(self._heap)

    def discard(self, name: str) -> None:
        """Remove a name if it is there."""
        self._live.pop(name, None)

    def first(self) -> str | None:
        """The name with the lowest key; None if there are no names."""
        heap = self._heap
        while heap:
            key, count, name = heap[0]
            if self._live.get(name) == (key, count):
                return name
            heapq.heappop(heap)
        return None
