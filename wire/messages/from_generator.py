"""Generator to controller."""

from typing import Annotated

import msgspec

from asyncrl.rollout.trajectory import FinishReason, SampleId
from asyncrl.wire.messages.data import DIGEST_BYTES
from asyncrl.wire.records.evaluations import Verdict
from asyncrl.wire.records.noise_floor import NoiseFloor
from asyncrl.wire.records.reward_counts import RewardCounts, RewardWait
from asyncrl.wire.records.step import EngineStats, EnvironmentCounts
from asyncrl.wire.records.wrong_policy import WrongPolicy
from asyncrl.wire.transport.decoding import Amount, Count, Finite
from asyncrl.wire.weights.layout import Fingerprint


class Message(msgspec.Struct, frozen=True, tag=lambda name: f"generator.{name}"):
    """Base of this direction; the tag names the sender, as the controller's hub receives both."""

    generator: str


class GeneratorReady(Message, frozen=True):
    """The engine is loaded."""

    slots: Annotated[int, msgspec.Meta(ge=1)]
    """Samples decoded at once."""
    policy_version: int
    """Version of its initial weights. -1: they are not a policy of the run, and nothing is
    generated before others are installed."""
    fingerprint: Fingerprint
    metrics_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] | None = None


class SampleFinished(Message, frozen=True):
    """A sample is generated. The generator holds it; its reward may still be pending."""

    sample: SampleId
    length: Annotated[int, msgspec.Meta(ge=1)]
    oldest_version: int
    finish_reason: FinishReason
    digest: Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
    """`wire.messages.data.digest_of` its contents; the trainer accepts only these."""


class SampleRewarded(Message, frozen=True):
    """The reward of a held sample, with `scheduler.dynamic_sampling`; follows `SampleFinished`."""

    sample: SampleId
    reward: Finite
    digest: Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
    """Digest in the `SampleFinished` that it follows: the reward is of these contents."""


class SampleFailed(Message, frozen=True):
    """A sample cannot be generated, and another attempt would fail too."""

    sample: SampleId
    reason: str
    user_error: bool
    """True if the reward or the prompt is at fault: the run ends; `reason` has a remedy."""


class SampleDelivered(Message, frozen=True):
    """The trainer acknowledged the sample; the generator no longer holds it."""

    sample: SampleId


class EvaluationSample(Message, frozen=True):
    """One held-out sample, scored."""

    round: Count
    index: Count
    reward: Finite
    policy_version: int
    newest_version: int = -1
    tokens: Count = 0
    held_seconds: Amount = 0.0
    """Time for which its generator kept its version for this round with a newer one ready."""
    verdict: Verdict = "scored"
    """Unless `scored`, `reward` is 0."""


class EvaluationMissed(Message, frozen=True):
    """Samples of a round cannot finish under the round's version, and were dropped."""

    round: Count
    reason: str
    """A clause that says what happened and begins with the generator's name."""


class WeightsInstalled(Message, frozen=True):
    """The answer to `InstallWeights`: the version that the generator samples from now."""

    policy_version: int


class WrongPolicyFound(Message, frozen=True):
    """The generator's policy differs from the trainer's policy of its version."""

    found: WrongPolicy


class Rescored(Message, frozen=True):
    """The answer to `Rescore`."""

    number: Count
    policy_version: int
    logprobs: tuple[bytes, ...] = ()
    """`[L]` float32 for each sample; empty if they could not be scored."""
    reason: str = ""


class Rewound(Message, frozen=True):
    """The answer to `Rewind`."""

    lineage: int
    policy_version: int
    """-1 if its weights are gone and it waits for others."""


class Released(Message, frozen=True):
    """The answer to `Release`: the generator has forgotten the samples."""

    file: str
    reason: str = ""
    """Reason if it was not written; empty: it is on the disk."""


class GeneratorReport(Message, frozen=True):
    """Counters and state of the generator, twice a second; also its sign of life."""

    engine: EngineStats
    """The generator's token counts are added."""
    held: Count
    rewards_waiting: Count
    rewards: RewardCounts = RewardCounts()
    reward_wait: RewardWait = RewardWait()
    noise_floor: NoiseFloor = NoiseFloor()
    """Rejections of verification under unchanged weights, since its start."""
    in_environments: Count = 0
    """Samples that wait for their environment, without a slot."""
    environment: EnvironmentCounts = EnvironmentCounts()


class Failure(Message, frozen=True):
    """The process failed and is about to end."""

    reason: str
    user_error: bool


class Goodbye(Message, frozen=True):
    """The process ends on request."""


_OfSample = SampleFinished | SampleRewarded | SampleFailed | SampleDelivered
_OfEvaluation = EvaluationSample | EvaluationMissed
_Answer = WeightsInstalled | Rescored | Rewound | Released
_OfProcess = GeneratorReady | WrongPolicyFound | GeneratorReport | Failure | Goodbye
FromGenerator = _OfSample | _OfEvaluation | _Answer | _OfProcess
