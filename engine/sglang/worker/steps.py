"""The outputs of steps, on their way through SGLang's scheduler to the client. Imports no SGLang.

SGLang 0.5.23 carries `auxiliary_device_output` of a forward pass along with its tokens: it copies
it to the host with them, commits the tokens, then calls `consume` with those that each request
keeps (`sglang/srt/managers/auxiliary_output.py`). Only those are reported: neither the draw of an
unfinished prompt, nor drafts after a stop token or the limit, nor draws after a request's end.

Several steps share a message. When it is sent depends on the tokens in it, so a cut at the last
message would reveal something about the tokens after it (docs/decisions/0011). Therefore the
scheduler ends an interrupted response: it sends all that was drawn before, then its end.

Given tokens are scored and kept ones verified in prefills. A prompt may come in chunks, and from
the beginning again after a retraction. Positions whose KV is in the radix cache have no hidden
states, so a scoring request takes its prefix from there only up to its first scored position
(`PrefillRequest` in `worker.parts`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.engine.remote.extras import NO_TICKET, StepTable
from asyncrl.engine.remote.worker.scoring import Scorer
from asyncrl.engine.sglang.messages import End, Gauges, Outputs, Scored, Step
from asyncrl.engine.sglang.worker.requests import Requests, SchedulerBatch
from asyncrl.rollout.trajectory import FloatArray, IntArray

_MAX_SECONDS = 0.1
"""Longest time that a step waits for the message to be sent, when steps are slow."""


@dataclass
class Outbox:
    """Collects outputs and sends them, several steps in one message with current `gauges`."""

    _send: Callable[[Outputs], None]
    _gauges: Callable[[], Gauges]
    _steps_per_message: int
    _clock: Callable[[], float] = time.monotonic
    _began: float = 0.0
    _waiting: int = 0
    _outputs: Outputs = field(default_factory=Outputs)
    steps: int = 0

    def add_step(self, table: StepTable, policy_version: int) -> None:
        """Add the table of a step with the tokens that are kept; at most one table a step."""
        ids, logprobs = _bytes(table.ids, "<i4"), _bytes(table.logprobs, "<f4")
        step = Step(policy_version, table.ids.shape[1], ids, logprobs, _bytes(table.tickets, "<i8"))
        self._outputs.steps.append(step)

    def add_scored(
        self, request_id: str, ids: IntArray, logprobs: FloatArray, policy_version: int
    ) -> None:
        """Add the table `[n, width]` of a scored request; the current step is sent when it ends."""
        table = _bytes(ids, "<i4"), _bytes(logprobs, "<f4")
        self._outputs.scored.append(Scored(request_id, policy_version, ids.shape[1], *table))

    def add_end(self, end: End) -> None:
        """Add the end of a request."""
        self._outputs.ends.append(end)

    def end_step(self) -> None:
        """Count a step whose outputs were all added; send them if it is time."""
        self.steps += 1
        now = self._clock()
        if not self._waiting:
            self._began = now
        self._waiting += 1
        full = self._waiting >= self._steps_per_message or now - self._began >= _MAX_SECONDS
        if full or self._outputs.scored:
            self.flush()

    def flush(self) -> None:
        """Send all that is left."""
        outputs = self._outputs
        self._waiting = 0
        if outputs.steps or outputs.scored or outputs.ends:
            self._outputs = Outputs()
            self._send(Outputs(outputs.steps, outputs.scored, outputs.ends, self._gauges()))


def _bytes(array: NDArray[np.generic], dtype: str) -> bytes:
    return np.ascontiguousarray(array, dtype).tobytes()


class Places(NamedTuple):
    """Layout of a step's table."""

    request_ids: list[str]
    """`[B]`"""
    tickets: NDArray[np.int64]
    starts: NDArray[np.int64]
    """`[B]` index of each row's first token in the table; its other tokens follow."""


class Reporting(NamedTuple):
    """Receivers of tables."""

    requests: Requests
    outbox: Outbox


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The table of one step; SGLang's `DeviceAuxiliaryOutput`, then its `HostAuxiliaryOutput`."""

    ids: torch.Tensor
    """`[T, 1 + K]` int32: the token drawn at each place, then its list."""
    logprobs: torch.Tensor
    """`[T, 1 + K]` float32"""
    places: Places
    policy_version: int
    reporting: Reporting

    def copy_to_host(self, copy_tensor: Callable[[torch.Tensor], torch.Tensor]) -> StepOutput:
        """Copy to the host; SGLang waits for the copy before it calls `consume`."""
        return replace(self, ids=copy_tensor(self.ids), logprobs=copy_tensor(self.logprobs))

    def consume(self, batch: Any, commits: Sequence[Any]) -> None:  # noqa: ARG002
        """Report the tokens that requests keep: `[B]` SGLang's `CommittedTokens`; None: none."""
        requests, outbox = self.reporting
        counts = np.fromiter(
            (0 if one is None else len(one.token_ids) for one in commits), np.int64, len(commits)
        )
        tickets = requests.tickets(self.places.request_ids, self.places.tickets)
        counts[tickets == NO_TICKET] = 0
        rows = np.repeat(np.arange(len(counts)), counts)
        if not len(rows):
            return
        within = np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows]
        at = self.places.starts[rows] + within
        table = StepTable(self.ids.numpy()[at], self.logprobs.numpy()[at], tickets[rows])
        outbox.add_step(table, self.policy_version)


class Prefill(NamedTuple):
    """The tokens that a step takes in, for each row of its batch."""

    prefixes: list[int]
    """`[B]` tokens that had KV before."""
    lengths: list[int]
    """`[B]` tokens that are fed."""


class PrefillScoring:
    """The scored requests whose prompts are being taken in; `reporting` receives their tables."""

    def __init__(self, batch: SchedulerBatch, scorer: Scorer, reporting: Reporting) -> None:
        self._batch = batch
        self._scorer = scorer
        self._reporting = reporting
        self._prefill: Prefill | None = None

    @property
    def wanted(self) -> bool:
        """True if the hidden states of the next step are needed."""
        return self._prefill is not None

    def begin(self, prefill: Prefill | None) -> None:
        """Note the prefill of the next step; None if it takes in no prompt."""
        scores = prefill is not None and any(
            self._batch.entry(name).extra.scored for name in self._batch.ids
        )
        self._prefill = prefill if scores else None

    def compute(self, hidden: torch.Tensor) -> None:
        """Read the scored positions of the step's `hidden` `[T, H]`; report complete requests."""
        prefill, self._prefill = self._prefill, None
        if prefill is None:
            return
        self._scorer.forget(self._reporting.requests.entries)
        begins = np.cumsum(prefill.lengths) - prefill.lengths
        taken = zip(
            self._batch.ids, prefill.prefixes, prefill.lengths, begins.tolist(), strict=True
        )
        rows = [
            (name, entry, entry.extra.top_k_logprobs, prefix, length, begin)
            for name, prefix, length, begin in taken
            if (entry := self._batch.entry(name)).extra.scored
        ]
        version = self._batch.policy_version
        for name, (ids, logprobs) in self._scorer.score(hidden, rows, version).items():
            if self._reporting.requests.serves(name):
                self._reporting.outbox.add_scored(name, ids, logprobs, version)
