"""An algorithm is two pure functions, the tensors they take, and the signals they report.

Shapes: G samples in a group; N response tokens of one micro-batch, packed one after another. Tokens
that no policy drew (`Trajectory.trained`) are not among them, nor in any length or denominator.

An algorithm never divides. `loss` returns **sums**, and the learner divides by the step's loss
denominator, which is known only when the step's last group has arrived. Groups whose advantages are
all 0 count in the denominator, computed or not. An empty batch (N = 0) has loss 0 and all sums 0.

    loss_normalization   weight of a token   denominator
    token                1                   trained tokens of the step (DAPO, 2503.14476, eq. 8)
    sequence             1 / L               samples of the step (GRPO, 2402.03300, eq. 3)
    sample               1                   samples of the step (Dr. GRPO, 2503.20783)

L and the denominators count trained tokens alone, not those of an environment. Only `sample` is
unbiased: a sample's gradient is divided by a number that does not depend on what was drawn.

A loss may depend on numbers that only the whole step has, such as the mean of its advantages, if
its gradient is a sum of parts with such numbers as factors. `loss` then returns the further parts
in `LossSums.parts`, and `finish` returns the factors when the last group has arrived. The learner
keeps one gradient sum per part: each costs a backward pass and a gradient's memory.

Signals are an algorithm's own measurements, such as the share of clipped tokens. It declares each
once in `signals` and returns its sum with every loss; the value appears in `algorithm` of
metrics.jsonl, in `asyncrl_algorithm_signal{signal}` and in the report.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, Self, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.rollout.trajectory import CUT_OFF, FloatArray, Trajectory

Rewards = NDArray[np.float64]

STD_EPSILON = 1e-6
"""Keeps the division finite; rewards that differ by less are noise."""
Normalization = Literal["token", "sequence", "sample"]


@dataclass(frozen=True, slots=True)
class Routes:
    """Router outputs of a mixture of experts for N tokens; carries the gradient."""

    logits: tuple[Tensor, ...]
    """`[N, E]` of each layer with experts."""
    experts_per_token: int


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """N response tokens, as a loss takes them. All tensors are float and on one device."""

    logprobs: Tensor
    """`[N]` under the current policy (processed distribution); carries the gradient."""
    behaviour_logprobs: Tensor
    """`[N]` as the engine recorded them when it drew (or verified) the tokens."""
    advantages: Tensor
    """`[N]`, of the token's sample."""
    weights: Tensor
    """`[N]` 1 or 1 / L (`trainer.algorithms.base`), or 0: not in the loss nor in statistics."""
    reference_logprobs: Tensor | None = None
    """`[N]` under the reference model, without a gradient, if the algorithm needs them."""
    owners: Tensor | None = None
    """`[N]` int64 index of the token's sample in the micro-batch, from 0, never falling. Samples
    are not divided between micro-batches. None: all tokens are of one sample."""
    importance: Tensor | None = None
    """`[N]` the correction's weight, without a gradient (`asyncrl.trainer.loss`). None: 1."""
    kept: Tensor | None = None
    """`[N]` 0 where the correction leaves a token out, else 1. None: 1."""
    proximal_logprobs: Tensor | None = None
    """`[N]` under the policy of the step's start, without a gradient, for algorithms with
    `uses_proximal`. None: the current policy is that policy."""
    penalised: bool = False
    """True if `advantages` already include the penalty of `kl_estimator: k1`."""
    centre: float = 0.0
    """Estimate of the mean of the step's advantages, known when it begins. A loss normalised over
    the step subtracts it, so that its two gradient sums do not cancel (`StepSums.centre`)."""
    routes: Routes | None = None
    """Set only if the loss needs them (`trainer.router_loss_coefficient`)."""

    @property
    def samples(self) -> Tensor:
        """`[N]` int64 index of each token's sample: `owners`, or zeros."""
        if self.owners is None:
            return torch.zeros_like(self.logprobs, dtype=torch.int64)
        return self.owners


