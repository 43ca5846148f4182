"""The requests of vLLM's batch as arrays, one entry a row. Imports no vLLM.

vLLM moves rows when its batch is condensed or a request is preempted. A request's parameters are
read once, when it first appears, into a column of its own. When the list of rows has changed, the
rows are picked from the columns; an ordinary step costs a comparison of two lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.drawing import UNREPORTED_K, noise_seeds
from engine.protocol import SamplingParams
from engine.sampling import SamplingColumns
from engine.vllm.extras import RequestExtra
from rollout.trajectory import IntArray, SeedArray


@dataclass(frozen=True, slots=True)
class Entry:
    """What is known of one request."""

    extra: RequestExtra
    """What the generator's process sent along with it."""
    sampling: SamplingParams
    """How its tokens are drawn; only that part is set."""
    start: int
    """Where its response starts among its tokens: the length of the prompt proper."""
    context: IntArray
    """`[C]` its first tokens: the prompt and what it resumes from."""
    limit: int
    """Most tokens in all."""
    stop_tokens: tuple[int, ...]

    @classmethod
    def read(cls, request: Any) -> Entry:
        """From the runner's state of a request.

        Raises:
            KeyError: the request does not carry our section, so this engine did not send it.
        """
        params = request.sampling_params
        extra = RequestExtra.from_extra_args(params.extra_args)
        context = np.array(request.prompt_token_ids, np.int32)
        return cls(
            extra=extra,
            sampling=SamplingParams(
                params.max_tokens,
                temperature=params.temperature,
                top_p=params.top_p,
                top_k=extra.top_k,
                min_p=extra.min_p,
            ),
            start=len(context) - extra.generated,
            context=context,
            limit=len(context) + params.max_tokens,
            stop_tokens=tuple(params.stop_token_ids or ()),
        )


class Batch:
    """Follows the batch of one model runner, see the module's docstring.

    Args:
        runner: vLLM's `GPUModelRunner`.
        listed: length of the lists that tokens are drawn with, reported or not.
    """

    def __init__(self, runner: Any, listed: int = UNREPORTED_K) -> None:
        self.runner = runner
        self.listed = listed
        self.policy_version = 0
        """Of the weights that are loaded; set by `advance`."""
        self.ids: list[str] = []
        """`[B]` request ids."""
        self.seed: SeedArray = np.empty(0, np.uint64)
        """`[B]`"""
        self.noise_seed: SeedArray = np.empty(0, np.uint64)
        """`[B]` of what the rows draw outside their lists (`engine.drawing.noise_seeds`)."""
        self.sampling = SamplingColumns.unset(0)
        """`[B]` rows."""
        self.start: NDArray[np.int64] = np.empty(0, np.int64)
        """`[B]` as `Entry.start`."""
        self.ticket: NDArray[np.int64] = np.empty(0, np.int64)
        """`[B]` as `RequestExtra.ticket`."""
        self.top_k_logprobs = 0
        """Entries of the lists that are reported: as many as some row asks for."""
        self.changes = 0
        """How many times the rows have changed."""
        self._known = _Columns()

    def refresh(self) -> None:
        """Take over the runner's rows; cheap when they are the same as before."""
        ids: list[str] = self.runner.input_batch.req_ids
        if ids == self.ids:
            return
        self.ids = list(ids)
        self.changes += 1
        known, alive = self._known, self.runner.requests
        for name in [name for name in known.entries if name not in alive]:
            known.remove(name)
        for name in ids:
            if name not in known.entries:
                self.entry(name)
        columns = known.columns_of(ids)
        self.seed, self.start = known.seed[columns], known.start[columns]
        self.ticket = known.ticket[columns]
        self.noise_seed = noise_seeds(self.seed, self.policy_version)
        self.sampling = known.sampling.at(columns)
        self.top_k_logprobs = int(known.top_k_logprobs[columns].max(initial=0))

    def advance(self, policy_version: int) -> None:
        """Draw from now on under this version."""
        self.policy_version = policy_version
        self.noise_seed = noise_seeds(self.seed, policy_version)

    def entry(self, request_id: str) -> Entry:
        """What is known of a request that the runner knows."""
        entry = self._known.entries.get(request_id)
        if entry is None:
            entry = Entry.read(self.runner.requests[request_id])
            self._known.add(request_id, entry)
        return entry

    def lengths(self) -> NDArray[np.int64]:
        """`[B]` tokens of each row now, drafts not counted."""
        lengths: NDArray[np.int64] = self.runner.input_batch.num_tokens_no_spec[: len(self.ids)]
        return lengths.astype(np.int64)


class _Columns:
    """The parameters of all requests that the runner knows, a column each."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.seed: SeedArray = np.empty(0, np.uint64)
        self.start: NDArray[np.int64] = np.empty(0, np.int64)
        self.ticket: NDArray[np.int64] = np.empty(0, np.int64)
        self.top_k_logprobs: NDArray[np.int64] = np.empty(0, np.int64)
        self.sampling = SamplingColumns.unset(0)
        self._column: dict[str, int] = {}
        self._free: list[int] = []

    def columns_of(self, names: Sequence[str]) -> NDArray[np.int64]:
        """`[n]` the columns of known requests."""
        column = self._column
        return np.array([column[name] for name in names], np.int64)

    def add(self, name: str, entry: Entry) -> None:
        """Write a new request into a free column."""
        if not self._free:
            self._grow()
        self.entries[name] = entry
        self._column[name] = self._free.pop()
        self._write(name)

    def remove(self, name: str) -> None:
        """Free the column of a request."""
        del self.entries[name]
        self._free.append(self._column.pop(name))

    def _write(self, name: str) -> None:
        column, entry = self._column[name], self.entries[name]
        self.seed[column] = entry.extra.seed
        self.start[column] = entry.start
        self.ticket[column] = entry.extra.ticket
        self.top_k_logprobs[column] = entry.extra.top_k_logprobs
        self.sampling.set(column, entry.sampling)

    def _grow(self) -> None:
        have = len(self.seed)
        size = max(16, 2 * have)
        self.seed, self.start = np.empty(size, np.uint64), np.empty(size, np.int64)
        self.ticket, self.top_k_logprobs = np.empty(size, np.int64), np.empty(size, np.int64)
        self.sampling = SamplingColumns.unset(size)
        self._free = list(range(size - 1, have - 1, -1))
        for name in self._column:
            self._write(name)
