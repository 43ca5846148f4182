"""GRPO (arXiv 2402.03300), with the options of DAPO (2503.14476) and Dr. GRPO (2503.20783).

Advantage of sample i of a group with rewards r (outcome supervision, GRPO section 4.1.2):

    A_i = (r_i - mean(r)) / (std(r) + 1e-6)        advantage_normalization: std (std with G - 1)
    A_i =  r_i - mean(r)                           advantage_normalization: none (Dr. GRPO, eq. 3)

Loss of a token with current probability p, behaviour probability b (with which the engine drew it)
and proximal probability x, in the decoupled form (arXiv 2110.00641, eq. 6; AReaL, 2505.24298, eq.
5) with clip-higher (DAPO, eq. 8):

    w = correction of sg(x) / b        u = p / sg(x)
    loss = -w * min(u * A, clip(u, 1 - low, 1 + high) * A)

- `proximal_policy: current` (default): x is the policy of the step's start, which AReaL recomputes
  before each step. In the first optimizer step of a step, by default the only one, x = p: u = 1 and
  the gradient is -w A grad log p, by default truncated importance sampling towards the newest
  policy, w = min(p / b, cap). Nothing is clipped, and `clip_ratio_*` have no effect. On-policy (b =
  p) this is the plain policy gradient.
- `proximal_policy: behaviour`: x = b. Then w = 1, and u = p / b is PPO's clipped ratio against the
  policy that drew the token, as in GRPO's eq. 3 and DAPO's eq. 8. Clipped tokens have no gradient.
  `dual_clip`, by default off, bounds the loss for A < 0 (arXiv 1912.09729, eq. 5), which those
  papers do not. Only what the correction leaves out has an effect.

Both agree to first order when p and b are close. Empty batch: loss 0.

**DAPO** (eq. 8) is GRPO with other defaults: `proximal_policy: behaviour`, `clip_ratio_high: 0.28`,
`loss_normalization: token`:

    A_i  = (r_i - mean(r)) / (std(r) + 1e-6)
    loss = -min(u A, clip(u, 1 - 0.2, 1 + 0.28) A),  u = p / b        over the step's tokens

Its overlong shaping (eq. 13) is `trainer.overlong_buffer` (`asyncrl.trainer.loss`) and its dynamic
sampling `scheduler.dynamic_sampling`, both for any algorithm. Without the latter, groups without
signal are counted, reported, and part of the denominator.

**Dr. GRPO** (section 3.2 and eq. 3) is GRPO without its two biases:

    A_i  = r_i - mean(r)                 no division by the group's standard deviation
    loss = sum over a sample's tokens    no division by its length

The paper's denominator is samples times a constant, the longest response. `loss_normalization:
sample`, the default here, divides by samples; the constant belongs to the learning rate (AdamW
ignores it). On-policy the gradient is (G - 1) / G times an unbiased one.
"""

from dataclasses import dataclass
from typing import Self

from asyncrl.trainer.algorithms.base import Rewards, centred, per_group_std
from asyncrl.trainer.algorithms.losses import Clipped
from asyncrl.trainer.base.config import TrainerConfig


@dataclass(frozen=True, slots=True)
class Grpo(Clipped):
    """Group-relative advantages and the decoupled clipped loss."""

    normalize_std: bool

    @classmethod
    def from_config(cls, config: TrainerConfig) -> Self:
        """Create it from the trainer's settings."""
        settings = cls.settings_of(config)
        return cls(normalize_std=config.advantage_normalization == "std", **settings)

    def advantages(self, rewards: Rewards) -> Rewards:
        """`[G]` group-relative advantages, 0 if rewards are equal. Raises ValueError if G < 2."""
        return per_group_std(rewards) if self.normalize_std else centred(rewards)


@dataclass(frozen=True, slots=True)
class Dapo(Grpo):
    """GRPO with the defaults that `asyncrl.trainer.base.algorithm_registry` has for `dapo`."""


@dataclass(frozen=True, slots=True)
class DrGrpo(Grpo):
    """GRPO, for which `asyncrl.trainer.base.config` refuses `advantage_normalization: std`."""