@dataclass(frozen=True, slots=True)
class Signal:
    """A number that an algorithm reports of each step."""

    help: str
    """Meaning and unit in one phrase, as in docs/monitoring.md."""
    per: Literal["token", "loss", "effective", "explained"] = "token"
    """Value computed from the sum. token: divided by the computed response tokens. loss:
    divided by the step's loss denominator. effective: the sum is `[2]`, of weights w and of their
    squares, and the value is (sum of w)^2 / (tokens * sum of w^2), the share of tokens that count
    (Kish). explained: the sum is `[4]`, of errors e, of e^2, of targets R and of R^2, and the value
    is 1 - var(e) / var(R)."""
    of_loss: bool = False
    """True if it is the algorithm's own loss, to which the step's factors (`Finish`) apply too."""

    @property
    def size(self) -> int:
        """Number of numbers in the sum."""
        return {"effective": 2, "explained": 4}.get(self.per, 1)


@dataclass(frozen=True, slots=True)
class LossSums:
    """Sums over the tokens of one micro-batch, not divided by anything."""

    loss: Tensor
    """Scalar, to be minimised: sum of weight times per-token loss."""
    sums: Mapping[str, Tensor] = field(default_factory=dict)
    """Scalar sum of every declared signal, and of no others."""
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    """Further parts of the loss by name, scalars; `finish` has their factors."""

    def plus(self, algorithm: "Algorithm", part: str, loss: Tensor) -> Self:
        """Add to the loss; as a separate part if the algorithm's factors must not change it."""
        if finisher(algorithm) is None:
            return replace(self, loss=self.loss + loss)
        return replace(self, parts={**self.parts, part: loss})


@dataclass(frozen=True, slots=True)
class StepSums:
    """The sums of a whole step, as `finish` receives them."""

    groups: int
    groups_without_signal: int
    tokens: int
    sums: Mapping[str, float]
    centre: float = 0.0


@dataclass(frozen=True, slots=True)
class Finish:
    """Factors of a step's sums: gradient = scale * loss + sum of factor * part, / denominator."""

    scale: float = 1.0
    parts: Mapping[str, float] = field(default_factory=dict)


class Algorithm(Protocol):
    """Advantages of a group, and the loss of tokens. Pure: no state, no randomness."""

    @property
    def signals(self) -> Mapping[str, Signal]:
        """Signals that `loss` reports, by name (letters, digits and `_`)."""

    @property
    def needs_reference(self) -> bool:
        """True if the loss reads `TokenBatch.reference_logprobs`; needs a second model."""

    def advantages(self, rewards: Rewards) -> Rewards:
        """Map `[G]` rewards to `[G]` advantages; all exactly 0 when all rewards are equal.

        Raises ValueError if the algorithm cannot learn from groups of this size.
        """

    def loss(self, batch: TokenBatch) -> LossSums:
        """Return the summed policy loss of a micro-batch."""


@runtime_checkable
class FinishedByStep(Protocol):
    """An algorithm whose loss has factors that are known only at the end of a step."""

    @property
    def needs_every_group(self) -> bool:
        """True if groups whose advantages are all 0 have a gradient too."""

    def finish(self, step: StepSums) -> Finish:
        """Return the factors. Pure."""


def finisher(algorithm: Algorithm) -> FinishedByStep | None:
    """The unwrapped algorithm, if its loss is finished by the step."""
    algorithm = innermost(algorithm)
    return algorithm if isinstance(algorithm, FinishedByStep) else None


def innermost(algorithm: Algorithm) -> Algorithm:
    """Unwrap an algorithm."""
    while (inner := getattr(algorithm, "algorithm", None)) is not None:
        algorithm = inner
    return algorithm


def declares(algorithm: Algorithm, name: str) -> bool:
    """Return True if the algorithm declares a property that is False by default.

    `needs_critic`: advantages are made of a critic's values. `needs_every_group`: groups whose
    advantages are all 0 have a gradient too. `uses_proximal`: the loss reads
    `TokenBatch.proximal_logprobs`. `compares_samples`: a user's class needs unequal rewards.
    """
    return bool(getattr(innermost(algorithm), name, False))


@dataclass(frozen=True, slots=True)
class Wrapper:
    """An algorithm around another one, which computes the advantages."""

    algorithm: Algorithm

    @property
    def needs_reference(self) -> bool:
        """True if the inner algorithm needs it."""
        return self.algorithm.needs_reference

    def advantages(self, rewards: Rewards) -> Rewards:
        """`[G]` advantages of the inner algorithm."""
        return self.algorithm.advantages(rewards)


