"""DAPO (arXiv 2503.14476, eq. 8): GRPO with clip-higher, the token-level loss and overlong shaping.

    A_i  = (r_i - mean(r)) / (std(r) + 1e-6)
    loss = -min(u A, clip(u, 1 - 0.2, 1 + 0.28) A),  u = p / b        over the step's tokens

These are GRPO's equations with DAPO's defaults: `proximal_policy: behaviour`, `clip_ratio_high:
0.28`, `loss_normalization: token`. Overlong shaping (eq. 13) is `trainer.overlong_buffer`, for any
algorithm (`asyncrl.trainer.algorithms.overlong`), and dynamic sampling, for any algorithm too,
is `scheduler.dynamic_sampling`: without it groups without signal are counted and reported, and take
part in the denominator. Empty batch: loss 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.trainer.algorithms.grpo import Grpo


@dataclass(frozen=True, slots=True)
class Dapo(Grpo):
    """GRPO with the defaults that `asyncrl.trainer.base.algorithm_registry` has for `dapo`."""
