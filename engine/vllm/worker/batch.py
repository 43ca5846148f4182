"""The requests of vLLM's batch as arrays, one entry a row. Imports no vLLM.

vLLM moves rows when its batch is condensed or a request is preempted. A request's parameters are
read once, when it first appears. The arrays are rebuilt only when the list of rows has changed, so
an ordinary step costs a comparison of two lists.
"""

from __future__ import annotations

from dataclasses import dataclass, field
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


@dataclass(slots=True)
class Batch:
    """Follows the batch of one model runner, see the module's docstring.

    Args:
        runner: vLLM's `GPUModelRunner`.
        listed: length of the lists that tokens are drawn with, reported or not.
    """

    runner: Any
    listed: int = UNREPORTED_K
    policy_version: int = 0
    """Of the weights that are loaded; set by `advance`."""
    seed: SeedArray = field(default_factory=lambda: np.empty(0, np.uint64))
    """`[B]`"""
    noise_seed: SeedArray = field(default_factory=lambda: np.empty(0, np.uint64))
    """`[B]` of what the rows draw outside their lists (`engine.drawing.noise_seeds`)."""
    sampling: SamplingColumns = field(default_factory=lambda: SamplingColumns.unset(0))
    """`[B]` rows."""
    start: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """`[B]` as `Entry.start`."""
    ids: list[str] = field(default_factory=list)
    """`[B]` request ids."""
    changes: int = 0
    """How many times the rows have changed."""
    _entries: dict[str, Entry] = field(default_factory=dict)

    def refresh(self) -> None:
        """Take over the runner's rows; cheap when they are the same as before."""
        ids: list[str] = self.runner.input_batch.req_ids
        if ids == self.ids:
            return
        self.ids = list(ids)
        self.changes += 1
        alive = self.runner.requests
        self._entries = {name: entry for name, entry in self._entries.items() if name in alive}
        entries = [self.entry(name) for name in self.ids]
        self.seed = np.array([entry.extra.seed for entry in entries], np.uint64)
        self.noise_seed = noise_seeds(self.seed, self.policy_version)
        self.sampling = SamplingColumns.of([entry.sampling for entry in entries])
        self.start = np.array([entry.start for entry in entries], np.int64)

    def advance(self, policy_version: int) -> None:
        """Draw from now on under this version."""
        self.policy_version = policy_version
        self.noise_seed = noise_seeds(self.seed, policy_version)

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