def centred(rewards: Rewards) -> Rewards:
    """`[G]` rewards minus their mean; exactly 0 when all are equal. Raises ValueError if G < 2."""
    if len(rewards) < 2:
        raise ValueError("the baseline is the mean, so scheduler.group_size must be at least 2")
    if np.ptp(rewards) == 0:
        return np.zeros_like(rewards, np.float64)
    return np.asarray(rewards - rewards.mean(), np.float64)


def per_group_std(rewards: Rewards) -> Rewards:
    """`[G]` rewards minus their mean, over (their standard deviation with G - 1, plus 1e-6).

    GRPO, arXiv 2402.03300, section 4.1.2. Exactly 0 when all are equal. Raises ValueError if G < 2.
    """
    out = centred(rewards)
    return out / (np.std(rewards, ddof=1) + STD_EPSILON) if out.any() else out


def leave_one_out(rewards: Rewards) -> Rewards:
    """`[G]` each reward minus the mean of the others. Raises ValueError if G < 2."""
    size = len(rewards)
    return centred(rewards) * (size / (size - 1))


def sample_sums(values: Tensor, owners: Tensor) -> Tensor:
    """Replace each of `[N]` values by the sum over its sample. Keeps gradients."""
    return values.new_zeros(len(values)).index_add(0, owners, values)[owners]


def sample_means(values: Tensor, owners: Tensor) -> Tensor:
    """Replace each of `[N]` values by the mean over its sample. Keeps gradients."""
    return sample_sums(values, owners) / sample_sums(torch.ones_like(values), owners)


def sums_to_go(values: Tensor, owners: Tensor) -> Tensor:
    """Replace each of `[N]` values by the sum over its token and those after it in its sample."""
    whole = values.double()
    up_to = whole.cumsum(0)
    ends = whole.new_zeros(len(values)).index_add(0, owners, whole).cumsum(0)[owners]
    return (ends - up_to + whole).to(values.dtype)


def to_device(data: NDArray[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Copy data to the device without making the host wait for it.

    A copy to a GPU from pageable memory returns when everything queued before it has been computed.
    From pinned memory it is one more entry of the device's queue.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(data))
    if dtype is not None:
        tensor = tensor.to(dtype)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def denominator(kind: Normalization, *, tokens: int, samples: int) -> float:
    """Loss denominator of a step, at least 1."""
    return float(max(1, tokens if kind == "token" else samples))


def token_batch(
    logprobs: Tensor,
    trajectories: Sequence[Trajectory],
    advantages: Rewards,
    normalization: Normalization,
    *,
    masks_truncated: bool = False,
) -> TokenBatch:
    """Build a batch of B trajectories from `[N]` log-probabilities and `[B]` advantages.

    N tokens are trained; observed ones (`Trajectory.trained`) count nowhere.
    """
    lengths = np.array([t.trained_count for t in trajectories])

    def put(values: NDArray[Any]) -> Tensor:
        return to_device(values, logprobs.device, logprobs.dtype)

    owners = np.repeat(np.arange(len(lengths)), lengths)
    return TokenBatch(
        logprobs=logprobs,
        behaviour_logprobs=put(behaviour_logprobs_of(trajectories)),
        advantages=put(np.repeat(advantages, lengths)),
        weights=put(weights_of(trajectories, normalization, masks_truncated=masks_truncated)),
        owners=to_device(owners, logprobs.device),
    )


def weights_of(
    trajectories: Sequence[Trajectory], normalization: Normalization, *, masks_truncated: bool
) -> NDArray[np.float64]:
    """`[N]` weights of the trained tokens; `masks_truncated` gives cut-off samples weight 0."""
    lengths = np.array([t.trained_count for t in trajectories])
    weights = 1.0 / lengths if normalization == "sequence" else np.ones(len(lengths))
    if masks_truncated:
        weights = weights * [one.finish_reason not in CUT_OFF for one in trajectories]
    return np.repeat(weights, lengths)


def behaviour_logprobs_of(trajectories: Sequence[Trajectory]) -> FloatArray:
    """`[N]` of the trained tokens, as the engine recorded them."""
    return np.concatenate([one.behaviour_logprobs[one.trained] for one in trajectories])
