"""The requests of vLLM's batch as arrays, one entry a row. Nothing here imports vLLM.

vLLM moves rows about when its batch is condensed or a request is preempted. What we know of a
request is read once, when it first appears; the arrays are put together again only when the list
of rows has changed, so an ordinary step costs a comparison of two lists.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.trajectory import FloatArray, IntArray

SECTION = "asyncrl"
"""Key of our part in vLLM's `additional_config` and in a request's `extra_args`."""

_NO_TOKENS = np.empty(0, np.int32)


def request_extra(
    *,
    seed: int,
    written: int = 0,
    cache_key: str = "",
    old: IntArray = _NO_TOKENS,
    scored: int = 0,
    known: IntArray | None = None,
) -> dict[str, Any]:
    """What a request carries in `SamplingParams.extra_args`; plain values that msgpack takes.

    Args:
        seed: of its draws, 0 to 2**64 - 1.
        written: response tokens that its prompt ends with.
        cache_key: names the tree that it drafts from and feeds; "" for none.
        old: `[D]` an old continuation, drafted from first.
        scored: last tokens of the prompt to score, in a scoring request.
        known: `[scored, K]` ids whose log-probabilities are wanted beside the most probable ones;
            tail draws leave these out instead.
    """
    ids = None if known is None else [known.shape[1], known.astype("<i4").tobytes()]
    return {
        SECTION: {
            "seed": seed,
            "written": written,
            "cache_key": cache_key,
            "old": old.astype("<i4").tobytes(),
            "scored": scored,
            "known": ids,
        }
    }


@dataclass(frozen=True, slots=True)
class Entry:
    """What is known of one request."""

    seed: int
    temperature: float
    top_p: float
    start: int
    """Where its response starts among its tokens: the prompt's length less what is written."""
    context: IntArray
    """`[C]` its first tokens, the prompt and what it resumes from."""
    limit: int
    """Most tokens in all."""
    stop_tokens: tuple[int, ...]
    cache_key: str
    old: IntArray
    scored: int
    known: IntArray | None

    @classmethod
    def read(cls, request: Any) -> Entry:
        """From the runner's state of a request.

        Raises:
            KeyError: it does not carry our section: somebody else sent it.
        """
        params = request.sampling_params
        section = params.extra_args[SECTION]
        prompt = np.array(request.prompt_token_ids, np.int32)
        known = section["known"]
        return cls(
            seed=section["seed"],
            temperature=params.temperature,
            top_p=params.top_p,
            start=len(prompt) - section["written"],
            context=prompt,
            limit=len(prompt) + params.max_tokens,
            stop_tokens=tuple(params.stop_token_ids or ()),
            cache_key=section["cache_key"],
            old=np.frombuffer(section["old"], "<i4").astype(np.int32),
            scored=section["scored"],
            known=known and np.frombuffer(known[1], "<i4").reshape(section["scored"], known[0]),
        )


@dataclass(slots=True)
class Batch:
    """Follows the batch of one model runner; see the module's docstring."""

    runner: Any
    seed: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    """`[B]`"""
    temperature: FloatArray = field(default_factory=lambda: np.empty(0, np.float32))
    """`[B]`"""
    top_p: FloatArray = field(default_factory=lambda: np.empty(0, np.float32))
    """`[B]`"""
    start: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """`[B]` as `Entry.start`."""
    ids: list[str] = field(default_factory=list)
    """`[B]` request ids."""
    changes: int = 0
    """Counts the times that rows have changed."""
    _entries: dict[str, Entry] = field(default_factory=dict)

    def refresh(self) -> None:
        """Look at the runner's rows; cheap when they are the same as before."""
        ids: list[str] = self.runner.input_batch.req_ids
        if ids == self.ids:
            return
        self.ids = list(ids)
        self.changes += 1
        alive = self.runner.requests
        self._entries = {name: entry for name, entry in self._entries.items() if name in alive}
        entries = [self.entry(name) for name in self.ids]
        self.seed = np.array([entry.seed for entry in entries], np.uint64)
        self.temperature = np.array([entry.temperature for entry in entries], np.float32)
        self.top_p = np.array([entry.top_p for entry in entries], np.float32)
        self.start = np.array([entry.start for entry in entries], np.int64)

    def entry(self, request_id: str) -> Entry:
        """What is known of a request that the runner knows."""
        entry = self._entries.get(request_id)
        if entry is None:
            entry = self._entries[request_id] = Entry.read(self.runner.requests[request_id])
        return entry

    def lengths(self) -> NDArray[np.int64]:
        """`[B]` tokens of each row now, drafts not counted."""
        lengths: NDArray[np.int64] = self.runner.input_batch.num_tokens_no_spec[: len(self.ids)]
        return lengths.astype(np.int64)
