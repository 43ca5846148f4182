"""Per-token targets, frozen when their group arrives, before the step changes any weight.

```
rewards, critic's values, k1 ─► advantages, returns
policy of the step's start   ─► proximal log-probabilities
reference                    ─► reference log-probabilities
```

A single pass over the step uses them at once; several passes keep them with the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.rollout.trajectory import Trajectory
from asyncrl.trainer.algorithms.base import Rewards, sums_to_go
from asyncrl.trainer.base.critic_config import CriticConfig
from asyncrl.trainer.critic import Values
from asyncrl.trainer.objective.gae import advantages_of, token_rewards
from asyncrl.trainer.ranks import World


@dataclass(slots=True)
class StepTargets:
    """Targets of the N response tokens of a micro-batch or sample, on its device, gradient-free."""

    advantages: Tensor
    """`[N]`; `normalise` changes them."""
    proximal_logprobs: Tensor
    """`[N]` under the policy of the step's start."""
    reference_logprobs: Tensor | None = None
    values: Tensor | None = None
    """`[N]`, at the step's start, if there is a critic."""
    returns: Tensor | None = None
    """`[N]`, if there is a critic."""

    def split(self, lengths: Sequence[int]) -> list[StepTargets]:
        """Split into B samples of these lengths, which lie one after another."""
        rows: list[list[Tensor | None]] = [[] for _ in lengths]
        for one in self._all:
            pieces = [None] * len(lengths) if one is None else one.split(list(lengths))
            for row, piece in zip(rows, pieces, strict=True):
                row.append(piece)
        return [_made_of(row) for row in rows]

    @classmethod
    def of(cls, parts: Sequence[StepTargets]) -> StepTargets:
        """Concatenate parts in order."""
        columns = zip(*(one._all for one in parts), strict=True)  # noqa: SLF001 - its own
        return _made_of([None if column[0] is None else torch.cat(column) for column in columns])

    @property
    def _all(self) -> tuple[Tensor | None, ...]:
        return (
            self.advantages,
            self.proximal_logprobs,
            self.reference_logprobs,
            self.values,
            self.returns,
        )


def fix(
    trajectories: Sequence[Trajectory],
    advantages: Rewards,
    logprobs: Tensor,
    reference: Tensor | None,
    penalty: Tensor | None,
    values: Values | None,
    config: CriticConfig,
) -> StepTargets:
    """Freeze the targets of the `[N]` tokens of B samples.

    With a critic, `advantages` `[B]` are rewards. k1 subtracts `penalty` from each token's reward.
    """
    lengths = np.array([one.trained_count for one in trajectories], np.int64)
    logprobs = logprobs.detach()
    if values is not None:
        found = advantages_of(
            token_rewards(advantages, lengths, None if penalty is None else _array(penalty)),
            _array(values.tokens),
            lengths,
            None if values.last is None else _array(values.last),
            gamma=config.gamma,
            gae_lambda=config.gae_lambda,
        )
        return StepTargets(
            torch.from_numpy(found.advantages).to(logprobs),
            logprobs,
            reference,
            values.tokens.detach(),
            torch.from_numpy(found.returns).to(values.tokens),
        )
    each = torch.from_numpy(np.repeat(advantages, lengths)).to(logprobs)
    if penalty is not None:
        owners = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths))
        each = each - sums_to_go(penalty, owners.to(logprobs.device))
    return StepTargets(each, logprobs, reference)


def normalise(fixed: Sequence[StepTargets], epsilon: float, world: World) -> None:
    """Give the advantages of a whole step mean 0 and standard deviation 1, over its tokens.

    All 0 if they differ by no more than `epsilon` of their size. The step is that of all ranks: a
    collective, which may raise RankLost.
    """
    raw = torch.cat([one.advantages for one in fixed]).double() if fixed else torch.zeros(0)
    count, total = _over_ranks(world, len(raw), float(raw.sum()))
    mean = total / max(count, 1)
    (squares,) = _over_ranks(world, float((raw - mean).square().sum()))
    std = (squares / max(count, 1)) ** 0.5
    factor = 0.0 if std <= epsilon * max(1.0, abs(mean)) else 1 / std
    for one in fixed:
        out = (one.advantages.double() - mean) * factor
        one.advantages = out.to(one.advantages.dtype)


def _over_ranks(world: World, *values: float) -> list[float]:
    found = world.gather(msgspec.msgpack.encode(values), "the moments of the advantages")
    ranks = [msgspec.msgpack.decode(one, type=list[float]) for one in found]
    return [sum(column) for column in zip(*ranks, strict=True)]


def _made_of(columns: Sequence[Tensor | None]) -> StepTargets:
    advantages, proximal, *rest = columns
    assert advantages is not None and proximal is not None  # noqa: S101, PT018 - always there
    return StepTargets(advantages, proximal, *rest)


def _array(values: Tensor) -> NDArray[np.float64]:
    found: NDArray[np.float64] = values.detach().double().cpu().numpy()
    return found
