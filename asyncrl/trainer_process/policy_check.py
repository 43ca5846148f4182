"""Compares each generator's log-probabilities with the trainer's before they are trained on.

    accumulate ─► add: sums by generator, its most suspicious trajectories
    before the optimizer step ─► findings: generators newly beyond what rounding explains, and why

Bits of weights do not show a wrong temperature, KV of older weights, or a kernel that reads other
memory. Log-probabilities do. Only trajectories that are wholly of the trainer's version count:
tokens on KV of several versions follow no policy, which `on_update: keep` allows.

`explain` finds the policy that an engine sampled from by scoring its tokens under candidates. That
is slow, and needs memory for another copy of the weights.
"""

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.rollout.contexts import contexts_of
from asyncrl.rollout.trajectory import FloatArray, Trajectory
from asyncrl.trainer.model.packing import PackedBatch
from asyncrl.trainer.model.policy import Policy
from asyncrl.trainer.objective.logprob_mismatch import (
    MIN_TOKENS,
    Disagreement,
    Limits,
    disagreement_of,
)
from asyncrl.trainer_process.delivery_check import WholeGroup
from asyncrl.wire.messages.data import encode_floats, encode_tokens
from asyncrl.wire.messages.from_trainer import SuspectSample, WrongPolicyFound
from asyncrl.wire.records.wrong_policy import Cause, WrongPolicy
from asyncrl.wire.weights.writer import WeightPublisher

_NEWTON_STEPS = 6
_MAX_FACTOR = 100.0
"""Search range of temperatures, as a factor in both directions."""
_SUSPECTS = 4
_EXPLAINED = 2
"""Generators whose cause is investigated in a step: each takes about ten forward passes over its
suspects and two copies of the weights, and many generators mostly share one cause."""
PROVISIONAL_STEPS = 20
"""`provisional_steps` of `PolicyCheck`, with engines or trainer on GPUs."""
_MAX_SUSPECT_TOKENS = 1 << 17
"""Bound of tokens sent to the controller, 16 bytes each: 2 of the 16 MiB of a message."""


def explain(
    policy: Policy,
    trajectories: Sequence[Trajectory],
    limits: Limits,
    *,
    previous: Sequence[tuple[str, Tensor]],
    version: int,
) -> tuple[Cause, str] | None:
    """Find the policy that the tokens follow: another temperature, or the previous version.

    `trajectories` are suspicious ones, wholly of this version; `limits` say what rounding explains.
    `previous` are the previous version's weights by HF name, perhaps empty. Returns the cause, and
    words that continue a sentence about the generator; None if neither explains the tokens.
    """
    own = rescored(policy, trajectories).mean
    # An explanation leaves rounding only, and not much of what there was to explain.
    good = limits.mean if own <= limits.mean else min(limits.mean, own / 2)
    temperature = _temperature(policy, trajectories)
    at_that = rescored(policy, trajectories, temperature=temperature)
    if at_that.mean <= good:
        text = (
            f"it samples at temperature {temperature:.3g} instead of {policy.temperature:.3g}: "
            f"there the log-probabilities agree within {at_that.mean:.2g}"
        )
        return "temperature", text
    if previous:
        before = rescored(policy, trajectories, weights=previous)
        if before.mean <= good:
            text = (
                f"its tokens follow version {version - 1}, one step behind: with those weights the "
                f"log-probabilities agree within {before.mean:.2g}"
            )
            return "lag", text
    return None


@torch.no_grad()
def rescored(
    policy: Policy,
    trajectories: Sequence[Trajectory],
    *,
    temperature: float | None = None,
    weights: Sequence[tuple[str, Tensor]] = (),
) -> Disagreement:
    """Compare the recorded log-probabilities with those of a changed policy.

    The policy is restored afterwards. `weights` are by HF name; by default it keeps its own.
    """
    found = Disagreement()
    with policy.changed(temperature, weights):
        for one in trajectories:
            scores = policy.score(_packed(policy, one))
            rows = disagreement_of(scores.logprobs, scores.entropy, [one], np.ones(1, bool))
            found += Disagreement.total(rows)
    return found


