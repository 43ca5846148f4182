"""What a step generated, on its way through SGLang's scheduler. Imports no SGLang.

SGLang 0.5.23 carries `auxiliary_device_output` of a forward pass along with its tokens: it copies
it to the host with them, commits the tokens, then calls `consume` with those that each request
keeps (`sglang/srt/managers/auxiliary_output.py`). So the table is reported as it was drawn, without
an object for each token, and only what SGLang has kept of it: neither the draw of a prompt that is
not all in, nor drafts after a stop token or the limit, nor what a request drew after its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.engine.remote.extras import NO_TICKET, StepTable
from asyncrl.engine.sglang.worker.outbox import Outbox
from asyncrl.engine.sglang.worker.requests import Requests


class Places(NamedTuple):
    """Where the rows of a step lie in its table."""

    request_ids: list[str]
    """`[B]`"""
    tickets: NDArray[np.int64]
    """`[B]` of the requests."""
    starts: NDArray[np.int64]
    """`[B]` where each row's first token lies in the table; the others follow it."""


class Reporting(NamedTuple):
    """Where tables go."""

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
    """Of the weights that drew it."""
    reporting: Reporting

    def copy_to_host(self, copy_tensor: Callable[[torch.Tensor], torch.Tensor]) -> StepOutput:
        """The same on the host; SGLang waits for the copy before it calls `consume`."""
        return replace(self, ids=copy_tensor(self.ids), logprobs=copy_tensor(self.logprobs))

    def consume(self, batch: Any, commits: Sequence[Any]) -> None:  # noqa: ARG002
        """Report the tokens that requests keep.

        Args:
            batch: SGLang's batch.
            commits: `[B]` its `CommittedTokens` of each row; None: none.
        """
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
