"""Per-token targets, frozen when their group arrives, before the step changes any weight.

```
rewards, critic's values, k1 ─► advantages, returns
policy of the step's start   ─► proximal log-probabilities
reference                    ─► reference log-probabilities
```

A single pass over the step uses them at once; several passes keep them with the group.

Advantages are estimated by GAE (arXiv 1506.02438, eq. 11-16), in float64. For a sample of L trained
tokens with reward r[t] of token t, and V[t] the critic's value of the state in which token t was
drawn (prompt and the tokens before it, observed ones included):

    delta[t] = r[t] + gamma V[t+1] - V[t]
    A[t]     = delta[t] + gamma lambda A[t+1]            A[L] = 0
    return   = A[t] + V[t]                               what V[t] is trained towards

V[L], after the last token, is 0, or the critic's value if a cut-off response is bootstrapped.

    >>> rewards, values, lengths = np.array([0.0, 1.0]), np.array([0.5, 0.25]), np.array([2])
    >>> advantages, returns = advantages_of(rewards, values, lengths, gae_lambda=0.5)
    >>> advantages.tolist(), returns.tolist()
    ([0.125, 0.75], [0.625, 1.0])
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.rollout.trajectory import Trajectory
from asyncrl.trainer.algorithms.base import Rewards, sums_to_go
from asyncrl.trainer.base.config import CriticConfig
from asyncrl.trainer.critic import Values
from asyncrl.trainer.ranks import World

Floats = NDArray[np.float64]


def advantages_of(
    rewards: Floats,
    values: Floats,
    lengths: NDArray[np.int64],
    last_values: Floats | None = None,
    *,
    gamma: float = 1.0,
    gae_lambda: float = 0.95,
) -> tuple[Floats, Floats]:
    """Return the advantages and value targets `[N]` of B samples that lie one after another.

    `rewards` and `values` `[N]` are of each token and of the state before it; `lengths` `[B]`, at
    least 1, sum to N. `last_values` `[B]` are of the state after each sample, by default 0.
    """
    count, longest = len(lengths), int(lengths.max(initial=0))
    filled = np.arange(longest)[None, :] < lengths[:, None]
    # Right-aligned, so that all samples end in the last column and no step looks at padding.
    filled = filled[:, ::-1]
    reward, value = np.zeros((count, longest)), np.zeros((count, longest))
    reward[filled], value[filled] = rewards, values
    after = np.zeros(count) if last_values is None else np.asarray(last_values, np.float64)
    running, out = np.zeros(count), np.zeros((count, longest))
    for at in range(longest - 1, -1, -1):
        delta = reward[:, at] + gamma * after - value[:, at]
        running = delta + gamma * gae_lambda * running
        out[:, at] = running
        after = value[:, at]
    advantages = out[filled]
    return advantages, advantages + values


def token_rewards(
    rewards: Floats, lengths: NDArray[np.int64], penalties: Floats | None = None
) -> Floats:
    """Put `[B]` rewards of samples at their last tokens, `[N]`, and subtract `[N]` penalties."""
    out = np.zeros(int(lengths.sum())) if penalties is None else -np.asarray(penalties, np.float64)
    out[np.cumsum(lengths) - 1] += rewards
    return out


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

    def split(self, lengths: Sequence[int]) -> list["StepTargets"]:
        """Split into B samples of these lengths, which lie one after another."""
        columns: list[Any] = [
            [None] * len(lengths) if one is None else one.split(list(lengths)) for one in self._all
        ]
        return [StepTargets(*row) for row in zip(*columns, strict=True)]

    @classmethod
    def of(cls, parts: Sequence[Self]) -> Self:
        """Concatenate parts in order."""
        columns: Any = zip(*(one._all for one in parts), strict=True)  # noqa: SLF001 - its own
        joined: list[Any] = [None if one[0] is None else torch.cat(one) for one in columns]
        return cls(*joined)

    @property
    def _all(self) -> tuple[Tensor | None, ...]:
        return tuple(getattr(self, one.name) for one in fields(self))


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
        penalties = None if penalty is None else _array(penalty)
        rewards, now = token_rewards(advantages, lengths, penalties), _array(values.tokens)
        last = None if values.last is None else _array(values.last)
        found, returns = advantages_of(
            rewards, now, lengths, last, gamma=config.gamma, gae_lambda=config.gae_lambda
        )
        each = torch.from_numpy(found).to(logprobs)
        wanted = torch.from_numpy(returns).to(values.tokens)
        return StepTargets(each, logprobs, reference, values.tokens.detach(), wanted)
    each = torch.from_numpy(np.repeat(advantages, lengths)).to(logprobs)
    if penalty is not None:
        owners = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths))
        each = each - sums_to_go(penalty, owners.to(logprobs.device))
    return StepTargets(each, logprobs, reference)


def normalise(fixed: Sequence[StepTargets], epsilon: float, world: World) -> None:
    """Give the advantages of a whole step mean 0 and standard deviation 1, over its tokens.

    All 0 if they differ by no more than `epsilon` of their size. Collective; may raise RankLost.
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


def _array(values: Tensor) -> Floats:
    found: Floats = values.detach().double().cpu().numpy()
    return found
