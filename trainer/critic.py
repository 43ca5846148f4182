"""A critic: the value of each state of a response, and how it is trained.

```
prompt, tokens ─► trunk ─► hidden [N, C] ─► head [C] ─► values [N]
```

The trunk is a separate language model, by default a copy of the initial policy, or the policy's
(`critic.shared_trunk`). A token's state is the prompt and the tokens before it; its hidden state is
the one that predicts the token. The head starts at 0, so all values do.

With the value V of a token's state now, V_old its value when the step began, and its return R:

    loss = 1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2)

as in PPO's reference implementation (arXiv 1707.06347; c is `critic.value_clip`). In the first
optimizer step of a step V = V_old: the squared error. Tokens have the weights of the policy's loss.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from asyncrl.rollout.trajectory import CUT_OFF, Trajectory
from asyncrl.trainer.algorithms.base import LossSums, Signal
from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.trainer.base.errors import UnsupportedModelError
from asyncrl.trainer.model.packing import PackedBatch
from asyncrl.trainer.model.policy import Policy
from asyncrl.trainer.optimizer.optimizer import Update
from asyncrl.trainer.ranks import World

SIGNALS: Mapping[str, Signal] = {
    "value_loss": Signal("half the squared error of the critic's values, clipped", per="loss"),
    "value_clipped": Signal(
        "share of tokens whose value has no gradient because `critic.value_clip` was reached"
    ),
    "explained_variance": Signal(
        "share of the returns' variance that the critic's values of the step's start explain",
        per="explained",
    ),
}


def value_loss(
    values: Tensor, old: Tensor, returns: Tensor, weights: Tensor, clip: float | None
) -> LossSums:
    """Summed loss and `SIGNALS` of `[N]` tokens; `old` values are of the step's start."""
    plain = (values - returns).square()
    worst, clipped = plain, torch.zeros_like(plain, dtype=torch.bool)
    if clip is not None:
        near = old + (values - old).clamp(-clip, clip)
        moved = (near - returns).square()
        worst = torch.maximum(plain, moved)
        beyond = (values - old).abs() > clip  # else they differ by rounding
        clipped = ((moved > plain) & beyond).detach() & (weights != 0)
    loss = 0.5 * (weights * worst).sum()
    error, target = (returns - old).double(), returns.double()
    moments = (error.sum(), error.square().sum(), target.sum(), target.square().sum())
    sums = {"value_loss": loss.detach(), "value_clipped": clipped.sum()}
    return LossSums(loss, {**sums, "explained_variance": torch.stack(moments)})


@dataclass(frozen=True, slots=True)
class Values:
    """Values of the states of a micro-batch of B samples and N response tokens."""

    tokens: Tensor
    """`[N]` of the state before each token; carries the gradient."""
    last: Tensor | None
    """`[B]` of the state after the last token, gradient-free; 0 where the sample ended; None: 0."""


class Critic:
    """Attributes: `module`, whose parameters are the critic's own; `update`; `config`.

    `policy` supplies the hidden states with `shared_trunk`; otherwise `load` loads the trunk.
    Raises UnsupportedModelError if the value model cannot be loaded or has a smaller vocabulary
    than the policy, or the policy's hidden states are not available.
    """

    def __init__(
        self,
        config: TrainerConfig,
        model_path: str,
        policy: Policy,
        load: Callable[[str], Policy],
        world: World,
    ) -> None:
        self.config = config.critic
        self.bootstraps = config.critic.truncated == "bootstrap"
        """True if the state after a cut-off response has a value."""
        self._max_grad_norm = config.max_grad_norm
        if self.config.shared_trunk and not policy.has_plain_head:
            raise UnsupportedModelError(
                f"{model_path} scales its logits, so its hidden states cannot be shared with a "
                "critic; set trainer.critic.shared_trunk: false"
            )
        self._trunk = policy if self.config.shared_trunk else load(self.config.model or model_path)
        if self._trunk.vocab_size < policy.vocab_size:
            raise UnsupportedModelError(
                f"trainer.critic.model: {self.config.model} has a vocabulary of "
                f"{self._trunk.vocab_size} tokens, smaller than the policy's {policy.vocab_size}; "
                "the value model must know every token that the policy may draw"
            )
        parameter = next(self._trunk.model.parameters())
        size = self._trunk.hidden_size
        self._head = nn.Linear(size, 1, dtype=parameter.dtype, device=parameter.device)
        nn.init.zeros_(self._head.weight)
        nn.init.zeros_(self._head.bias)
        modules: dict[str, nn.Module] = {"head": self._head}
        if not self.config.shared_trunk:
            modules["trunk"] = self._trunk.trunk
            self._trunk.model.requires_grad_(requires_grad=False)
        self.module = nn.ModuleDict(modules)
        self.module.requires_grad_(requires_grad=True)
        self.update = Update(self.module, config, world)

    def values(self, trajectories: Sequence[Trajectory]) -> Values:
        """Compute values of a critic with its own trunk."""
        states = self.states(trajectories)
        return self.of_hidden(self._trunk.hidden(states), trajectories)

    def states(self, trajectories: Sequence[Trajectory]) -> PackedBatch:
        """Pack the samples. To bootstrap, each gets one more token, which nothing reads."""
        return PackedBatch.of_samples(trajectories, self._trunk.device, one_more=self.bootstraps)

    def of_hidden(self, hidden: Tensor, trajectories: Sequence[Trajectory]) -> Values:
        """Compute values from the hidden states of `states`."""
        with torch.autocast(hidden.device.type, enabled=False):
            values = self._head(hidden.to(self._head.weight.dtype))[:, 0]
        if not self.bootstraps:
            return Values(values, None)
        drawn = real_tokens(trajectories).to(values.device)
        cut = [one.finish_reason in CUT_OFF for one in trajectories]
        last = values[~drawn].detach() * torch.tensor(cut, device=values.device)
        return Values(values[drawn], last)

    def step(self, version: int, denominator: float) -> float:
        """Divide, clip and apply AdamW; return the gradient's norm before clipping. Collective.

        Raises NonFiniteError if the gradient is not finite; the critic is unchanged.
        """
        return self.update.step(self.config.rate_at(version), denominator, self._max_grad_norm)


def real_tokens(trajectories: Sequence[Trajectory]) -> Tensor:
    """`[N + B]` bool: False for the additional token of each sample (`Critic.states`)."""
    ends = np.cumsum([one.trained_count + 1 for one in trajectories]) - 1
    drawn = torch.ones(int(ends[-1]) + 1, dtype=torch.bool)
    drawn[torch.from_numpy(ends)] = False
    return drawn