@torch.no_grad()
def logprobs_of(policy: Policy, trajectories: Sequence[Trajectory]) -> list[FloatArray]:
    """The policy's log-probabilities of each trajectory's trained tokens, in nats."""
    scores = (policy.score(_packed(policy, one)) for one in trajectories)
    return [one.logprobs.float().cpu().numpy() for one in scores]


def _packed(policy: Policy, trajectory: Trajectory) -> PackedBatch:
    """Pack one trajectory: several together may exceed a micro-batch that fits into memory."""
    return PackedBatch.of_samples([trajectory], policy.device)


def _temperature(policy: Policy, trajectories: Sequence[Trajectory]) -> float:
    """Fit the temperature of the recorded log-probabilities by Newton's method."""
    low, high = policy.temperature / _MAX_FACTOR, policy.temperature * _MAX_FACTOR
    temperature = policy.temperature
    for _ in range(_NEWTON_STEPS):
        slope = rescored(policy, trajectories, temperature=temperature).slope
        temperature = min(high, max(low, temperature * math.exp(slope)))
    return temperature


@dataclass(slots=True)
class _Record:
    sums: Disagreement = field(default_factory=Disagreement)
    worst: list[tuple[float, int, Trajectory]] = field(default_factory=list)
    """A heap: mean difference, a number that orders equal ones, the trajectory."""


class PolicyCheck:
    """Judges generators by their tokens of a step, or of several until there are MIN_TOKENS.

    Until then the last finding of a generator holds. `limits` are of rounding; `publisher` has the
    previous version's weights. In the first `provisional_steps` a finding without a known cause is
    only a warning: the rounding of these GPUs is unknown. If it persists, it is found again.
    """

    def __init__(
        self,
        limits: Limits,
        policy: Policy,
        publisher: WeightPublisher,
        *,
        provisional_steps: int = 0,
    ) -> None:
        self._provisional_steps = provisional_steps
        self._was_provisional = False
        self._limits = limits
        self._policy = policy
        self._publisher = publisher
        self._unread: list[tuple[WholeGroup, Tensor]] = []
        self._records: dict[str, _Record] = {}
        self._disagreed: set[str] = set()
        """Generators beyond the limits when they were last judged."""
        self._of_step: set[str] = set()
        self.follows = True
        """True if no generator of the last judged step is beyond the limits."""
        self._count = 0

    def add(self, group: WholeGroup, rows: Tensor) -> None:
        """Note the `[G, SUMS]` disagreement of a group's trajectories, which is read later."""
        self._unread.append((group, rows))

    def _read(self) -> None:
        """Read the noted rows in one transfer from the device."""
        unread, self._unread = self._unread, []
        if not unread:
            return
        read = torch.cat([rows for _, rows in unread]).cpu().numpy()
        start = 0
        for group, rows in unread:
            self._add(group, read[start : start + len(rows)])
            start += len(rows)

    def _add(self, group: WholeGroup, rows: NDArray[np.float64]) -> None:
        self._of_step.update(group.generators)
        for name, trajectory, row in zip(group.generators, group.trajectories, rows, strict=True):
            found = Disagreement(*row.tolist())
            if not found.tokens:
                continue
            record = self._records.setdefault(name, _Record())
            record.sums += found
            self._count += 1
            entry = (found.mean, self._count, trajectory)
            push = heapq.heappushpop if len(record.worst) == _SUSPECTS else heapq.heappush
            push(record.worst, entry)

    def findings(self, version: int) -> list[WrongPolicyFound]:
        """Return generators that newly deviate from the trainer's policy, and forget the step.

        Slow if there is one. A generator is found again after it has agreed.
        """
        self._read()
        is_provisional = version < self._provisional_steps
        if self._was_provisional and not is_provisional:
            self._disagreed.clear()
        self._was_provisional = is_provisional
        wrong = {n: one for n, one in self._records.items() if self._limits.exceeded_by(one.sums)}
        new = sorted(wrong.keys() - self._disagreed, key=lambda n: (-wrong[n].sums.mean, n))
        found = [
            self._explained(name, wrong[name], version, look=place < _EXPLAINED)
            for place, name in enumerate(new)
        ]
        if is_provisional:
            change = msgspec.structs.replace
            found = [change(one, provisional=one.found.cause == "unknown") for one in found]
        judged = {n for n, record in self._records.items() if record.sums.tokens >= MIN_TOKENS}
        self._disagreed -= judged
        self._disagreed.update(wrong)
        self.follows = self._disagreed.isdisjoint(self._of_step)
        self._of_step.clear()
        # Too few tokens are added to those of the next step. Its suspects are of its own version.
        few = {n: one.sums for n, one in self._records.items() if one.sums.tokens < MIN_TOKENS}
        self._records = {name: _Record(sums) for name, sums in few.items()}
        return found

    def _explained(
        self, generator: str, record: _Record, version: int, *, look: bool
    ) -> WrongPolicyFound:
        sums = record.sums
        suspects = [trajectory for _, _, trajectory in sorted(record.worst, reverse=True)]
        text = (
            f"the log-probabilities of {generator} are not those of version {version}: over "
            f"{sums.tokens:.0f} tokens they differ from the trainer's {_how(sums, self._limits)}"
        )
        wrong = WrongPolicy("unknown", generator, version, text)
        if not look:
            return _unexplained(wrong, f"was not investigated, since {_EXPLAINED} others are worse")
        if self._policy.is_sharded:
            return _unexplained(
                wrong, "was not investigated: no rank can compute alone with trainer.sharding: full"
            )
        try:
            return self._with_cause(wrong, suspects)
        except RuntimeError as error:  # mostly out of memory; the finding holds without a cause
            return _unexplained(wrong, f"could not be investigated: {error}")

    def _with_cause(self, wrong: WrongPolicy, suspects: list[Trajectory]) -> WrongPolicyFound:
        version = wrong.policy_version
        previous = self._publisher.tensors_of(version - 1)
        known = explain(self._policy, suspects, self._limits, previous=previous, version=version)
        if known is not None:
            text = f"{wrong.text}; {known[1]}"
            return WrongPolicyFound(msgspec.structs.replace(wrong, cause=known[0], text=text))
        samples = _to_send(self._policy, suspects)
        if not samples:
            return _unexplained(wrong, "is unknown: the samples are too long to be scored again")
        return WrongPolicyFound(wrong, limit=self._limits.mean, samples=samples)


