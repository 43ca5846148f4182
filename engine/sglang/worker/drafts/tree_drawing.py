"""Draws the tokens of a step with drafts, the same ones as without, and accepts drafts by them.

A token is drawn at every place that was fed, as without drafts (`worker.drawing`), and a draft is
accepted if it is the token that was drawn (`asyncrl.rollout.acceptance.accept_tree`, exact for any
drafts). Imports no SGLang.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.engine.drafting.trees import TokenTrees
from asyncrl.engine.remote.worker.ranks import Ranks
from asyncrl.engine.sampling.drawing import Streams
from asyncrl.engine.sampling.logits import LogitDraws, draw_from_logits
from asyncrl.engine.sglang.worker.drafts.verify_step import (
    Feed,
    paths_of,
    places_in,
    roots,
    walk_on_device,
)
from asyncrl.engine.sglang.worker.drawing import output_of
from asyncrl.engine.sglang.worker.requests import SchedulerBatch
from asyncrl.engine.sglang.worker.steps import Reporting, StepOutput
from asyncrl.rollout.acceptance import accept_tree

Index = NDArray[np.int64]


class Accepted(NamedTuple):
    """The tokens that the n rows of a step generate, on the model's device."""

    tokens: torch.Tensor
    """`[n, W]` int64, padded arbitrarily after each row's tokens. W is 1 + the depth of the deepest
    tree."""
    counts: torch.Tensor
    """`[n]` int64 tokens of each: the accepted nodes, and the draw after the last."""
    path: torch.Tensor
    """`[n, W]` int64 fed places after which they were drawn."""
    output: StepOutput | None
    """Their table, in rank 0 only."""


@dataclass
class TreeDrawing:
    """Draws at every place that a step feeds, in rank 0, within `max_bytes`."""

    _batch: SchedulerBatch
    _ranks: Ranks
    _reporting: Reporting
    _max_bytes: int

    def __call__(self, logits: torch.Tensor, trees: TokenTrees, feed: Feed) -> Accepted:
        """Draw from logits `[T, V]` of the fed tokens, overwriting them, and follow the trees."""
        device, n = logits.device, len(feed.counts)
        if not self._ranks.leads:
            return self._follow(n, 1 + int(trees.depths.max(initial=0)), device)
        drawn = self._draw(logits, feed)
        if device.type == "cpu":
            return self._accept(drawn, trees, feed)
        return self._accept_there(drawn, trees, feed)

    def _accept(self, drawn: LogitDraws, trees: TokenTrees, feed: Feed) -> Accepted:
        """Follow the trees on a CPU, where the draws are known."""
        n = len(feed.counts)
        draws = drawn.ids[:, 0].long()
        share = self._ranks.share_tokens
        if not len(trees.tokens):
            ones, path = torch.ones(n, dtype=torch.int64), torch.zeros(n, 1, dtype=torch.int64)
            output = output_of(drawn, self._batch, np.arange(n), self._reporting)
            # As many broadcasts as `_follow` waits for.
            return Accepted(share(draws[:, None]), share(ones), share(path), output)
        walks = accept_tree(draws.numpy(), trees.tokens, trees.parents, trees.offsets)
        places, counts = paths_of(walks, trees)
        tokens = draws[torch.from_numpy(roots(trees)[:, None] + places)]
        at = torch.from_numpy(walks.draws.astype(np.int64))
        return Accepted(
            share(tokens),
            share(torch.from_numpy(counts)),
            share(torch.from_numpy(places)),
            output_of(drawn, self._batch, np.cumsum(counts) - counts, self._reporting, at),
        )

    def _accept_there(self, drawn: LogitDraws, trees: TokenTrees, feed: Feed) -> Accepted:
        """Follow the trees on a device, without waiting for its draws."""
        n, width, device = len(feed.counts), feed.width, drawn.tokens.device
        # Tables of `[n, width]`; the draws of padding are 0 and on no path.
        places = places_in(trees, width)
        at = torch.from_numpy(places).to(device)
        drawn_tokens = drawn.ids[:, 0].long()
        draws = torch.zeros(n * width, dtype=torch.int64, device=device)
        draws[at] = drawn_tokens
        nodes, parents = np.zeros(n * width, np.int64), np.full(n * width, -1, np.int64)
        mine = trees.fed(np.zeros(n, np.int32), np.ones_like(trees.tokens)) > 0
        nodes[places[mine]], parents[places[mine]] = trees.tokens, trees.parents + 1
        depth = int(trees.depths.max(initial=0))
        path, counts = walk_on_device(
            draws.view(n, width),
            torch.from_numpy(nodes).to(device).view(n, width),
            torch.from_numpy(parents).to(device).view(n, width),
            depth,
        )
        rank = torch.zeros(n * width, dtype=torch.int64, device=device)
        rank[at] = torch.arange(len(places), device=device)
        starts = torch.arange(n, device=device)[:, None] * width
        chosen = rank[(starts + path).view(-1)]
        share = self._ranks.share_tokens
        return Accepted(
            share(drawn_tokens[chosen].view(n, depth + 1)),
            share(counts),
            share(path),
            output_of(drawn, self._batch, np.arange(n) * (depth + 1), self._reporting, chosen),
        )

    def _draw(self, logits: torch.Tensor, feed: Feed) -> LogitDraws:
        batch, row, positions = self._batch, feed.row, feed.positions
        if feed.real is not None:
            row, positions = row[feed.real], positions[feed.real]
            logits = logits[torch.from_numpy(feed.real).to(logits.device)]
        # The token drawn after a token is one position further.
        streams = Streams(batch.seed[row], positions + 1 - batch.start[row], batch.noise_seed[row])
        return draw_from_logits(
            logits, batch.sampling.at(row), batch.listed, streams, max_bytes=self._max_bytes
        )

    def _follow(self, n: int, width: int, device: torch.device) -> Accepted:
        """Receive what rank 0 has drawn, without a table."""
        tokens, path = (torch.empty((n, width), dtype=torch.int64, device=device) for _ in range(2))
        counts = torch.empty(n, dtype=torch.int64, device=device)
        shared = self._ranks.share_tokens
        return Accepted(shared(tokens), shared(counts), shared(path), None)
