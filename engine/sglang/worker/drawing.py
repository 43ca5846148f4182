"""Draws the tokens of a plain step, the same ones that any other engine of ours draws.

A draw depends on the distribution, the request's seed, the policy version and the position only
(`engine.sampling.drawing`), not on batch, row, retraction or drafts. Imports no SGLang.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.engine.remote.worker.ranks import Ranks
from asyncrl.engine.sampling.drawing import Streams
from asyncrl.engine.sampling.logits import LogitDraws, draw_from_logits
from asyncrl.engine.sglang.worker.requests import SchedulerBatch
from asyncrl.engine.sglang.worker.steps import Places, Reporting, StepOutput


@dataclass
class StepDrawing:
    """Draws one token for each row of the batch, in rank 0, within `max_bytes`."""

    _batch: SchedulerBatch
    _ranks: Ranks
    _reporting: Reporting
    _max_bytes: int

    def __call__(self, logits: torch.Tensor) -> tuple[torch.Tensor, StepOutput | None]:
        """Return `[B]` int64 tokens and, in rank 0, the table; may overwrite logits `[B, V]`."""
        batch, rows = self._batch, len(logits)
        if not self._ranks.leads:
            tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
            return self._ranks.share_tokens(tokens), None
        drawn = draw_from_logits(
            logits,
            batch.sampling,
            batch.listed,
            Streams(batch.seed, batch.lengths - batch.start, batch.noise_seed),
            max_bytes=self._max_bytes,
        )
        output = output_of(drawn, batch, np.arange(rows), self._reporting)
        return self._ranks.share_tokens(drawn.ids[:, 0].long()), output


def output_of(
    drawn: LogitDraws,
    batch: SchedulerBatch,
    starts: NDArray[np.int64],
    reporting: Reporting,
    at: torch.Tensor | None = None,
) -> StepOutput:
    """Return the table of a step, whose rows begin at `starts` `[B]`; `at` selects draws."""
    reported = slice(1 + batch.top_k_logprobs)
    ids, logprobs = drawn.ids[:, reported], drawn.logprobs[:, reported]
    return StepOutput(
        ids if at is None else ids[at],
        logprobs if at is None else logprobs[at],
        Places(batch.ids, batch.ticket, starts),
        batch.policy_version,
        reporting,
    )
