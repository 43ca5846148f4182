"""Each rank's share of every parameter: some of its rows, whose optimizer state it keeps.

    rank 0  .grad: sums of its groups ──┐                 ┌─► rows of 0: AdamW ──┐
    rank 1  .grad: sums of its groups ──┴─ summed, dealt ─┴─► rows of 1: AdamW ──┴─► all rows, both

Rows are dealt as in `torch.distributed.tensor.Shard(0)` and FSDP2: consecutive ones, equally many
to each rank but the last. A share is a view of the parameter, so the optimizer changes the
parameter itself, and the other rows come from their ranks afterwards.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from asyncrl.trainer.ranks.world import World

BUCKET_BYTES = 1 << 26
"""Size of gradients that are exchanged together: few exchanges, little extra memory."""


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's share of one parameter."""

    parameter: nn.Parameter
    own: nn.Parameter
    """`[rows, ...]`: a view of this rank's rows, perhaps none. `reduce` sets its `.grad`."""
    height: int
    """Rows of the first ranks; the last ones may have fewer."""

    @property
    def chunk(self) -> int:
        """Numbers sent for each rank, padded: those of `height` rows."""
        return self.height * (self.parameter.numel() // _rows(self.parameter))


class Shards:
    """The shares of one rank; all have the model's trained parameters in the same order."""

    def __init__(self, parameters: Sequence[nn.Parameter], world: World) -> None:
        self._world = world
        self.shares = [_share(one, world) for one in parameters]
        self._buckets = list(_buckets(self.shares, BUCKET_BYTES // world.size))

    @property
    def own(self) -> list[nn.Parameter]:
        """This rank's rows, for its optimizer."""
        return [share.own for share in self.shares]

    @torch.no_grad()
    def reduce(self) -> None:
        """Sum the gradients over the ranks; each gets those of its rows. Collective.

        A rank without a gradient adds nothing. `.grad` of the whole parameters is freed.
        """
        size = self._world.size
        for bucket in self._buckets:
            first = bucket[0].parameter
            length = sum(share.chunk for share in bucket)
            given = torch.zeros(size, length, dtype=first.dtype, device=first.device)
            own = torch.empty(length, dtype=first.dtype, device=first.device)
            for share, start in _placed(bucket):
                if share.parameter.grad is not None:
                    _deal(share.parameter.grad, given[:, start : start + share.chunk])
                    share.parameter.grad = None
            self._world.reduce_scatter(own, given, "gradients")
            for share, start in _placed(bucket):
                rows = own[start : start + share.own.numel()]
                share.own.grad = rows.view_as(share.own)

    @torch.no_grad()
    def gather(self) -> None:
        """Bring every rank's rows into the whole parameters. Collective; may raise RankLost."""
        for bucket in self._buckets:
            own = bucket[0].own
            length = sum(share.chunk for share in bucket)
            given = torch.zeros(length, dtype=own.dtype, device=own.device)
            for share, start in _placed(bucket):
                given[start : start + share.own.numel()] = share.own.reshape(-1)
            rows_of_all = given.new_empty(self._world.size, length)
            self._world.all_gather(rows_of_all, given, "parameters")
            for share, start in _placed(bucket):
                part = rows_of_all[:, start : start + share.chunk]
                _collect(part, share.parameter.detach())


def _share(parameter: nn.Parameter, world: World) -> Share:
    if not parameter.is_contiguous():
        parameter.data = parameter.data.contiguous()
    rows = _rows(parameter)
    height = -(-rows // world.size)
    start = min(world.rank * height, rows)
    whole = parameter.detach() if parameter.ndim else parameter.detach().view(1)
    own = nn.Parameter(whole[start : start + height], requires_grad=False)
    return Share(parameter, own, height)


def _rows(parameter: Tensor) -> int:
    return parameter.shape[0] if parameter.ndim else 1


def _buckets(shares: Sequence[Share], limit: int) -> Iterator[list[Share]]:
    """Group consecutive shares of one data type and device, up to `limit` bytes of a rank."""
    bucket: list[Share] = []
    size = 0
    for share in shares:
        kind = (share.parameter.dtype, share.parameter.device)
        nbytes = share.chunk * share.parameter.itemsize
        if bucket:
            last = bucket[-1].parameter
            if (last.dtype, last.device) != kind or size + nbytes > limit:
                yield bucket
                bucket, size = [], 0
        bucket.append(share)
        size += nbytes
    if bucket:
        yield bucket


def _placed(bucket: Sequence[Share]) -> Iterator[tuple[Share, int]]:
    """Yield each share, and where it begins in a rank's part of the bucket."""
    start = 0
    for share in bucket:
        yield share, start
        start += share.chunk


def _deal(whole: Tensor, parts: Tensor) -> None:
    """Copy a tensor into `[size, chunk]` parts, a row for each rank; the excess is untouched."""
    flat = whole.reshape(-1)
    full, rest = divmod(flat.numel(), parts.shape[1])
    parts[:full] = flat[: full * parts.shape[1]].view(full, -1)
    if rest:
        parts[full, :rest] = flat[full * parts.shape[1] :]


def _collect(parts: Tensor, whole: Tensor) -> None:
    flat = whole.view(-1)
    full, rest = divmod(flat.numel(), parts.shape[1])
    flat[: full * parts.shape[1]].view(full, -1).copy_(parts[:full])
    if rest:
        flat[full * parts.shape[1] :] = parts[full, :rest]
