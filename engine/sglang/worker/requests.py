"""The requests that SGLang's scheduler knows, and its batch as arrays. Imports no SGLang."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.engine.remote.extras import NO_TICKET, RequestExtra
from asyncrl.engine.remote.worker.entries import Batch, Entry
from asyncrl.engine.sampling.drawing import UNREPORTED_K
from asyncrl.engine.sglang.messages import AddRequest


def entry_of(message: AddRequest) -> Entry:
    """Return the entry of a message's request."""
    return Entry.of(
        RequestExtra.from_plain(message.extra),
        np.frombuffer(message.tokens, "<i4").astype(np.int32),
        max_tokens=message.max_tokens,
        temperature=message.temperature,
        top_p=message.top_p,
        stop_tokens=tuple(message.stop_tokens),
    )


class Requests:
    """The requests whose end SGLang has not reported yet."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self._ended: set[str] = set()
        """Requests whose end was sent before SGLang got to it."""

    def add(self, request_id: str, entry: Entry) -> None:
        """Add a request that is about to be given to SGLang."""
        self.entries[request_id] = entry

    def interrupt(self, request_id: str) -> bool:
        """End a request, whose later tokens are dropped; True if it was running."""
        if not self.serves(request_id):
            return False
        self._ended.add(request_id)
        return True

    def serves(self, request_id: str) -> bool:
        """Return True if a request is running and its end was not sent."""
        return request_id in self.entries and request_id not in self._ended

    def forget(self, request_id: str) -> bool:
        """Remove a request that SGLang has finished. Returns True if its end must still be sent."""
        known = self.entries.pop(request_id, None) is not None
        if request_id in self._ended:
            self._ended.remove(request_id)
            return False
        return known

    def tickets(self, request_ids: list[str], tickets: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return `[n]` tickets of requests, NO_TICKET for those that were ended since."""
        if self._ended.isdisjoint(request_ids):
            return tickets
        over = np.fromiter((one in self._ended for one in request_ids), np.bool_, len(request_ids))
        return np.where(over, NO_TICKET, tickets)


class SchedulerBatch(Batch):
    """The batch that SGLang runs next, or is running; draws have lists of `listed` ids."""

    def __init__(self, requests: Requests, listed: int = UNREPORTED_K) -> None:
        super().__init__(listed)
        self._requests = requests
        self.lengths: NDArray[np.int64] = np.empty(0, np.int64)
        """`[B]` tokens of each row, including those being fed; drafts are not counted."""

    def begin(self, batch: Any) -> None:
        """Take over a `ScheduleBatch` whose forward pass comes next.

        SGLang has counted the tokens that are fed: a row's next token has the index of its length.
        """
        self.lengths = batch.seq_lens_cpu.numpy().astype(np.int64)
        self.follow([request.rid for request in batch.reqs], self._requests.entries)

    def read(self, request_id: str) -> Entry:
        """Return the entry of a request."""
        return self._requests.entries[request_id]