def _how(sums: Disagreement, limits: Limits) -> str:
    """Describe the difference and the limit: the mean, or the slope if only that is too large."""
    if sums.mean > limits.mean:
        return f"by {sums.mean:.2g} nats on average (rounding explains {limits.mean:g})"
    off = 100 * abs(math.expm1(sums.slope))
    return f"as at a temperature that is {off:.2g}% off (rounding explains {100 * limits.slope:g}%)"


def _unexplained(wrong: WrongPolicy, why: str) -> WrongPolicyFound:
    return WrongPolicyFound(msgspec.structs.replace(wrong, text=f"{wrong.text}; the cause {why}"))


def _to_send(policy: Policy, suspects: list[Trajectory]) -> tuple[SuspectSample, ...]:
    """The most suspicious samples, within bounds, with the trainer's log-probabilities."""
    chosen: list[Trajectory] = []
    room = _MAX_SUSPECT_TOKENS
    for one in suspects:
        tokens = len(one.prompt_tokens) + len(one.tokens)
        if tokens <= room:
            room -= tokens
            chosen.append(one)
    pairs = zip(chosen, logprobs_of(policy, chosen), strict=True)
    return tuple(context for one, expected in pairs for context in _contexts(one, expected))


def _contexts(one: Trajectory, expected: FloatArray) -> Iterator[SuspectSample]:
    whole = np.zeros(len(one.tokens), np.float32)
    whole[one.trained] = expected
    for context in contexts_of(one):
        place = slice(context.start, context.start + len(context.response))
        observed = ~context.trained
        yield SuspectSample(
            prompt_tokens=encode_tokens(context.prompt),
            tokens=encode_tokens(context.response),
            recorded=encode_floats(one.behaviour_logprobs[place]),
            expected=encode_floats(whole[place]),
            observed=observed.astype(np.uint8).tobytes() if observed.any() else b"",
        )
